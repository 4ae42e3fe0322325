//! `rules` and `trace` for a pod given by name, on its node and on another machine.

use crate::find::Pod;
use crate::find::node::{Node, scene, uid};
use crate::support::called::{Called, plugin};
use detour_cni::state::ROOT;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// The saved state of the pod's attachment.
const FILE: &str = "istio-cni@eth0.json";

/// A node, a pod that runs on it, and the API's pods.
struct Scene<'a> {
    node: &'a Node,
    pod: Pod,
    /// The plugin's configuration.
    conf: String,
}

fn manifest(name: &str, uid: &str, node: &str, host_network: bool) -> String {
    let pod = json!({
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "uid": uid, "annotations": {"sidecar.istio.io/status": "{}"}},
        "spec": {
            "nodeName": node, "hostNetwork": host_network,
            "containers": [{"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"]}],
        },
    });
    format!("{pod}\n---\n")
}

impl<'a> Scene<'a> {
    /// The pod `web-0` runs here with rules; `away` runs on another node, `host` uses its node's network.
    fn new(node: &'a Node) -> Self {
        node.keep_state();
        let pod = Pod::new(node).with_cached_result(node);
        let pods = [
            manifest("web-0", &pod.uid, "here", false),
            manifest("away", &uid(), "worker-7", false),
            manifest("host", &uid(), "here", true),
            json!({"kind": "Namespace", "metadata": {"name": "shop"}}).to_string(),
        ];
        let manifests = node.root.join("manifests");
        fs::create_dir(&manifests).expect("made");
        fs::write(manifests.join("pods.yaml"), pods.concat()).expect("written");
        let conf = json!({
            "cniVersion": "1.1.0", "name": "istio-cni", "type": "istio-cni", "dialect": "nftables",
            "kubernetes": {"manifests_dir": manifests, "agent_namespace": "mesh"},
        });
        // The commands reach paths of a configuration below the root.
        let below_root = conf.to_string().replace(&manifests.display().to_string(), "/manifests");
        node.file("conf", &below_root);
        let scene = Self { node, conf: "/conf".to_owned(), pod };
        let args = format!("K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID={}", scene.pod.uid);
        let mut add = plugin([("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", scene.pod.sandbox.as_str())]);
        add.env("CNI_NETNS", scene.pod.pause.netns()).env("CNI_IFNAME", "eth0").env("CNI_PATH", "/nowhere");
        Called::run(add.env("CNI_ARGS", args), &conf).done();
        scene
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let root = self.node.root.display().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_detour"));
        command.args(arguments).args(["--root", &root]).env_clear().output().expect("run detour")
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[arguments, &["-o", "json"]].concat());
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    #[track_caller]
    fn refused(&self, arguments: &[&str], parts: &[&str]) {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let report = String::from_utf8_lossy(&output.stderr);
        assert!(parts.iter().all(|part| report.contains(part)), "{report}");
    }
}

#[test]
fn rules_accepts_a_pod_by_name_container_pid_or_path() {
    scene(|node| {
        let scene = Scene::new(node);
        for selector in
            [&["-n", "shop", "web-0", "--config", &scene.conf][..], &["--container", &scene.pod.sandbox[..40]]]
        {
            let report = scene.json(&[&["rules"], selector].concat());
            assert_eq!((&report["as_asked"], &report["dialect"]), (&json!(true), &json!("nftables")), "{report}");
            assert_eq!(report["netns"], json!(node.root.join("run/netns").join(&scene.pod.sandbox)));
            assert!(report["found_by"].as_str().is_some_and(|by| by.contains("/var/lib/cni/results/")), "{report}");
        }
        for selector in [&["--pid", &scene.pod.pause.pid().to_string()][..], &[&scene.pod.sandbox]] {
            let report = scene.json(&[&["rules"], selector].concat());
            assert_eq!((&report["as_asked"], &report["found_by"]), (&json!(true), &Value::Null), "{report}");
        }
    });
}

#[test]
fn saved_state_of_an_earlier_pod_with_the_same_inode_is_ignored() {
    scene(|node| {
        let scene = Scene::new(node);
        let own = Path::new(ROOT).join(&scene.pod.sandbox);
        let old = own.with_file_name("0".repeat(64));
        let mut record: Value = serde_json::from_slice(&fs::read(own.join(FILE)).expect("kept")).expect("JSON");
        record["netns"] = "/run/netns/gone".into();
        fs::create_dir(&old).expect("made");
        fs::write(old.join(FILE), record.to_string()).expect("written");
        let report = scene.json(&["rules", &scene.pod.sandbox]);
        let attachment = format!("attachment istio-cni/eth0 of pod sandbox {}", scene.pod.sandbox);
        assert_eq!(report["attachments"], json!([attachment]));
    });
}

#[test]
fn trace_uses_the_live_rules_of_the_pod() {
    scene(|node| {
        let scene = Scene::new(node);
        let packet = ["--from", "uid=1000", "--to", "198.51.100.7:443/tcp"];
        for selector in [
            &["--live", "-n", "shop", "web-0", "--config", &scene.conf][..],
            &["--container", &scene.pod.sandbox],
            &["--pid", &scene.pod.pause.pid().to_string()],
            &["--netns", &scene.pod.sandbox],
        ] {
            let report = scene.json(&[&["trace"], selector, &packet].concat());
            assert_eq!(report["arrives_at"], "sidecar:15001");
            let table = report["decided_by"]["table"].as_str();
            assert_eq!(table, Some("detour-nat"), "the rules of the kernel, not those of the configuration: {report}");
        }
    });
}

#[test]
fn on_another_machine_the_command_for_the_pods_node_is_printed() {
    scene(|node| {
        let scene = Scene::new(node);
        let away = ["-n", "shop", "away", "--config", &scene.conf];
        let there = ["pod shop/away", "on node worker-7", "-n shop away"];
        scene.refused(&[&["rules"], &away[..]].concat(), &[&there[..], &["kubectl detour rules "]].concat());
        let packet = ["--from", "uid=1", "--to", "[2001:db8::1]:53/udp"];
        let question = "kubectl detour trace --live --from 'uid=1' --to '[2001:db8::1]:53/udp' ";
        scene.refused(&[&["trace", "--live"], &away[..], &packet].concat(), &[&there[..], &[question]].concat());
        scene
            .refused(&["rules", "-n", "shop", "host", "--config", &scene.conf], &["pod shop/host", "spec.hostNetwork"]);
        scene.refused(&["rules", "--container", &"e".repeat(64)], &["container eee", "not found on this node"]);
    });
}
