//! A directory with the files of a test, and runs of the binary with a timeout.

use netns_rs::NetNs;
use nix::sys::stat::Mode;
use nix::unistd::{Uid, chown, mkfifo};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// An untrusted user.
pub(crate) const OTHER: u32 = 12345;

/// A temporary directory, removed when it is dropped.
pub(crate) struct Node {
    pub(crate) root: PathBuf,
}

impl Node {
    pub(crate) fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("detour-files-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(&root).expect("made");
        Self { root }
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
        let text = json!({
            "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": cluster}], "users": [{"name": "u", "user": user}],
        });
        self.file(within, text.to_string())
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

    pub(crate) fn uninstall(&self) -> Output {
        detour(&["uninstall", "--root", self.path("host").to_str().expect("text")])
    }

    fn service_account(&self) {
        for (name, text) in [("sa/ca.crt", "-----BEGIN CERTIFICATE-----\n"), ("sa/token", "token")] {
            if !self.path(name).exists() {
                self.file(name, text);
            }
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

pub(crate) fn give_away(path: &Path) {
    chown(path, Some(Uid::from_raw(OTHER)), None).expect("needs root");
}

/// Runs the binary with a timeout of ten seconds (timeout(1): exit code 124).
pub(crate) fn detour(arguments: &[&str]) -> Output {
    ends(command().args(arguments).stdin(Stdio::null()))
}

/// Runs a call of the plugin for the pod `shop/web-0` in a new network namespace.
pub(crate) fn call(verb: &str, conf: &Value) -> Output {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    let netns = NetNs::new(format!("detour-files-{}-{number}", std::process::id())).expect("needs root");
    let mut whole = json!({"cniVersion": "1.1.0", "name": "n", "type": "detour"});
    whole.as_object_mut().expect("an object").extend(conf.as_object().expect("an object").clone());
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    writer.write_all(whole.to_string().as_bytes()).expect("it fits into the pipe");
    drop(writer);
    let environment = [
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", "files-test"),
        ("CNI_NETNS", netns.path().to_str().expect("text")),
        ("CNI_IFNAME", "net1"),
        ("CNI_PATH", "/opt/cni/bin"),
        ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
    ];
    let output = ends(command().envs(environment).stdin(reader));
    netns.remove().expect("removed");
    output
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
    command.arg("10").arg(env!("CARGO_BIN_EXE_detour")).env_clear();
    command
}

#[track_caller]
fn ends(command: &mut Command) -> Output {
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().expect("it starts");
    assert_ne!(output.status.code(), Some(124), "it hangs: {output:?}");
    output
}
