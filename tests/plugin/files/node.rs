//! A directory with the files of a test, runs of the binary with a timeout, and files that the binary writes: it follows no
//! links, writes to no file of another user, and uses no lock that another user can hold.

use crate::support::api::kubeconfig_of;
use crate::support::directory::Directory;
use crate::support::netns_pod::Pod;
use nix::sys::stat::Mode;
use nix::unistd::{Uid, chown, mkfifo};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// An untrusted user.
pub(crate) const OTHER: u32 = 12345;

/// The files of a node.
pub(crate) struct Node {
    pub(crate) root: Directory,
}

impl Node {
    pub(crate) fn new() -> Self {
        Self { root: Directory::new("files") }
    }

    pub(crate) fn path(&self, within: &str) -> PathBuf {
        self.root.join(within)
    }

    /// Creates a file with this text and returns its path.
    pub(crate) fn file(&self, within: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(within);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(&path, text).expect("written");
        path
    }

    /// Creates a file of another user and returns its path.
    pub(crate) fn of_another(&self, within: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.file(within, text);
        give_away(&path);
        path
    }

    /// Creates a FIFO and returns its path.
    pub(crate) fn fifo(&self, within: &str) -> PathBuf {
        let path = self.path(within);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        mkfifo(&path, Mode::S_IRWXU).expect("made");
        path
    }

    /// Creates a kubeconfig with a server and with these keys of cluster and user.
    pub(crate) fn kubeconfig(&self, within: &str, server: &str, cluster: Value, user: &Value) -> PathBuf {
        let mut cluster = cluster;
        cluster["server"] = server.into();
        self.file(within, kubeconfig_of(&cluster, user))
    }

    /// Runs `detour install` with a service account, below this directory.
    pub(crate) fn install(&self, more: &[&str]) -> Output {
        self.service_account();
        let (root, account) = (self.root.join("host"), self.root.join("sa"));
        let root = format!("--root={}", root.display());
        let account = format!("--service-account={}", account.display());
        fs::create_dir_all(self.path("host")).expect("made");
        detour(&[&["install", &root, &account, "--api-server=https://192.0.2.1"], more].concat())
    }

    fn service_account(&self) {
        for (name, text) in [("sa/ca.crt", "-----BEGIN CERTIFICATE-----\n"), ("sa/token", "token")] {
            if !self.path(name).exists() {
                self.file(name, text);
            }
        }
    }
}

pub(crate) fn give_away(path: &Path) {
    chown(path, Some(Uid::from_raw(OTHER)), None).expect("needs root");
}

/// Runs the binary with a timeout (timeout(1): exit code 124).
pub(crate) fn detour(arguments: &[&str]) -> Output {
    ends(command().args(arguments).stdin(Stdio::null()))
}

/// Runs a call of the plugin for the pod `shop/web-0` in a new network namespace.
pub(crate) fn call(verb: &str, conf: &Value) -> Output {
    let pod = Pod::new();
    let netns = pod.netns();
    let mut whole = json!({"cniVersion": "1.1.0", "name": "n", "type": "detour"});
    whole.as_object_mut().expect("an object").extend(conf.as_object().expect("an object").clone());
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    writer.write_all(whole.to_string().as_bytes()).expect("it fits into the pipe");
    drop(writer);
    let environment = [
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", "files-test"),
        ("CNI_NETNS", netns.to_str().expect("text")),
        ("CNI_IFNAME", "net1"),
        ("CNI_PATH", "/opt/cni/bin"),
        ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
    ];
    ends(command().envs(environment).stdin(reader))
}

/// Returns code, message and details of a failed call.
pub(crate) fn refusal(output: &Output) -> (u64, String) {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error: Value = serde_json::from_slice(&output.stdout).expect("an error object");
    let text = |key: &str| error[key].as_str().unwrap_or_default();
    (error["code"].as_u64().expect("a number"), format!("{}: {}", text("msg"), text("details")))
}

/// Returns the output of a command.
pub(crate) fn printed(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// Returns the output of a command that fails.
pub(crate) fn complaint(output: &Output) -> String {
    assert!(matches!(output.status.code(), Some(1 | 2)), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
pub(crate) fn succeeds(output: &Output) {
    assert!(output.status.success(), "{output:?}");
}

fn command() -> Command {
    let mut command = Command::new("timeout");
    command.arg("60").arg(env!("CARGO_BIN_EXE_detour")).env_clear();
    command
}

#[track_caller]
fn ends(command: &mut Command) -> Output {
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().expect("it starts");
    assert_ne!(output.status.code(), Some(124), "it hangs: {output:?}");
    output
}

const OPENSHIFT: &str = "--platform=openshift";
const STATE: &str = "host/var/lib/cni/detour";

/// Runs a call that logs a warning.
fn logged(key: &str, file: &Path) -> Output {
    let mut conf = json!({"exclude_namespaces": "shop", "kubernetes": {"odd": 1}});
    conf[key] = json!(file);
    if key == "logFile" {
        conf["clusterNetwork"] = "net".into();
    }
    call("DEL", &conf)
}

#[test]
fn an_invalid_log_file_is_not_written_and_the_call_succeeds() {
    let node = Node::new();
    let precious = node.file("precious", "as it was");
    let logs = Directory::below(Path::new("/var/log"), "files");
    let [link, directory, hard, foreign] = ["link", "directory", "hard", "foreign"].map(|name| logs.join(name));
    symlink(&precious, &link).expect("linked");
    symlink(&*node.root, &directory).expect("linked");
    fs::write(&hard, "").expect("written");
    fs::hard_link(&hard, hard.with_extension("second")).expect("linked");
    fs::write(&foreign, "").expect("written");
    give_away(&foreign);
    let up = Path::new("/var/log/../..").join(precious.strip_prefix("/").expect("absolute"));
    for (file, why) in [
        (precious.clone(), "expected a path below /var/log"),
        (up, "expected a path below /var/log"),
        (node.fifo("fifo"), "expected a path below /var/log"),
        (link, "a symbolic link"),
        (directory.join("precious"), "a symbolic link"),
        (hard.clone(), "got 2 (hard links)"),
        (foreign.clone(), "owned by UID 12345"),
    ] {
        let output = logged("log_file", &file);
        succeeds(&output);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let warning = stderr.lines().find(|line| line.contains("logging to stderr only")).expect("a warning");
        assert!(warning.contains(why) && warning.contains("level=warn"), "{warning}");
        assert!(stderr.contains("kubernetes.odd"), "{stderr}");
    }
    assert_eq!(fs::read_to_string(&precious).expect("read"), "as it was");
    for file in [&hard, &foreign] {
        assert_eq!(fs::read_to_string(file).expect("read"), "", "{}", file.display());
    }
}

#[test]
fn a_log_file_below_var_log_is_written() {
    let logs = Directory::below(Path::new("/var/log"), "files");
    for key in ["log_file", "logFile"] {
        let file = logs.join(key);
        logged(key, &file);
        assert!(fs::read_to_string(&file).expect("read").contains("kubernetes.odd"));
        assert_eq!(fs::metadata(&file).expect("there").mode() & 0o137, 0);
    }
}

#[test]
fn a_lock_that_is_a_link_is_refused() {
    let node = Node::new();
    fs::create_dir_all(node.path(STATE)).expect("made");
    symlink(node.path("outside"), node.path(&format!("{STATE}/install.lock"))).expect("linked");
    let message = complaint(&node.install(&[OPENSHIFT]));
    assert!(message.contains("install.lock") && message.contains("a symbolic link"), "{message}");
    assert!(!node.path("outside").exists());
}

#[test]
fn other_users_cannot_hold_a_lock() {
    let node = Node::new();
    fs::set_permissions(&*node.root, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("set");
    succeeds(&node.install(&[OPENSHIFT]));
    let lock = node.path(&format!("{STATE}/install.lock"));
    let flock = || Command::new("flock").arg("-n").arg(&lock).arg("true").uid(OTHER).output().expect("it starts");
    assert!(!flock().status.success());
    // The lock of an earlier version.
    fs::set_permissions(&lock, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("set");
    assert!(flock().status.success());
    succeeds(&node.install(&[OPENSHIFT]));
    assert!(!flock().status.success());
}

#[test]
fn a_link_at_the_path_of_a_temporary_file_is_replaced() {
    let node = Node::new();
    let precious = node.file("precious", "as it was");
    let names = ["host/var/lib/cni/bin/.detour-detour.tmp", &format!("{STATE}/.detour-kubeconfig.tmp")];
    for name in names {
        fs::create_dir_all(node.path(name).parent().expect("a directory")).expect("made");
        symlink(&precious, node.path(name)).expect("linked");
    }
    succeeds(&node.install(&[OPENSHIFT]));
    assert_eq!(fs::read_to_string(&precious).expect("read"), "as it was");
    assert!(fs::metadata(node.path("host/var/lib/cni/bin/detour")).expect("there").len() > 1 << 20);
    for name in names {
        assert!(!node.path(name).is_symlink(), "{name}");
    }
}
