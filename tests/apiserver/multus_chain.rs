//! The file in the directory of Multus's auxiliary chain, with the real Multus and a real API server: Multus runs the
//! plugin for every pod.

use crate::control_plane::ControlPlane;
use crate::node::{events, meshed_pod, on_a_node};
use crate::shipped::{chart, cluster_with};
use crate::support::called::start;
use crate::support::netns_pod::Pod;
use crate::support::program::built;
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const CHAIN: &str = "run/multus/cni/net.d/vendor-cni-chain";
const BIN: &str = "/var/lib/cni/bin";

/// Installs Multus as OpenShift configures it, with a cluster network that reports the sandbox's interface.
fn install_multus(plane: &ControlPlane) {
    for program in ["multus", "passthru"] {
        fs::copy(built(&format!("runtimes/{program}")), Path::new(BIN).join(program)).expect("a copy");
    }
    let result = r#"{"cniVersion":"0.4.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"version":"4","interface":0,"address":"10.88.0.2/24"}]}"#;
    let network = Path::new(BIN).join("network");
    // Multus refuses an interface that exists already.
    let script = format!(
        "#!/bin/sh\n[ $CNI_COMMAND = ADD ] || exit 0\nnsenter --net=$CNI_NETNS ip link set new0 name eth0 up && echo '{result}'\n"
    );
    fs::write(&network, script).expect("writable");
    fs::set_permissions(&network, Permissions::from_mode(0o755)).expect("its own");
    let network = json!({"cniVersion": "0.4.0", "name": "ovn-kubernetes", "type": "network"});
    fs::write("/run/multus/cni/net.d/10-ovn-kubernetes.conf", network.to_string()).expect("writable");
    let kubeconfig = fs::read(plane.kubeconfig()).expect("a kubeconfig");
    fs::write("/run/multus/kubeconfig", kubeconfig).expect("writable");
}

/// Calls Multus as the runtime does, with the configuration that OpenShift's daemon writes.
fn multus(verb: &str, sandbox: &Pod, pod: &Value) {
    let mut conf: Value = serde_json::from_str(include_str!("../golden/openshift/00-multus.conf")).expect("JSON");
    conf["type"] = "multus".into();
    conf["clusterNetwork"] = "/run/multus/cni/net.d/10-ovn-kubernetes.conf".into();
    conf["kubeconfig"] = "/run/multus/kubeconfig".into();
    // The agent's container has the node's file system there.
    conf["confDir"] = "/mnt/etc/cni/multus/net.d".into();
    conf["logLevel"] = "error".into();
    if verb == "ADD" {
        let netns = format!("--net={}", sandbox.netns().display());
        for change in [["eth0", "down"].as_slice(), &["eth0", "name", "new0"]] {
            let changed = Command::new("nsenter").args([&netns, "ip", "link", "set"]).args(change).status();
            assert!(changed.expect("nsenter is installed").success());
        }
    }
    let key = |key: &str| pod["metadata"][key].as_str().expect("text");
    let arguments = format!(
        "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={}",
        key("namespace"),
        key("name"),
        sandbox.container_id,
        key("uid"),
    );
    let mut command = Command::new(Path::new(BIN).join("multus"));
    command
        .env_clear()
        .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", &sandbox.container_id), ("CNI_IFNAME", "eth0")])
        .envs([("CNI_PATH", BIN), ("CNI_ARGS", &arguments), ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")])
        .env("CNI_NETNS", sandbox.netns());
    let output = start(&mut command, &conf.to_string()).wait_with_output().expect("it ends");
    assert!(output.status.success(), "{verb}: {output:?}");
}

/// The attachments that the plugin has saved for a sandbox.
fn attachments(sandbox: &Pod) -> Vec<String> {
    let Ok(entries) = fs::read_dir(Path::new("/run/detour/attachments").join(&sandbox.container_id)) else {
        return Vec::new();
    };
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("readable").file_name().into_string().expect("text")).collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    names
}

#[test]
fn multus_runs_the_plugin_for_every_pod_once() {
    let chain = format!("cni.multusChain=/{CHAIN}");
    let objects = chart(&["global.platform=openshift,config.dialect=iptables", &chain]);
    let plane = cluster_with(&objects);
    let admin = plane.admin();
    let plain = meshed_pod(&admin, "web-0");
    let selected = meshed_pod(&admin, "web-1");
    let annotation = json!({"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "default/istio-cni"}}});
    admin.merge(&selected, &annotation).expect("accepted");
    on_a_node(&plane, &objects, |node| {
        let agent = node.settled_agent("a");
        install_multus(&plane);

        let (every, both) = (Pod::new(), Pod::new());
        multus("ADD", &every, &plain);
        multus("ADD", &both, &selected);
        assert_eq!(attachments(&every), ["vendor-cni-chain@net1.json"]);
        assert_eq!(attachments(&both), ["istio-cni@net1.json", "vendor-cni-chain@net2.json"]);
        assert!(every.redirects());
        assert_eq!(every.rules(), both.rules(), "two attachments, one result");
        // Multus 4.2.3 removes the plugin's own keys before a DEL.
        for (sandbox, pod) in [(&every, &plain), (&both, &selected)] {
            multus("DEL", sandbox, pod);
            assert!(!sandbox.redirects() && attachments(sandbox).is_empty(), "{:?}", attachments(sandbox));
        }

        // Another tool's invalid file: Multus starts the pod without the chain.
        node.write(&format!("{CHAIN}/50-vendor.conf"), "{");
        agent.wait_for_log("50-vendor.conf: invalid JSON");
        let bypasses = Pod::new();
        multus("ADD", &bypasses, &plain);
        assert!(!bypasses.redirects());
        bypasses.pin(&plain);
        admin.merge(&plain, &json!({"metadata": {"labels": {"changed": "yes"}}})).expect("accepted");
        plane.until(|| bypasses.redirects());
        plane.until(|| events(&plane.admin()).contains(&"DetourRepaired".to_owned()));
    });
}
