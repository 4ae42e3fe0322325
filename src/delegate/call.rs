//! One plugin call: its parameters, the environment variables that carry them (SPEC.md, "Parameters"), and its execution.

use super::find::{bin_dir, find};
use super::{answer, process};
use crate::cni::{CniCommand, Code, Error, NetConf, Request};
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

    /// Returns the same call with another command.
    #[must_use]
    pub fn with_command(&self, command: CniCommand) -> Self {
        Self { command, ..self.clone() }
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
        let program = find(kind, call)?;
        let stdin = serde_json::to_vec(conf).map_err(|error| Error::new(Code::Internal, error.to_string()))?;
        tracing::debug!(program = %program.display(), "calling {}", call.command);
        let variables = call.variables(bin_dir(call).unwrap_or_default());
        let exit = process::run(&program, &variables, stdin, call.timeout).map_err(|error| {
            let code = if error.is_transient() { Code::TryAgain } else { Code::Delegate };
            Error::new(code, format!("{}: {error}", program.display()))
        })?;
        answer::parse(&program, call.command, &exit)
    }

    fn find(&self, call: &Call, kind: &str) -> Result<(), Error> {
        find(kind, call).map(drop)
    }
}

/// Kills the executable that is running, with its process group. Call it before this process exits while
/// [`Runner::run`] is active.
pub fn kill_running() {
    process::kill_running();
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Returns a DEL call without directories.
    pub(in crate::delegate) fn call() -> Call {
        Call {
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
