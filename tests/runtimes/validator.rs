//! Containers that must not start captured: the validator of containerd.

use crate::cluster::{Agent, Cluster};
use crate::node::{Node, Runtime, until};
use crate::pod::{CAPTURED, Class, DIRECT, Pod};
use crate::result;
use std::fs;

/// With containerd's validator, a container that needs the agent does not start without it.
#[test]
fn the_validator_of_containerd_refuses_containers_without_the_agent() {
    let node = Node::start(Runtime::Containerd, |directory| {
        fs::create_dir_all(directory.join("containerd.d")).expect("made");
        let toml = "version = 3\n[plugins.'io.containerd.nri.v1.nri'.default_validator]\nenable = true\n";
        fs::write(directory.join("containerd.d/validator.toml"), toml).expect("written");
    });
    let cluster = Cluster::new(&node);
    let mut pod = Pod::new("web", Class::Burstable, "excluded").container("excluded").container("ordinary");
    pod.annotate("required-plugins.noderesource.dev/container.excluded", "[detour]");
    cluster.has(&pod);
    let agent = Agent::start_ready(&node, &cluster);
    let sandbox = pod.start(&node).expect("it starts");
    sandbox.run_proxy();
    assert_eq!(sandbox.once("excluded").expect("it starts").0, DIRECT);
    drop(agent);
    let mut refused = None;
    until("containerd notices the end of the agent", || {
        refused = sandbox.once("excluded").err();
        refused.is_some()
    });
    println!("The runtime's error: {}", refused.unwrap_or_default());
    assert_eq!(sandbox.once("ordinary").expect("it starts").0, CAPTURED);
    result(Runtime::Containerd, "validator, container without the agent", "does not start");
    sandbox.remove();
}
