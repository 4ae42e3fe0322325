//! The commands of docs/container-exclusion.md, for the pod of that page.

use crate::cluster::{Agent, Cluster, detour};
use crate::node::{Node, Runtime, until};
use crate::pod::{CAPTURED, Class, DIRECT, Pod};
use serde_json::json;
use std::fs;
use std::process::Command;

/// Runs detour on the node, with the plugin's kubeconfig. Prints and returns its output.
fn run_detour(node: &Node, arguments: &[&str]) -> String {
    let mut command = Command::new("nsenter");
    command
        .args(["--target", &node.first_process().to_string(), "--mount", "--pid", "--"])
        .arg(detour())
        .args(arguments);
    let output = command.env("NODE_NAME", "node-1").env("COLUMNS", "10000").output().expect("nsenter starts");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    println!("$ detour {}\n{text}", arguments.join(" "));
    text
}

/// Asserts that the output contains each part.
#[track_caller]
fn shows(output: &str, parts: &[&str]) {
    let missing: Vec<_> = parts.iter().filter(|part| !output.contains(**part)).collect();
    assert!(missing.is_empty(), "{missing:?} is not in this output:\n{output}");
}

#[test]
fn the_commands_of_the_guide_show_the_bypass_and_its_end() {
    let node = Node::start(Runtime::CriO, |_| ());
    let cluster = Cluster::new(&node);
    let pod = Pod::new("web-0", Class::Burstable, "vault-agent-init,vault-agent")
        .init_container("vault-agent-init")
        .native_sidecar("vault-agent")
        .container("web");
    cluster.has(&pod);
    let agent = Agent::start_ready(&node, &cluster);
    let sandbox = pod.start(&node).expect("it starts");
    fs::write(node.path("pod.json"), pod.manifest().to_string()).expect("written");
    let (file, config) = (node.path("pod.json").display().to_string(), "/etc/cni/net.d/10-net.conflist");
    let run = |arguments: &[&str]| run_detour(&node, arguments);

    let explained = run(&["explain", "-f", &file, "--config", config]);
    shows(&explained, &["vault-agent-init", "detour.io/exclude-containers"]);
    let to = "10.85.0.1:8000/tcp";
    shows(
        &run(&["trace", "-f", &file, "--config", config, "--from", "container=vault-agent", "--to", to]),
        &["direct"],
    );

    assert_eq!(sandbox.once("vault-agent-init").expect("it starts").0, DIRECT);
    sandbox.run("vault-agent", &["/traffic", "loop", "100"]).expect("it starts");
    until("it bypasses", || sandbox.ok_inside(&["nft", "list", "ruleset"]).contains("vault-agent"));
    shows(&run(&["rules", "-n", "shop", "web-0"]), &["detour-exclusions", "vault-agent"]);
    shows(
        &run(&["trace", "--live", "-n", "shop", "web-0", "--from", "container=vault-agent", "--to", to]),
        &["direct"],
    );
    shows(&run(&["doctor", "-n", "shop", "web-0"]), &["containers-bypass"]);
    run(&["audit"]);

    sandbox.run_proxy();
    assert_eq!(sandbox.once("web").expect("it starts").0, CAPTURED);
    run(&["doctor", "-n", "shop", "web-0"]);

    // The agent is down while a container starts.
    drop(agent);
    let late = Pod::new("web-1", Class::Burstable, "job,typo").container("job");
    cluster.has(&late);
    let agent = Agent::start_ready(&node, &cluster);
    let sandbox = late.start(&node).expect("it starts");
    // The runtime and the agent log the plugin's output.
    let is_named = |line: &str| line.contains("typo") && line.contains("job") && line.contains("istio-proxy");
    let logged = [agent.logged(), node.log().lines().map(str::to_owned).collect()].concat();
    println!("{:#?}", logged.iter().filter(|line| line.contains("typo")).collect::<Vec<_>>());
    assert!(logged.iter().any(|line| is_named(line)), "the unknown container, with the pod's containers: {logged:#?}");
    sandbox.run_proxy();
    drop(agent);
    let (job, _) = sandbox.run("job", &["/traffic", "loop", "100"]).expect("it starts");
    run(&["doctor", "-n", "shop", "web-1"]);
    let agent = Agent::start_ready(&node, &cluster);
    until("its Event names the cause", || !cluster.events("DetourContainerCaptured").is_empty());
    println!("Event DetourContainerCaptured: {:?}", cluster.events("DetourContainerCaptured"));
    until("it bypasses the sidecar now", || sandbox.ok_inside(&["nft", "list", "ruleset"]).contains("job"));
    node.asked(json!({"op": "stop", "container": job, "seconds": 1}));
    let logged = agent.logged();
    println!("{logged:#?}");
}
