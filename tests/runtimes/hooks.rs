//! The OCI hook: a container that can't be exempted does not start.

use crate::cluster::{Agent, Cluster, Mode};
use crate::node::{Node, Runtime, until};
use crate::pod::{CAPTURED, Class, DIRECT, Pod, Sandbox};
use crate::{repetitions, result};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Where the agent installs the hook on the node.
const HOOK: &str = "/opt/cni/bin/detour-hook";

/// Writes a base_runtime_spec of containerd, with the command of docs/container-exclusion.md.
fn base_runtime_spec(directory: &Path) {
    let guide = include_str!("../../docs/container-exclusion.md");
    let command = guide.lines().find(|line| line.starts_with("ctr oci spec ")).expect("the guide has it");
    let command = command.replace("/etc/containerd", &directory.display().to_string());
    let tools = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("tools/runtimes");
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap_or_default());
    let status = Command::new("sh").args(["-c", &command]).env("PATH", path).status().expect("sh starts");
    assert!(status.success(), "{command}");
}

/// The state of a container as the runtime passes it to the hook.
fn state(runtime: Runtime, status: &str, sandbox: &Sandbox<'_>, container: &str, name: &str, pid: &Value) -> String {
    let annotations = match runtime {
        Runtime::Containerd => json!({
            "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.container-name": name,
            "io.kubernetes.cri.sandbox-id": sandbox.id,
        }),
        Runtime::CriO => json!({
            "io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.SandboxID": sandbox.id,
            "io.kubernetes.cri-o.Metadata": json!({"name": name, "attempt": 0}).to_string(),
        }),
    };
    json!({"ociVersion": "1.0.2", "id": container, "status": status, "pid": pid, "bundle": "/", "annotations": annotations})
        .to_string()
}

/// Measures runs of the hook for a running container, with the program of hack/e2e.sh.
fn measure(node: &Node, sandbox: &Sandbox<'_>) {
    let Some(program) = std::env::var_os("MEASURE") else { return };
    let (container, _) = sandbox.run("excluded", &["/traffic", "pause"]).expect("it starts");
    let info: Value = serde_json::from_str(&node.ok(&["crictl", "inspect", &container])).expect("JSON");
    let pid = &info["info"]["pid"];
    let states = [
        ("excluded container", "creating", "excluded"),
        ("its end", "stopped", "excluded"),
        ("ordinary container", "creating", "ordinary"),
    ];
    let costs = node.path("costs");
    for _ in 0..repetitions("RUNS", 20) {
        for (label, status, name) in states {
            let file = node.path("state.json");
            fs::write(&file, state(node.runtime, status, sandbox, &container, name, pid)).expect("written");
            let mut command = node.command(&program);
            command.args(["run", "--label", label, "--out"]).arg(&costs).arg("--stdin").arg(file).args(["--", HOOK]);
            let output = command.output().expect("nsenter starts");
            assert!(output.status.success(), "{label}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
    let costs = fs::read_to_string(&costs).expect("written by the program");
    let costs: Vec<Value> = costs.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    for (label, ..) in states {
        let sorted = |keys: &[&str]| {
            let total = |cost: &Value| keys.iter().filter_map(|key| cost[*key].as_f64()).sum::<f64>() / 1000.0;
            let mut times: Vec<f64> = costs.iter().filter(|cost| cost["label"] == label).map(total).collect();
            times.sort_by(f64::total_cmp);
            times
        };
        let (wall, cpu) = (sorted(&["wall_us"]), sorted(&["user_us", "system_us"]));
        let middle = wall.len() / 2;
        let value = format!(
            "fastest {:.2} ms, median {:.2} ms (CPU {:.2} ms), p99 {:.2} ms of {}",
            wall[0],
            wall[middle],
            cpu[middle],
            wall[wall.len() * 99 / 100],
            wall.len(),
        );
        result(node.runtime, &format!("OCI hook, {label}"), &value);
    }
    node.asked(json!({"op": "stop", "container": container, "seconds": 1}));
}

fn hook(runtime: Runtime) {
    let count = repetitions("KILL_STARTS", 20);
    let node = Node::start(runtime, |directory| {
        if runtime == Runtime::Containerd {
            base_runtime_spec(directory);
        }
    });
    let cluster = Cluster::new(&node);
    let pod = Pod::new("web", Class::Burstable, "excluded").container("excluded").container("ordinary");
    cluster.has(&pod);
    let agent = Agent::start_ready(&node, &cluster, Mode::Hook);
    until("the hook is installed", || {
        node.path("bin/detour-hook").exists() && node.path("hooks.d/90-detour.json").exists()
    });
    let sandbox = pod.start(&node).expect("it starts");
    sandbox.run_proxy();
    until("the runtime uses the hook", || sandbox.once("excluded").expect("it starts").0 == DIRECT);

    // It needs no agent.
    drop(agent);
    let mut wrong = Vec::new();
    for _ in 0..count / 2 {
        for (name, expected) in [("excluded", DIRECT), ("ordinary", CAPTURED)] {
            let (status, _) = sandbox.once(name).expect("it starts");
            if status != expected {
                wrong.push((name, status));
            }
        }
    }
    result(runtime, "OCI hook, wrong deliveries", &format!("{} of {count} starts", wrong.len()));
    assert_eq!(wrong, []);
    measure(&node, &sandbox);

    let left = sandbox.ok_inside(&["nft", "list", "set", "inet", "detour-exclusions", "excluded-all"]);
    assert!(!left.contains("elements"), "elements end with their containers: {left}");
    sandbox.ok_inside(&["nft", "delete", "table", "inet", "detour-exclusions"]);
    let refused = sandbox.once("excluded").expect_err("it must not start captured");
    assert!(refused.contains("container-exclude") || refused.contains("detour"), "{refused}");
    println!("The runtime's error: {refused}");
    assert_eq!(sandbox.once("ordinary").expect("it starts").0, CAPTURED);
    result(runtime, "OCI hook, container that can't be exempted", "does not start");
    sandbox.remove();
}

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
    let agent = Agent::start_ready(&node, &cluster, Mode::Nri);
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

#[test]
fn a_container_that_the_hook_cannot_exempt_does_not_start_under_containerd() {
    hook(Runtime::Containerd);
}

#[test]
fn a_container_that_the_hook_cannot_exempt_does_not_start_under_cri_o() {
    hook(Runtime::CriO);
}
