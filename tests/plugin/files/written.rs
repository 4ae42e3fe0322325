//! Files that the binary writes: it follows no links, writes to no file of another user, and uses no lock that another
//! user can hold.

use crate::files::node::{Node, OTHER, call, complaint, give_away, succeeds};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const OPENSHIFT: &str = "--platform=openshift";
const STATE: &str = "host/var/lib/cni/detour";

/// A log file of a test, removed when it is dropped.
struct Log(PathBuf);

impl Log {
    fn new(name: &str) -> Self {
        let path = Path::new("/var/log").join(format!("detour-files-{name}-{}", std::process::id()));
        let log = Self(path);
        log.remove();
        log
    }

    fn remove(&self) {
        let _ = fs::remove_dir_all(&self.0);
        let _ = fs::remove_file(&self.0);
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.remove();
    }
}

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
    let (link, directory, hard, foreign) = (Log::new("link"), Log::new("dir"), Log::new("hard"), Log::new("foreign"));
    symlink(&precious, &link.0).expect("linked");
    symlink(&node.root, &directory.0).expect("linked");
    fs::write(&hard.0, "").expect("written");
    fs::hard_link(&hard.0, hard.0.with_extension("second")).expect("linked");
    let _second = Log(hard.0.with_extension("second"));
    fs::write(&foreign.0, "").expect("written");
    give_away(&foreign.0);
    let up = Path::new("/var/log/../..").join(precious.strip_prefix("/").expect("absolute"));
    for (file, why) in [
        (precious.clone(), "expected a path below /var/log"),
        (up, "expected a path below /var/log"),
        (node.fifo("fifo"), "expected a path below /var/log"),
        (link.0.clone(), "a symbolic link"),
        (directory.0.join("precious"), "a symbolic link"),
        (hard.0.clone(), "got 2 (hard links)"),
        (foreign.0.clone(), "owned by UID 12345"),
    ] {
        let output = logged("log_file", &file);
        succeeds(&output);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let warning = stderr.lines().find(|line| line.contains("logging to stderr only")).expect("a warning");
        assert!(warning.contains(why) && warning.contains("level=warn"), "{warning}");
        assert!(stderr.contains("kubernetes.odd"), "{stderr}");
    }
    assert_eq!(fs::read_to_string(&precious).expect("read"), "as it was");
    for file in [&hard.0, &foreign.0] {
        assert_eq!(fs::read_to_string(file).expect("read"), "", "{}", file.display());
    }
}

#[test]
fn a_log_file_below_var_log_is_written() {
    let log = Log::new("fine");
    fs::create_dir(&log.0).expect("made");
    for key in ["log_file", "logFile"] {
        let file = log.0.join(key);
        logged(key, &file);
        assert!(fs::read_to_string(&file).expect("read").contains("kubernetes.odd"));
        assert_eq!(fs::metadata(&file).expect("there").mode() & 0o137, 0);
    }
}

#[test]
fn a_configuration_with_an_invalid_log_file_is_not_installed() {
    let node = Node::new();
    for file in ["/etc/passwd", "/var/log/../../etc/passwd", "/var/log", "/var/logs/a"] {
        let config = node.file("config", json!({"log_file": file}).to_string());
        let message = complaint(&node.install(&[OPENSHIFT, &format!("--config={}", config.display())]));
        assert!(message.contains(&format!("log_file: invalid value {file:?}")), "{message}");
        assert!(!node.path("host/etc").exists());
    }
    let config = node.file("config", json!({"log_file": "/var/log/pods/detour.log"}).to_string());
    succeeds(&node.install(&[OPENSHIFT, &format!("--config={}", config.display())]));
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
    fs::set_permissions(&node.root, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("set");
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

#[test]
fn a_list_with_an_escaped_key_is_restored() {
    let node = Node::new();
    let text = r#"{"name":"n", "pl\u0075gins" : [{"type":"a"}]}"#;
    let list = node.file("host/etc/cni/net.d/10-net.conflist", text);
    succeeds(&node.install(&["--chained=true"]));
    assert!(fs::read_to_string(&list).expect("read").contains("detour"));
    succeeds(&node.uninstall());
    let json = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    assert_eq!(json(&fs::read_to_string(&list).expect("read")), json(text));
}
