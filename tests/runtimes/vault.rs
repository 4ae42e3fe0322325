//! Vault's containers, which bypass the sidecar by their names.

use crate::cluster::{Agent, Cluster};
use crate::node::{Node, Runtime, until};
use crate::pod::{CAPTURED, Class, DIRECT, Pod, REFUSED, printed};
use crate::result;
use serde_json::json;
use std::path::Path;

/// One round of `traffic loop`: who answered.
struct Round {
    /// On a new connection.
    tcp: char,
    /// To a DNS query on a new socket, and on the socket that was opened first.
    udp: [char; 2],
}

fn rounds(log: &Path) -> Vec<Round> {
    let parse = |line: &String| {
        // The time, and the answer on the connection that was opened first.
        let mut words = line.split(' ').skip(2);
        let mut letter = || words.next()?.chars().next();
        Some(Round { tcp: letter()?, udp: [letter()?, letter()?] })
    };
    printed(log).iter().filter_map(parse).collect()
}

/// An OpenShift-like namespace: all containers of the pod run as one UID. Vault's init container and its native sidecar
/// need the network before the proxy runs.
fn vault(runtime: Runtime) {
    let node = Node::start(runtime, |_| ());
    let cluster = Cluster::new(&node);
    let pod = Pod::new("web", Class::Guaranteed, "vault-agent-init,vault-agent")
        .init_container("vault-agent-init")
        .init_container("prepare")
        .native_sidecar("vault-agent")
        .container("app");
    cluster.has(&pod);
    let _agent = Agent::start_ready(&node, &cluster);
    let sandbox = pod.start(&node).expect("it starts");

    assert_eq!(sandbox.once("vault-agent-init").expect("it starts").0, DIRECT, "TCP and DNS bypass");
    assert_eq!(
        sandbox.once("prepare").expect("it starts").0,
        REFUSED,
        "same UID, not named: captured, and no proxy yet"
    );
    let (agent, log) = sandbox.run("vault-agent", &["/traffic", "loop", "20"]).expect("it starts");
    until("it has sent", || rounds(&log).len() > 10);
    assert!(rounds(&log).iter().all(|round| round.tcp == 'D' && round.udp == ['D', 'D']));
    sandbox.run_proxy();
    assert_eq!(sandbox.once("app").expect("it starts").0, CAPTURED);
    let before = rounds(&log).len();
    until("it has sent again", || rounds(&log).len() > before + 10);
    assert!(rounds(&log).iter().all(|round| round.tcp == 'D' && round.udp == ['D', 'D']), "until it exits");
    node.asked(json!({"op": "stop", "container": agent, "seconds": 1}));
    assert_eq!(sandbox.once("vault-agent").expect("it starts").0, DIRECT, "after its restart, too");

    result(
        runtime,
        "Vault, all containers with one UID",
        "init container and native sidecar bypass (TCP, DNS); an unnamed init container and the application are captured",
    );
    sandbox.remove();
}

#[test]
fn vault_bypasses_though_all_containers_have_one_uid_under_containerd() {
    vault(Runtime::Containerd);
}

#[test]
fn vault_bypasses_though_all_containers_have_one_uid_under_cri_o() {
    vault(Runtime::CriO);
}
