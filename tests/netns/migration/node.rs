//! A node that has istio-cni, or detour, or both for a while.

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

/// Who calls the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caller {
    /// The runtime, for each pod: the plugin is a member of the cluster network's list.
    Runtime,
    /// Multus, for the pods that name the attachment, by a file of the plugin's own.
    Multus,
}

/// The cluster network's list.
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
            // OpenShift, where the plugin has a file of its own unless told otherwise.
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

    /// From now on, this is what a new pod is.
    pub(super) fn injector_makes(&self, manifest: &str) {
        self.scene.write("manifests/pod.yaml", manifest);
    }

    pub(super) fn bin_dir(&self) -> PathBuf {
        self.scene.path(match self.caller {
            Caller::Runtime => "opt/cni/bin",
            Caller::Multus => "var/lib/cni/bin",
        })
    }

    /// Starts detour's agent, with the chain that the chart has, and waits until all is done.
    pub(super) fn detour_comes(&self) -> Agent {
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
        let agent = Agent::start(&self.scene, "a", &[&config, "--on-exit=remove"]);
        agent.wait_for_log(SETTLED);
        agent
    }

    /// Ends detour's agent, which takes all that it put there off the node.
    pub(super) fn detour_goes(&self, agent: Agent) {
        assert!(agent.end(Signal::SIGTERM).success());
    }

    /// What istio-cni's agent does when it comes to a node, or finds something changed (istio,
    /// `cni/pkg/install`): program first, then the configuration.
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

    /// What it does when it ends.
    pub(super) fn istio_cni_goes(&self) {
        match self.caller {
            Caller::Runtime => self.rewrite_list(|_| ()),
            Caller::Multus => fs::remove_file(self.scene.path(OWN_FILE)).expect("removed"),
        }
        fs::remove_file(self.bin_dir().join("istio-cni")).expect("removed");
    }

    /// Takes istio-cni's member out, and makes the list anew.
    fn rewrite_list(&self, change: impl FnOnce(&mut Vec<Value>)) {
        let mut list = self.scene.json(LIST);
        let plugins = list["plugins"].as_array_mut().expect("a list");
        plugins.retain(|plugin| plugin["type"] != "istio-cni");
        change(plugins);
        replace(&self.scene.path(LIST), &as_go_writes(&list), 0o644);
    }

    /// The files by which runtimes and Multus go, with contents and mode.
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

/// A stand-in with its rules: as the real one it adds them in one go, and fails where they are.
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

/// Keys sorted, two blanks (Go, `json.MarshalIndent` of a map).
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

/// Replaces a file as a whole.
fn replace(path: &Path, text: &str, mode: u32) {
    let new = path.with_file_name(".new");
    fs::create_dir_all(path.parent().expect("a directory")).expect("made");
    fs::write(&new, text).expect("written");
    fs::set_permissions(&new, PermissionsExt::from_mode(mode)).expect("set");
    fs::rename(&new, path).expect("renamed");
}
