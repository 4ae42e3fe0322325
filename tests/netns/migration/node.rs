//! A node with istio-cni, detour, or temporarily both.

use crate::agent_process::{Agent, SETTLED};
use crate::istio::{Dns, rules};
use crate::pod::{self, PROXY};
use crate::scene::{CALICO, Scene};
use crate::world::Family;
use nix::sys::signal::Signal;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// How the plugin is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caller {
    /// By the runtime, for each pod: the plugin is an entry of the cluster network's configuration list.
    Runtime,
    /// By Multus, for pods that select the attachment: the plugin has its own file.
    Multus,
}

/// The cluster network's configuration list.
pub(super) const LIST: &str = "etc/cni/net.d/10-calico.conflist";
/// The attachment's file.
pub(super) const OWN_FILE: &str = "etc/cni/multus/net.d/istio-cni.conf";

/// Removed with the value.
pub(super) struct Node {
    pub(super) scene: Scene,
    pub(super) caller: Caller,
}

impl Node {
    pub(super) fn new(name: &str, caller: Caller) -> Self {
        let scene = Scene::with(&format!("migration-{name}"), "10-calico.conflist", CALICO);
        if caller == Caller::Multus {
            // On OpenShift, the plugin has its own file by default.
            fs::create_dir_all(scene.path("etc/machine-config-daemon")).expect("made");
        }
        for family in [Family::V4, Family::V6] {
            scene.write(&format!("istio-cni/{family:?}.rules"), &rules(family, Dns::Captured, PROXY.uid));
        }
        scene.write("manifests/namespace.yaml", pod::NAMESPACE);
        let node = Self { scene, caller };
        node.injector_makes(&pod::manifest(true, PROXY, &[]));
        node
    }

    /// Sets the manifest of new pods.
    pub(super) fn injector_makes(&self, manifest: &str) {
        self.scene.write("manifests/pod.yaml", manifest);
    }

    pub(super) fn bin_dir(&self) -> PathBuf {
        self.scene.path(match self.caller {
            Caller::Runtime => "opt/cni/bin",
            Caller::Multus => "var/lib/cni/bin",
        })
    }

    /// Starts detour's agent with the chart's sub-plugin chain, and waits until the installation is complete.
    pub(super) fn detour_comes(&self) -> Agent {
        let agent = self.detour_starts();
        agent.wait_for_log(SETTLED);
        agent
    }

    /// Starts detour's agent with the chart's sub-plugin chain.
    pub(super) fn detour_starts(&self) -> Agent {
        let config = json!({
            "kubernetes": { "manifests_dir": self.scene.path("manifests") },
            "chain": [
                { "type": "istio-redirect" },
                { "type": "uid-exclude", "uids": ["1337"] },
                { "type": "dns-exclude", "uids": ["1337"] },
            ],
        });
        self.scene.write("config.json", &config.to_string());
        let config = format!("--config={}", self.scene.path("config.json").display());
        Agent::start(&self.scene, "a", &[&config, "--on-exit=remove"])
    }

    /// Stops detour's agent, which reverts its changes of the node.
    pub(super) fn detour_goes(&self, agent: Agent) {
        assert!(agent.end(Signal::SIGTERM).success());
    }

    /// Installs istio-cni as its agent does at startup and after changes (istio, `cni/pkg/install`): first the program,
    /// then the configuration.
    pub(super) fn istio_cni_comes(&self) {
        let program = self.bin_dir().join("istio-cni");
        fs::create_dir_all(self.bin_dir()).expect("made");
        replace(&program, &istio_cni(&self.scene.path("istio-cni")), 0o755);
        match self.caller {
            Caller::Runtime => self.rewrite_list(|plugins| plugins.push(istio_cni_conf())),
            Caller::Multus => {
                let mut conf = istio_cni_conf();
                conf["cniVersion"] = "0.3.1".into();
                replace(&self.scene.path(OWN_FILE), &as_go_writes(&conf), 0o600);
            }
        }
    }

    /// Uninstalls istio-cni as its agent does when it stops.
    pub(super) fn istio_cni_goes(&self) {
        match self.caller {
            Caller::Runtime => self.rewrite_list(|_| ()),
            Caller::Multus => fs::remove_file(self.scene.path(OWN_FILE)).expect("removed"),
        }
        fs::remove_file(self.bin_dir().join("istio-cni")).expect("removed");
    }

    /// Removes istio-cni's entry and writes the configuration list again.
    fn rewrite_list(&self, change: impl FnOnce(&mut Vec<Value>)) {
        let mut list = self.scene.json(LIST);
        let plugins = list["plugins"].as_array_mut().expect("a list");
        plugins.retain(|plugin| plugin["type"] != "istio-cni");
        change(plugins);
        replace(&self.scene.path(LIST), &as_go_writes(&list), 0o644);
    }

    /// Returns the files that runtimes and Multus read, with contents and mode.
    pub(super) fn configurations(&self) -> BTreeMap<PathBuf, (String, u32)> {
        let mut files = self.scene.files();
        files.retain(|path, _| path.starts_with("etc/cni"));
        files
    }
}

fn istio_cni_conf() -> Value {
    json!({
        "type": "istio-cni", "name": "istio-cni", "plugin_log_level": "info",
        "cni_agent_run_dir": "/var/run/istio-cni", "exclude_namespaces": ["istio-system"],
        "pod_namespace": "istio-cni", "ambient_enabled": false,
    })
}

/// A simulated istio-cni: like the real one, it adds its rules atomically and fails if they exist.
fn istio_cni(rules: &Path) -> String {
    let rules = rules.display();
    format!(
        r#"#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin
cat >/dev/null
[ "$CNI_COMMAND" = ADD ] || exit 0
restore() {{ nsenter --net="$CNI_NETNS" "$1" --noflush "$2"; }}
restore iptables-restore {rules}/V4.rules >&2 && restore ip6tables-restore {rules}/V6.rules >&2 && exit 0
echo '{{"code":999,"msg":"iptables-restore failed"}}'
exit 1
"#
    )
}

/// Formats JSON with sorted keys and an indentation of two (Go, `json.MarshalIndent` of a map).
fn as_go_writes(value: &Value) -> String {
    fn sorted(value: &Value) -> Value {
        match value {
            Value::Object(keys) => {
                let keys: BTreeMap<_, _> = keys.iter().map(|(key, value)| (key.clone(), sorted(value))).collect();
                Value::Object(Map::from_iter(keys))
            }
            Value::Array(items) => items.iter().map(sorted).collect(),
            other => other.clone(),
        }
    }
    format!("{:#}\n", sorted(value))
}

/// Replaces a file atomically.
fn replace(path: &Path, text: &str, mode: u32) {
    let new = path.with_file_name(".new");
    fs::create_dir_all(path.parent().expect("a directory")).expect("made");
    fs::write(&new, text).expect("written");
    fs::set_permissions(&new, PermissionsExt::from_mode(mode)).expect("set");
    fs::rename(&new, path).expect("renamed");
}
