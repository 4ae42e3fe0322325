//! The node configuration file: which of its keys override those of definitions.

use crate::delegates::pod::with;
use crate::delegates::recorders::Recorders;
use crate::node::{Node, pod_object};
use crate::support::called::Called;
use nix::unistd::{Uid, chown};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

impl Node {
    /// Creates a node whose configuration sets the source of facts, the program directory, and `more`, with a pod that
    /// excludes a UID.
    fn stating(more: &Value) -> Self {
        let node = Self::with(Recorders::new().with("first", ""));
        let mut pod = pod_object("");
        pod["metadata"]["annotations"]["detour.io/exclude-uids"] = "4321".into();
        node.manifest("pod", &pod);
        fs::create_dir(node.dir.join("detour")).expect("made");
        let kubernetes = json!({
            "manifests_dir": node.dir.join("manifests"), "cni_bin_dir": node.recorders.bin(),
            "exclude_namespaces": ["kube-system"],
        });
        node.states(&with(json!({"kubernetes": kubernetes}), more).to_string());
        node
    }

    fn states(&self, text: &str) {
        fs::write(self.file(), text).expect("written");
        fs::set_permissions(self.file(), Permissions::from_mode(0o600)).expect("set");
    }

    fn file(&self) -> PathBuf {
        self.dir.join("detour/node.json")
    }

    /// Calls the plugin for an attachment, with this node's `/var/lib/cni/detour`, in a private mount namespace.
    fn attach(&self, name: &str, conf: &Value) -> Called {
        fs::create_dir_all("/var/lib/cni").expect("made");
        let script = "mount -t tmpfs tmpfs /var/lib/cni && cp -rp \"$1\" /var/lib/cni/detour && exec \"$2\"";
        let mut command = Command::new("/usr/bin/unshare");
        command
            .args(["--mount", "/bin/sh", "-c", script, "sh"])
            .arg(self.dir.join("detour"))
            .arg(env!("CARGO_BIN_EXE_detour"))
            .env_clear()
            .envs(self.pod.environment(name, "/usr/lib/cni"));
        let mut conf = conf.clone();
        if name == "CHECK" {
            conf["prevResult"] = json!({});
        }
        Called::run(&mut command, &conf)
    }

    /// Calls the plugin, which must succeed. Returns its log.
    #[track_caller]
    fn attached(&self, command: &str, conf: &Value) -> String {
        self.attach(command, conf).done().stderr
    }

    #[track_caller]
    fn fails(&self, command: &str, conf: &Value, code: u64, why: &str) {
        let (found, text) = self.attach(command, conf).refused();
        assert!(found == code && text.contains(why), "{found}: {text}");
    }
}

fn definition(more: &Value) -> Value {
    with(json!({"cniVersion": "1.1.0", "name": "mesh", "type": "detour"}), more)
}

#[test]
fn the_nodes_keys_take_precedence_and_ignored_keys_are_logged() {
    let node = Node::stating(&json!({}));
    let chain = json!([{"type": "uid-exclude", "uids": [7]}, {"type": "first"}]);
    let evil = json!({
        "cni_bin_dir": "/home/evil", "kubeconfig": "/home/evil/kubeconfig", "timeout_seconds": 7,
        "exclude_namespaces": ["shop"],
    });
    let conf = definition(&json!({"chain": chain, "kubernetes": evil}));
    let log = node.attached("ADD", &conf);
    let ignored = "ignored keys: kubernetes.exclude_namespaces, kubernetes.cni_bin_dir, kubernetes.kubeconfig, \
        kubernetes.timeout_seconds: only the node can set them, in /var/lib/cni/detour/node.json";
    assert!(log.contains(ignored), "{log}");
    assert_eq!(node.recorders.order(), ["ADD first"], "of the node's directory");
    assert_eq!(node.recorders.seen()[0].environment["CNI_PATH"].split(':').next(), node.recorders.bin().to_str());
    assert!(node.pod.rules().iter().any(|rule| rule.contains("meta skuid 7 ")), "{:?}", node.pod.rules());
    node.attached("CHECK", &conf);
    node.attached("DEL", &conf);
    assert_eq!(node.pod.rules(), [""; 0]);
}

#[test]
fn attachments_exclude_namespaces_if_the_node_allows_it() {
    let conf = definition(&json!({"chain": [{"type": "uid-exclude", "uids": [7]}], "exclude_namespaces": ["shop"]}));
    let node = Node::stating(&json!({"attachments_may_exclude_namespaces": true}));
    node.attached("ADD", &conf);
    assert_eq!(node.pod.rules(), [""; 0]);
}

#[test]
fn a_pod_can_not_override_pinned_settings() {
    let chain = json!([{"type": "uid-exclude", "uids": [7], "pod_overrides": true}]);
    let has = |node: &Node, uid: &str| node.pod.rules().iter().any(|rule| rule.contains(&format!("meta skuid {uid} ")));
    for (pinned, heard) in [(json!([]), true), (json!(["uid-exclude"]), false)] {
        let node = Node::stating(&json!({"pinned": pinned, "chain": chain}));
        node.attached("ADD", &definition(&json!({"chain": chain, "args": {"cni": {"uid-exclude": {"uids": [9]}}}})));
        assert!(has(&node, "7"), "the installed block: {:?}", node.pod.rules());
        assert_eq!((has(&node, "4321"), has(&node, "9")), (heard, heard), "{pinned}: {:?}", node.pod.rules());
    }
}

/// The author of a definition can't exclude what the node pins, or does not permit.
#[test]
fn a_configuration_that_the_node_did_not_install_is_a_request() {
    let installed = json!([{"type": "uid-exclude", "uids": [7]}]);
    let conf = definition(&json!({"chain": [{"type": "uid-exclude", "uids": "*"}]}));
    let pinned = Node::stating(&json!({"allow": [], "pinned": ["uid-exclude"], "chain": installed}));
    let log = pinned.attached("ADD", &conf);
    assert!(log.contains("ignored keys: chain[0] (uid-exclude is pinned): only the node can set them"), "{log}");
    let rules = pinned.pod.rules().join("\n");
    assert!(rules.contains("meta skuid 7 ") && !rules.contains("skuid 0-"), "{rules}");
    let bounded = Node::stating(&json!({"allow": {"uids": "5000"}, "chain": installed}));
    let outside = "chain[0].uids: \"*\" is outside the bounds: not permitted by allow.uids \
        (the node configuration /var/lib/cni/detour/node.json)";
    bounded.fails("ADD", &conf, 7, outside);
    assert_eq!(bounded.pod.rules(), [""; 0]);
    bounded.fails("ADD", &definition(&json!({"type": "excludedns"})), 7, "\"1337\" is outside the bounds");
    // What an annotation could request, and what the node installed, is excluded.
    let node = Node::stating(&json!({"allow": {"uids": "4000-5000"}, "chain": installed}));
    for (chain, uid) in [(json!([{"type": "uid-exclude", "uids": [4000]}]), "4000"), (installed, "7")] {
        let conf = definition(&json!({"chain": chain}));
        node.attached("ADD", &conf);
        assert!(node.pod.rules().iter().any(|rule| rule.contains(&format!("meta skuid {uid} "))), "{uid}");
        node.attached("DEL", &conf);
    }
    // By default, what pods may request by default.
    let node = Node::stating(&json!({}));
    node.fails("ADD", &conf, 7, "\"*\" is outside the bounds: not permitted by the default bounds");
}

#[test]
fn existing_configurations_work_with_a_node_configuration() {
    for (text, rule) in [
        (include_str!("../../../conf/99-exclude-dns.conf"), "meta skuid 1337"),
        (
            r#"{"cniVersion": "0.3.1", "name": "istio-cni", "type": "istio-cni",
             "cni_agent_run_dir": "/var/run/istio-cni", "exclude_namespaces": ["istio-system"]}"#,
            "ISTIO_REDIRECT",
        ),
        (
            r#"{"cniVersion": "0.3.0", "name": "v2-5-istio-cni", "type": "istio-cni", "log_level": "info",
             "kubernetes": {"kubeconfig": "/etc/cni/multus/net.d/v2-5-istio-cni.kubeconfig", "cni_bin_dir": "/opt/multus/bin",
                            "exclude_namespaces": ["istio-operator"], "iptables_script": "istio-iptables.sh"}}"#,
            "ISTIO_REDIRECT",
        ),
    ] {
        let node = Node::stating(&json!({}));
        let conf: Value = serde_json::from_str(text).expect("JSON");
        node.attached("ADD", &conf);
        assert!(node.pod.rules().iter().any(|found| found.contains(rule)), "{text}: {:?}", node.pod.rules());
        node.attached("DEL", &conf);
        assert_eq!(node.pod.rules(), [""; 0]);
    }
}

#[test]
fn a_broken_or_untrusted_file_fails_add_and_check_but_not_del() {
    let conf = definition(&json!({"chain": [{"type": "uid-exclude", "uids": [7]}]}));
    let node = Node::stating(&json!({}));
    node.attached("ADD", &conf);
    let large = format!("{{\"a\": \"{}\"}}", "x".repeat(64 << 10));
    for (text, owner, why) in [
        ("{", 0, "/var/lib/cni/detour/node.json: invalid JSON"),
        (r#"{"kubernetes": {"cni_bin_dir": "bin"}}"#, 0, "/var/lib/cni/detour/node.json: kubernetes.cni_bin_dir"),
        (
            "{}",
            12345,
            "node.json is owned by UID 12345; expected root; run chown root:root /var/lib/cni/detour/node.json",
        ),
        (
            &large,
            0,
            "node configuration /var/lib/cni/detour/node.json is not used: expected at most 65536 bytes, got more",
        ),
    ] {
        node.states(text);
        chown(&node.file(), Some(Uid::from_raw(owner)), None).expect("root");
        node.fails("ADD", &conf, 7, why);
        node.fails("CHECK", &conf, 7, why);
        node.fails("STATUS", &conf, 50, why);
        assert!(node.attached("GC", &conf).contains("the node's keys are not applied"));
        assert!(!node.pod.rules().is_empty(), "those of the first ADD");
    }
    assert!(node.attached("DEL", &conf).contains("the node's keys are not applied"));
    assert_eq!(node.pod.rules(), [""; 0]);
}

/// The agent's pod must start on such a node: it restores the file.
#[test]
fn a_broken_file_does_not_fail_status_or_the_agents_own_pod() {
    let agent = json!({
        "agent_namespace": "shop", "agent_pod_prefixes": ["web-"], "agent_socket": "/no/such/socket",
        "kubeconfig": "/no/such/kubeconfig",
    });
    let evil = with(agent.clone(), &json!({"cni_bin_dir": "/home/evil"}));
    let chain = json!([{"type": "istio-redirect"}, {"type": "first"}]);
    let node = Node::stating(&json!({}));
    for (text, mode) in
        [("{", 0o644), ("", 0o644), (r#"{"kubernetes": {"timeout_seconds": "x"}}"#, 0o644), ("{}", 0o666)]
    {
        node.states(text);
        fs::set_permissions(node.file(), Permissions::from_mode(mode)).expect("set");
        let own = |more: &Value| definition(&with(json!({"kubernetes": agent}), more));
        for command in ["STATUS", "ADD", "CHECK", "DEL"] {
            let log = node.attached(command, &own(&json!({})));
            assert!(log.contains("the node's keys are not applied") && log.contains("node.json"), "{command}: {log}");
        }
        // The configuration may come from an attachment, so it can't set keys of the node.
        let conf = own(&json!({"chain": chain, "kubernetes": evil, "log_file": "/var/log/evil.log"}));
        let output = node.attach("ADD", &conf);
        let ignored = output.stderr.contains("kubernetes.cni_bin_dir, log_file: only the node can set them");
        assert!(!output.success && ignored, "{output:?}");
        let other = with(evil.clone(), &json!({"agent_namespace": "istio-system"}));
        node.fails("ADD", &definition(&json!({"kubernetes": other})), 7, "node.json");
        // These networks may not be the node's own.
        let network = json!({"cniVersion": "1.1.0", "name": "cluster", "type": "first"});
        let primary = own(&json!({"delegates": [network], "binDir": node.recorders.bin()}));
        node.fails("ADD", &primary, 7, "node.json");
        node.attached("STATUS", &primary);
    }
    let called = node.recorders.order();
    assert!(called.iter().all(|call| call == "STATUS first"), "{called:?}");
}

#[test]
fn a_definition_does_not_make_this_the_primary_plugin() {
    let network = json!({"cniVersion": "1.1.0", "name": "cluster", "type": "first"});
    let node = Node::stating(&json!({"primary": false}));
    let conf =
        definition(&json!({"delegates": [network], "cniDir": node.dir.join("kept"), "binDir": node.recorders.bin()}));
    node.fails("ADD", &conf, 7, "clusterNetwork, delegates: only the runtime's configuration can set these keys");
    node.fails("STATUS", &conf, 50, "clusterNetwork, delegates: only the runtime's configuration can set these keys");
    assert!(node.recorders.order().is_empty() && !node.dir.join("kept").exists());
    assert!(node.attached("DEL", &conf).contains("the networks are ignored"));
    assert!(node.recorders.order().is_empty(), "DEL executes nothing that ADD refuses");
    for text in [r#"{"primary": true}"#, "{}"] {
        node.states(text);
        node.attached("ADD", &conf);
        node.attached("DEL", &conf);
    }
    assert_eq!(node.recorders.order(), ["ADD first", "DEL first", "ADD first", "DEL first"]);
}
