//! A node's file system in a directory, and commands of the binary on it.

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::agent_process::{Agent, SETTLED, write_account};
use super::directory::Directory;
pub(crate) use super::program::program;

/// The files of an installation.
pub(crate) const LIST: &str = "etc/cni/net.d/10-calico.conflist";
pub(crate) const NODE: &str = "var/lib/cni/detour/node.json";
pub(crate) const KUBECONFIG: &str = "var/lib/cni/detour/kubeconfig";
pub(crate) const RECORD: &str = "var/lib/cni/detour/install.json";
pub(crate) const PROGRAM: &str = "opt/cni/bin/detour";
pub(crate) const OWN: &str = "etc/cni/net.d/00-detour.conflist";
pub(crate) const CALICO: &str = include_str!("../golden/10-calico.conflist");

/// A node. Its directories are removed when the value is dropped.
pub(crate) struct Scene {
    pub(crate) root: Directory,
    /// Files beside the node.
    beside: Directory,
}

impl Scene {
    /// An empty node.
    pub(crate) fn new(name: &str) -> Self {
        Self { root: Directory::new(name), beside: Directory::new(name) }
    }

    /// A node with a service account at /sa.
    pub(crate) fn with_account(name: &str) -> Self {
        let scene = Self::new(name);
        write_account(&scene.path("sa"));
        scene
    }

    /// The same with this cluster network.
    pub(crate) fn with(name: &str, file: &str, text: &str) -> Self {
        let scene = Self::with_account(name);
        scene.write(&format!("etc/cni/net.d/{file}"), text);
        scene
    }

    pub(crate) fn path(&self, within: &str) -> PathBuf {
        self.root.join(within)
    }

    pub(crate) fn write(&self, within: &str, text: &str) {
        let path = self.path(within);
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
        fs::write(path, text).expect("written");
    }

    /// Writes a file of `--config` beside the node. Returns the flag with its path.
    pub(crate) fn config(&self, name: &str, keys: &Value) -> String {
        let path = self.beside.join(name);
        fs::write(&path, keys.to_string()).expect("written");
        format!("--config={}", path.display())
    }

    pub(crate) fn read(&self, within: &str) -> String {
        fs::read_to_string(self.path(within)).unwrap_or_else(|error| panic!("{within}: {error}"))
    }

    pub(crate) fn json(&self, within: &str) -> Value {
        serde_json::from_str(&self.read(within)).expect("JSON")
    }

    pub(crate) fn mode(&self, within: &str) -> u32 {
        fs::metadata(self.path(within)).expect("there").permissions().mode() & 0o7777
    }

    /// The arguments of a command on this node.
    pub(crate) fn arguments(&self, command: &str, more: &[&str]) -> Vec<String> {
        let root = self.root.display();
        let mut arguments = vec![command.to_owned(), format!("--root={root}")];
        if command != "uninstall" && !more.iter().any(|argument| argument.starts_with("--kubeconfig")) {
            arguments.push(format!("--service-account={root}/sa"));
            arguments.push("--api-server=https://10.96.0.1:443".into());
        }
        arguments.extend(more.iter().map(ToString::to_string));
        arguments
    }

    pub(crate) fn run(&self, command: &str, more: &[&str]) -> Output {
        Command::new(program()).args(self.arguments(command, more)).env_clear().output().expect("it starts")
    }

    /// Runs a command that must succeed. Returns its stdout.
    pub(crate) fn ok(&self, command: &str, more: &[&str]) -> String {
        let output = self.run(command, more);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{command} {more:?}: {stderr}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// Runs a command that must fail. Returns its stderr.
    #[track_caller]
    pub(crate) fn fails(&self, command: &str, more: &[&str]) -> String {
        self.ends(1, command, more)
    }

    /// Runs a command that must end with this exit code. Returns its stderr.
    #[track_caller]
    pub(crate) fn ends(&self, code: i32, command: &str, more: &[&str]) -> String {
        let output = self.run(command, more);
        assert_eq!(output.status.code(), Some(code), "{command} {more:?}: {output:?}");
        String::from_utf8(output.stderr).expect("text")
    }

    /// Runs a command that must end with this exit code and print all of `parts` to stderr. Returns its stderr.
    #[track_caller]
    pub(crate) fn reports(&self, code: i32, command: &str, more: &[&str], parts: &[&str]) -> String {
        let stderr = self.ends(code, command, more);
        let missing = parts.iter().find(|part| !stderr.contains(**part));
        assert_eq!(missing, None, "{command} {more:?}: {stderr}");
        stderr
    }

    /// Whether the lock file of installations exists.
    pub(crate) fn has_lock(&self) -> bool {
        self.path("var/lib/cni/detour/install.lock").exists()
    }

    /// Returns every file with contents and mode; a program only with its length, a configuration list without its
    /// formatting.
    pub(crate) fn files(&self) -> BTreeMap<PathBuf, (String, u32)> {
        let mut found = BTreeMap::new();
        collect(&self.root, &self.root, &mut found);
        found
    }
}

impl Agent {
    /// Starts an agent on this node.
    pub(crate) fn start(scene: &Scene, name: &str, more: &[&str]) -> Self {
        Self::spawn(name, &scene.arguments("agent", more))
    }

    /// Starts an agent on this node, and waits until the installation is complete.
    pub(crate) fn settled(scene: &Scene, name: &str, more: &[&str]) -> Self {
        let agent = Self::start(scene, name, more);
        agent.wait_for_log(SETTLED);
        agent
    }
}

fn collect(root: &Path, directory: &Path, found: &mut BTreeMap<PathBuf, (String, u32)>) {
    for entry in fs::read_dir(directory).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            collect(root, &path, found);
        } else if path.file_name().is_some_and(|name| name != "install.lock" && name != "agent.lock") {
            let mut contents = fs::read(&path).expect("readable");
            if path.extension().is_some_and(|extension| extension == "conflist")
                && let Ok(list) = serde_json::from_slice::<Value>(&contents)
            {
                contents = list.to_string().into_bytes();
            }
            let shown = if contents.len() > 1 << 20 {
                contents.len().to_string()
            } else {
                String::from_utf8_lossy(&contents).into()
            };
            let mode = fs::metadata(&path).expect("there").permissions().mode() & 0o7777;
            found.insert(path.strip_prefix(root).expect("below").to_owned(), (shown, mode));
        }
    }
}
