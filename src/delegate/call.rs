//! One plugin call: its parameters, the environment variables that carry them (SPEC.md, "Parameters"), its
//! executable, which only root may be able to change, and its execution.

use super::process;
use crate::cni::{CniCommand, Code, Error, NetConf, Request, SUB_PLUGINS, did_you_mean};
use crate::trusted_file;
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// One call of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// `CNI_COMMAND`.
    pub command: CniCommand,
    /// `CNI_CONTAINERID`; empty for GC and STATUS.
    pub container_id: String,
    /// `CNI_NETNS`; empty if the call has none.
    pub netns: PathBuf,
    /// `CNI_IFNAME`; empty for GC and STATUS.
    pub ifname: String,
    /// `CNI_ARGS`; with `None`, the plugin inherits the variable of this process.
    pub args: Option<String>,
    /// `kubernetes.cni_bin_dir`: searched for the executable before `path`.
    pub bin_dir: Option<PathBuf>,
    /// `CNI_PATH` of the call that this process serves, without `bin_dir`.
    pub path: Vec<PathBuf>,
    /// The timeout of the plugin.
    pub timeout: Duration,
}

impl Call {
    /// Returns the call that this process serves, to be forwarded to a plugin.
    #[must_use]
    pub fn forward(request: &Request, conf: &NetConf) -> Self {
        let bin_dir = conf.kubernetes.cni_bin_dir.clone();
        Self {
            command: request.command,
            container_id: request.container_id.clone(),
            netns: request.netns.clone().unwrap_or_default(),
            ifname: request.ifname.clone(),
            args: None,
            path: request.path.iter().filter(|path| bin_dir.as_ref() != Some(path)).cloned().collect(),
            bin_dir,
            timeout: conf.delegate_timeout,
        }
    }

    /// Returns the directories that are searched for the executable, in order.
    pub(super) fn directories(&self) -> impl Iterator<Item = &Path> {
        self.bin_dir.iter().chain(&self.path).map(PathBuf::as_path)
    }

    /// Returns the variables to set for the plugin, with `bin_dir` first in `CNI_PATH`. The plugin inherits all
    /// other variables of this process, as with the reference library (`pkg/invoke/args.go`).
    pub(super) fn variables(&self, bin_dir: Option<&Path>) -> Vec<(&'static str, OsString)> {
        let directories: Vec<_> =
            bin_dir.into_iter().chain(self.path.iter().map(PathBuf::as_path)).map(Path::as_os_str).collect();
        let mut variables = vec![
            ("CNI_COMMAND", self.command.to_string().into()),
            ("CNI_CONTAINERID", self.container_id.clone().into()),
            ("CNI_NETNS", self.netns.clone().into()),
            ("CNI_IFNAME", self.ifname.clone().into()),
            ("CNI_PATH", directories.join(":".as_ref())),
        ];
        variables.extend(self.args.as_ref().map(|args| ("CNI_ARGS", args.into())));
        variables
    }
}

/// Runs plugins.
pub trait Runner {
    /// Calls the plugin of type `kind` with `conf` on stdin. Returns the result that it prints for ADD, or `None`
    /// if it prints nothing.
    ///
    /// # Errors
    /// The plugin's own error with its code, or the reason why the plugin could not run.
    fn run(&self, call: &Call, kind: &str, conf: &Map<String, Value>) -> Result<Option<Value>, Error>;

    /// Checks that the plugin of type `kind` can be run.
    ///
    /// # Errors
    /// The plugin is missing or not trusted.
    fn find(&self, call: &Call, kind: &str) -> Result<(), Error>;
}

/// Runs plugins as child processes: executables named after the plugin type, in the directories of the call.
#[derive(Debug, Clone, Copy)]
pub struct Executables;

impl Runner for Executables {
    fn run(&self, call: &Call, kind: &str, conf: &Map<String, Value>) -> Result<Option<Value>, Error> {
        let (program, bin_dir) = find(kind, call)?;
        let stdin = serde_json::to_vec(conf).map_err(|error| Error::new(Code::Internal, error.to_string()))?;
        tracing::debug!(program = %program.display(), "calling {}", call.command);
        let exit = process::run(&program, &call.variables(bin_dir), &stdin, call.timeout).map_err(|error| {
            let code = if error.is_transient() { Code::TryAgain } else { Code::Delegate };
            Error::new(code, format!("{}: {error}", program.display()))
        })?;
        super::parse(&program, call.command, &exit)
    }

    fn find(&self, call: &Call, kind: &str) -> Result<(), Error> {
        find(kind, call).map(drop)
    }
}

/// Returns the first regular file named `kind` in the directories of `call`, and [`bin_dir`]. Only root can change the
/// file or a directory on its path, so it stays the same file until it runs.
///
/// # Errors
/// [`Code::InvalidConfig`]: file not found; `kind` is not a file name (a configuration must not reach files outside
/// of these directories); or another user can change the file or a directory on its path. Such a file is an error:
/// the next directory is not tried.
fn find<'a>(kind: &str, call: &'a Call) -> Result<(PathBuf, Option<&'a Path>), Error> {
    if kind.is_empty() || kind == "." || kind == ".." || kind.contains(['/', '\0']) {
        let msg = format!("invalid type {kind:?}; expected the name of an executable in CNI_PATH, without /");
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    let refused = |why: String| Error::new(Code::InvalidConfig, format!("plugin {kind:?} is not executed: {why}"));
    // Checked even if it has no file `kind`: the plugin searches the same directories for its IPAM plugin.
    let bin_dir = bin_dir(call).map_err(refused)?;
    let mut candidates = call.directories().map(|directory| directory.join(kind));
    let Some(file) = candidates.find(|file| is_file(file)) else {
        let directories: Vec<_> = call.directories().map(|directory| directory.display().to_string()).collect();
        let suggestion = did_you_mean(kind, SUB_PLUGINS);
        let install = "; install it in one of these directories or correct the type";
        let next = if suggestion.is_empty() { install } else { suggestion.as_str() };
        let msg = format!("failed to find plugin {kind:?} in path [{}]{next}", directories.join(" "));
        return Err(Error::new(Code::InvalidConfig, msg));
    };
    trusted_file::check(&file).map_err(|error| refused(error.to_string()))?;
    Ok((file, bin_dir))
}

/// Returns the directory that the configuration names, if it exists. A missing directory is not passed to plugins:
/// another user may create it while they run.
///
/// # Errors
/// The reason why it is not used: another user can change it or a directory on its path, or it contains system commands.
fn bin_dir(call: &Call) -> Result<Option<&Path>, String> {
    let Some(directory) = call.bin_dir.as_deref() else { return Ok(None) };
    match trusted_file::check(directory) {
        Ok(resolved) if has_system_commands(&resolved) => {
            let shown = directory.display();
            Err(format!("{shown} contains system commands; expected a directory that contains only CNI plugins"))
        }
        Ok(_) => Ok(Some(directory)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns whether a directory contains shells or other system commands. Authors of configurations must not reach
/// them: a shell would execute the configuration that it gets on stdin.
fn has_system_commands(resolved: &Path) -> bool {
    const SYSTEM: [&str; 6] = ["/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin"];
    const SHELLS: [&str; 3] = ["sh", "bash", "busybox"];
    SYSTEM.iter().any(|system| resolved == Path::new(system))
        || SHELLS.iter().any(|shell| resolved.join(shell).symlink_metadata().is_ok())
}

fn is_file(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    impl Call {
        /// Returns a DEL call without directories.
        pub(in crate::delegate) fn example() -> Self {
            Self {
                command: CniCommand::Del,
                container_id: "c".into(),
                netns: PathBuf::new(),
                ifname: "eth0".into(),
                args: None,
                bin_dir: None,
                path: Vec::new(),
                timeout: Duration::from_secs(1),
            }
        }
    }

    #[test]
    fn a_forwarded_call_has_the_bin_dir_first_in_cni_path() {
        let request = Request::parse(|name| {
            let value = match name {
                "CNI_COMMAND" => "DEL",
                "CNI_CONTAINERID" => "c1",
                "CNI_IFNAME" => "eth0",
                "CNI_PATH" => "/a:/x:/b",
                _ => return None,
            };
            Some(value.to_owned())
        })
        .expect("a request");
        let conf = br#"{"name": "n", "type": "detour", "kubernetes": {"cni_bin_dir": "/x"}}"#;
        let conf = NetConf::parse(conf, CniCommand::Del, "detour").expect("a configuration");
        let call = Call::forward(&request, &conf);
        let variables: HashMap<_, _> = call.variables(call.bin_dir.as_deref()).into_iter().collect();
        let wanted = [
            ("CNI_COMMAND", "DEL"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", ""),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/x:/a:/b"),
        ];
        assert_eq!(variables, wanted.map(|(name, value)| (name, OsString::from(value))).into());
        assert_eq!(call.timeout, Duration::from_secs(60));
    }
}

#[cfg(test)]
mod find_tests {
    use super::*;
    use nix::unistd::{Uid, chown};
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn find(kind: &str, call: &Call) -> Result<PathBuf, Error> {
        super::find(kind, call).map(|(file, _)| file)
    }

    /// A directory that is removed after the test.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str) -> Self {
            let root = std::env::temp_dir().join(format!("detour-find-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            fs::create_dir_all(&root).expect("a directory");
            Self(root)
        }

        fn file(&self, name: &str) -> PathBuf {
            let path = self.0.join(name);
            fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
            fs::write(&path, "").expect("a file");
            path
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn call(bin_dir: Option<&Path>, path: &[PathBuf]) -> Call {
        Call { bin_dir: bin_dir.map(Path::to_owned), path: path.to_vec(), ..Call::example() }
    }

    #[test]
    fn the_first_regular_file_is_used() {
        let root = Root::new("first");
        let path = ["none", "a", "b", "c"].map(|name| root.0.join(name));
        fs::create_dir_all(path[1].join("x")).expect("a directory of that name");
        let (second, third) = (root.file("b/x"), root.file("c/x"));
        assert_eq!(find("x", &call(None, &path)), Ok(second));
        assert_eq!(find("x", &call(Some(&path[3]), &path)), Ok(third));
        let error = find("y", &call(None, &path[..2])).expect_err("not there");
        assert_eq!(error.code, Code::InvalidConfig);
        let wanted = format!("failed to find plugin \"y\" in path [{0}/none {0}/a]; ", root.0.display());
        assert!(error.msg.starts_with(&wanted), "{error}");
        let error = find("dns-exlude", &call(None, &path[..2])).expect_err("not there");
        assert!(error.msg.ends_with("/a]; did you mean \"dns-exclude\"?"), "{error}");
    }

    #[test]
    fn a_type_that_is_not_a_file_name_is_refused() {
        for kind in ["", ".", "..", "../sh", "/bin/sh", "a/b", "a\0b"] {
            let error = find(kind, &call(None, &["/".into(), "/bin".into()])).expect_err("refused");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.contains("invalid type "), "{error}");
        }
    }

    #[test]
    fn a_file_that_another_user_can_change_is_an_error_and_not_skipped() {
        let root = Root::new("changed");
        let (first, second) = (root.file("a/x"), root.file("b/x"));
        let path = [root.0.join("a"), root.0.join("b")];
        type Change = fn(&Path);
        let given: Change = |path| chown(path, Some(Uid::from_raw(12345)), None).expect("root");
        let writable: Change = |path| fs::set_permissions(path, Permissions::from_mode(0o777)).expect("changed");
        for (changed, change, what) in [
            (&first, given, "is owned by UID 12345; expected root; run chown root:root "),
            (&first, writable, "has mode 0777; expected one that only root can write to; run chmod go-w "),
            (&path[0], given, "is owned by UID 12345"),
            (&path[0], writable, "has mode 0777"),
        ] {
            assert_eq!(find("x", &call(None, &path)), Ok(first.clone()));
            change(changed);
            let error = find("x", &call(None, &path)).expect_err("refused");
            let wanted = format!("plugin \"x\" is not executed: {} {what}", changed.display());
            assert!(error.code == Code::InvalidConfig && error.msg.starts_with(&wanted), "{error}");
            chown(changed, Some(Uid::from_raw(0)), None).expect("root");
            fs::set_permissions(changed, Permissions::from_mode(0o755)).expect("changed");
        }
        // A symbolic link is judged by its target.
        fs::remove_file(&first).expect("removed");
        symlink(&second, &first).expect("a link");
        assert_eq!(find("x", &call(None, &path)), Ok(first.clone()), "the path of the link");
        given(&second);
        let error = find("x", &call(None, &path)).expect_err("refused");
        assert!(error.msg.contains(&format!("{} is owned by UID 12345", second.display())), "{error}");
    }

    /// `sh` would execute the configuration on stdin.
    #[test]
    fn a_configured_directory_with_system_commands_is_refused() {
        let root = Root::new("system");
        let with_a_shell = root.file("tools/busybox");
        let link = root.0.join("link");
        symlink("/usr/bin", &link).expect("a link");
        for directory in [Path::new("/bin"), Path::new("/usr/sbin"), &link, with_a_shell.parent().expect("a directory")]
        {
            let error = find("sh", &call(Some(directory), &[])).expect_err("refused");
            let wanted = format!("plugin \"sh\" is not executed: {} contains system commands", directory.display());
            assert!(error.code == Code::InvalidConfig && error.msg.starts_with(&wanted), "{error}");
        }
    }

    #[test]
    fn the_configured_directory_must_be_trusted_or_missing() {
        let root = Root::new("configured");
        let (own, found) = (root.file("own/other"), root.file("b/x"));
        let (own, path) = (own.parent().expect("a directory"), [root.0.join("b")]);
        assert_eq!(find("x", &call(Some(own), &path)), Ok(found.clone()));
        assert_eq!(bin_dir(&call(Some(own), &path)).expect("trusted"), Some(own));
        chown(own, Some(Uid::from_raw(12345)), None).expect("root");
        let error = find("x", &call(Some(own), &path)).expect_err("plugins would search it");
        assert!(error.msg.contains(&format!("{} is owned by UID 12345", own.display())), "{error}");
        let missing = root.0.join("missing");
        assert_eq!(find("x", &call(Some(&missing), &path)), Ok(found));
        assert_eq!(bin_dir(&call(Some(&missing), &path)).expect("missing"), None);
    }
}
