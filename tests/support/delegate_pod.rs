//! A pod: a network namespace of its own, and calls of the plugin for it.

use netns_rs::NetNs;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) struct Pod {
    /// Also the container ID.
    pub(crate) name: String,
    /// Taken out when it is removed.
    netns: Option<NetNs>,
}

/// What a call left behind.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) success: bool,
    /// What stdout holds; `Null` where it is empty.
    pub(crate) stdout: Value,
    pub(crate) stderr: String,
}

impl Pod {
    pub(crate) fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        // The first one makes /run/netns a mount point of its own, which must not happen twice.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("detour-delegate-{}-{number}", std::process::id());
        let netns = NetNs::new(&name).expect("a network namespace (are you root?)");
        Self { name, netns: Some(netns) }
    }

    pub(crate) fn netns(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// What a command in the pod prints.
    pub(crate) fn run(&self, command: &[&str]) -> String {
        let output = self.inside(|| Command::new(command[0]).args(&command[1..]).output());
        let output = output.unwrap_or_else(|e| panic!("{command:?}: {e}"));
        assert!(output.status.success(), "{command:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// What `work` comes to in the pod's network namespace.
    pub(crate) fn inside<T>(&self, work: impl FnOnce() -> T) -> T {
        self.netns.as_ref().expect("it is there until it is dropped").run(|_| work()).expect("entered")
    }

    /// The pod's rules of ours.
    pub(crate) fn rules(&self) -> Vec<String> {
        let saved = self.run(&["iptables-save"]);
        saved.lines().filter(|line| line.starts_with("-A")).map(str::to_owned).collect()
    }

    /// The variables that a runtime sets.
    pub(crate) fn environment(&self, command: &str, path: &str) -> BTreeMap<String, String> {
        [
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", &self.name),
            ("CNI_NETNS", &self.netns().display().to_string()),
            ("CNI_IFNAME", "eth0"),
            ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
            ("CNI_PATH", path),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
    }

    /// A call with plugins looked for in `bin`.
    pub(crate) fn call(&self, command: &str, bin: &Path, conf: &Value) -> Output {
        call(&self.environment(command, &bin.display().to_string()), conf)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.netns.take().map(NetNs::remove) {
            eprintln!("{}: remove: {error}", self.name);
        }
        let _ = std::fs::remove_dir_all(Path::new("/run/detour/attachments").join(&self.name));
    }
}

/// Runs the plugin with nothing in its environment but `environment`.
pub(crate) fn call(environment: &BTreeMap<String, String>, conf: &Value) -> Output {
    ended(start(environment, conf))
}

/// Starts it.
pub(crate) fn start(environment: &BTreeMap<String, String>, conf: &Value) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_detour"))
        .env_clear()
        .envs(environment)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("run detour");
    let mut conf = conf.clone();
    if environment.get("CNI_COMMAND").is_some_and(|command| command == "CHECK") && conf.get("prevResult").is_none() {
        conf["prevResult"] = Value::Object(serde_json::Map::new());
    }
    child.stdin.take().expect("it is piped").write_all(conf.to_string().as_bytes()).expect("it reads");
    child
}

/// What a call left behind.
pub(crate) fn ended(child: Child) -> Output {
    let output = child.wait_with_output().expect("wait for detour");
    let stdout = match output.stdout.as_slice() {
        [] => Value::Null,
        text => serde_json::from_slice(text).unwrap_or_else(|e| panic!("stdout is not JSON: {e}: {output:?}")),
    };
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    Output { success: output.status.success(), stdout, stderr }
}

/// An attachment that needs no facts; `uid-exclude` writes rules, the others are executables.
pub(crate) fn conf(version: &str, executables: &[Value]) -> Value {
    let own = json!({"type": "uid-exclude", "uids": [1337]});
    let chain: Vec<Value> = [own].into_iter().chain(executables.iter().cloned()).collect();
    json!({"cniVersion": version, "name": "mesh", "type": "detour", "chain": chain})
}

/// A configuration with more keys.
pub(crate) fn with(mut conf: Value, more: &Value) -> Value {
    let more = more.as_object().expect("an object").clone();
    conf.as_object_mut().expect("an object").extend(more);
    conf
}
