//! The rules of the real istio-cni, run by Multus, compared with those of this plugin for the same pod.

use super::agent::{Agent, image};
use super::cluster::Cluster;
use super::scene::install_multus;
use super::{Cell, Mode};
use crate::certificates::SERVICE;
use crate::node::{Node, Runtime, tools};
use crate::pod::Pod;
use crate::result;
use serde_json::json;
use std::fs;

/// The name of the definition for istio-cni.
const REAL: &str = "real-istio-cni";

/// What distinguishes a pod from others.
type Change = dyn Fn(&mut Pod);

/// Installs istio-cni with the credentials of Multus, which may read pods, and its definition.
fn install_istio_cni(cluster: &Cluster, node: &Node) {
    fs::copy(tools().join("runtimes/istio-cni"), node.path("bin/istio-cni")).expect("hack/e2e.sh builds it");
    let directory = node.path("istio-cni");
    fs::create_dir_all(&directory).expect("made");
    let user = json!({"token": cluster.admin.token("kube-system", "multus")});
    let mut kubeconfig = cluster.plane.kubeconfig_of(&user);
    kubeconfig["clusters"][0]["cluster"]["server"] = format!("https://{SERVICE}:443").into();
    fs::write(directory.join("istio-cni-kubeconfig"), kubeconfig.to_string()).expect("written");
    let configuration = json!({
        "cniVersion": "0.3.1", "name": REAL, "type": "istio-cni", "plugin_log_level": "info",
        "cni_agent_run_dir": directory, "exclude_namespaces": ["istio-system", "kube-system"],
    });
    let definition = json!({
        "apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
        "metadata": {"name": REAL, "namespace": "shop"}, "spec": {"config": configuration.to_string()},
    });
    cluster.admin.apply(&definition).expect("accepted");
}

#[test]
fn rules_are_those_of_istio_cni() {
    let cell = Cell { runtime: Runtime::Containerd, mode: Mode::Attachment, dialect: "iptables" };
    let node = cell.node();
    let cluster = Cluster::start();
    let _entrance = cluster.open(&node);
    install_multus(&cluster, &node);
    install_istio_cni(&cluster, &node);
    let values = [cell.values(), vec!["config.chain[0].type=istio-redirect".to_owned()]].concat();
    let chart = cluster.install_chart(&node.path("chart.yaml"), &values);
    let agent = Agent::start(&cluster, &node, &chart, "detour-agent-a", &image(&node, 1));
    agent.until_ready();
    let rules = |name: &str, networks: &str, change: &Change| {
        let mut pod = cell.meshed(name);
        pod.annotate("k8s.v1.cni.cncf.io/networks", networks);
        // Without it, istio-cni writes rules of one family.
        let env = pod.spec["containers"][0]["env"].as_array_mut().expect("a list");
        env.push(json!({"name": "ISTIO_DUAL_STACK", "value": "true"}));
        change(&mut pod);
        cluster.create(&mut pod);
        let sandbox = pod.start(&node).unwrap_or_else(|error| panic!("pod {name}: {error}"));
        let rules = sandbox.rules();
        sandbox.remove();
        rules
    };
    let changes: [(&str, &Change); 3] = [
        ("plain", &|_| ()),
        ("ports", &|pod| {
            pod.annotate("traffic.sidecar.istio.io/excludeInboundPorts", "8081,8082");
            pod.annotate("traffic.sidecar.istio.io/excludeOutboundPorts", "9000");
            pod.annotate("traffic.sidecar.istio.io/excludeOutboundIPRanges", "10.1.0.0/16");
        }),
        ("tproxy", &|pod| pod.annotate("sidecar.istio.io/interceptionMode", "TPROXY")),
    ];
    for (name, change) in changes {
        let real = rules(&format!("{name}-real"), &format!("shop/{REAL}"), change);
        let mut own = rules(&format!("{name}-own"), "default/istio-cni", change);
        if name == "tproxy" {
            // The one deviation: 15008 is exempt under TPROXY too.
            let mut is_mangle = false;
            own.retain(|line| {
                is_mangle = if line.starts_with('*') { line == "*mangle" } else { is_mangle };
                !(is_mangle && line == "-A ISTIO_INBOUND -p tcp -m tcp --dport 15008 -j RETURN")
            });
        }
        assert!(real.iter().any(|rule| rule.contains("ISTIO_OUTPUT")), "{name}: {real:#?}");
        assert_eq!(own, real, "{name}");
        let text = format!("{} lines of iptables-save and ip6tables-save, equal", real.len());
        result(Runtime::Containerd, &format!("rules of the real istio-cni, pod {name}"), &text);
    }
}
