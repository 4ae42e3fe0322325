//! A pod with a network namespace without interfaces, and calls of the plugin for it.

use super::called::{self, Called, plugin};
use super::new_netns::{in_netns, new_netns, path_of, tool_in};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) struct Pod {
    /// The container ID.
    pub(crate) name: String,
    netns: File,
}

impl Pod {
    pub(crate) fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        Self { name: format!("detour-delegate-{}-{number}", std::process::id()), netns: new_netns() }
    }

    pub(crate) fn netns(&self) -> PathBuf {
        path_of(&self.netns)
    }

    /// Runs a command in the pod and returns its stdout.
    #[track_caller]
    pub(crate) fn run(&self, command: &[&str]) -> String {
        tool_in(&self.netns(), command[0], &command[1..], "")
    }

    /// Runs `work` in the pod's network namespace.
    pub(crate) fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        in_netns(&self.netns(), work)
    }

    /// Returns the pod's rules as iptables-save prints them, and its exclusions as nft does, one for each UID.
    pub(crate) fn rules(&self) -> Vec<String> {
        let saved = self.run(&["iptables-save"]);
        let listed = self.run(&["nft", "--stateless", "list", "ruleset", "inet"]);
        let redirection = saved.lines().filter(|line| line.starts_with("-A")).map(str::to_owned);
        redirection
            .chain(listed.lines().filter(|line| line.ends_with("goto DETOUR_DIRECT")).flat_map(of_each_uid))
            .collect()
    }

    /// Returns the environment variables that a runtime sets.
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

    /// Calls the plugin with `bin` as `CNI_PATH`.
    pub(crate) fn call(&self, command: &str, bin: &Path, conf: &Value) -> Called {
        call(&self.environment(command, &bin.display().to_string()), conf)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(Path::new("/run/detour/attachments").join(&self.name));
    }
}

/// Runs the plugin with `environment` as its whole environment.
pub(crate) fn call(environment: &BTreeMap<String, String>, conf: &Value) -> Called {
    Called::ended(start(environment, conf))
}

/// Starts the plugin with `environment` as its whole environment.
pub(crate) fn start(environment: &BTreeMap<String, String>, conf: &Value) -> Child {
    let mut conf = conf.clone();
    if environment.get("CNI_COMMAND").is_some_and(|command| command == "CHECK") && conf.get("prevResult").is_none() {
        conf["prevResult"] = Value::Object(serde_json::Map::new());
    }
    called::start(&mut plugin(environment), &conf.to_string())
}

/// Returns the configuration of an attachment that needs no facts: `uid-exclude`, then `executables`.
pub(crate) fn conf(version: &str, executables: &[Value]) -> Value {
    let own = json!({"type": "uid-exclude", "uids": [1337]});
    let chain: Vec<Value> = [own].into_iter().chain(executables.iter().cloned()).collect();
    json!({"cniVersion": version, "name": "mesh", "type": "detour", "chain": chain})
}

/// Returns a configuration with more keys.
pub(crate) fn with(mut conf: Value, more: &Value) -> Value {
    let more = more.as_object().expect("an object").clone();
    conf.as_object_mut().expect("an object").extend(more);
    conf
}

/// Returns one rule for each element of a rule's set of UIDs.
fn of_each_uid(rule: &str) -> Vec<String> {
    let rule = rule.trim();
    let set = rule.split_once("meta skuid { ").and_then(|(before, rest)| Some((before, rest.split_once(" }")?)));
    match set {
        Some((before, (uids, after))) => {
            uids.split(", ").map(|uid| format!("{before}meta skuid {uid}{after}")).collect()
        }
        None => vec![rule.to_owned()],
    }
}
