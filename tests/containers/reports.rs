//! What `doctor`, `rules` and `trace` report about excluded containers while a real agent runs.

use crate::scene::{Pod, Runtime, VAULT, WEB, scene};
use crate::support::agent_node::{AgentNode, ROOT, reach};
use crate::support::agent_process::SETTLED;
use crate::support::api::kubeconfig_of;
use crate::support::program::program;
use crate::support::wait::until;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::process::Command;

/// Runs a command about the pod on the node, and returns its report.
fn report(command: &str, more: &[&str]) -> Value {
    let output = Command::new(program())
        .args([command, "--root", ROOT, "-o", "json"])
        .args(more)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .output()
        .expect("it starts");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{command}: {error}: {output:?}"))
}

/// Returns the outcome of a check of `doctor`, and what it found.
fn check(scene: &AgentNode<'_>, pod: &Pod, id: &str) -> (String, String) {
    let text = kubeconfig_of(&json!({"server": scene.api.url()}), &json!({"token": "t"}));
    std::fs::write(reach("/var/lib/cni/detour/kubeconfig"), text).expect("written");
    let pod = ["-n", "shop", &pod.name];
    let report = report("doctor", &[&["--platform=kubernetes"], &pod[..]].concat());
    let line = report["checks"].as_array().expect("checks").iter().find(|line| line["id"] == id);
    let line = line.unwrap_or_else(|| panic!("no check {id}: {report:#}"));
    let text = |key: &str| line[key].as_str().expect("text").to_owned();
    (text("outcome"), text("found"))
}

#[test]
fn the_reports_follow_a_bypass_from_the_start_of_the_container_to_its_end() {
    scene(|scene| {
        let pod = scene.pod(VAULT);
        let (runtime, agent) = (Runtime::listen(), scene.agent());
        let mut plugin = runtime.register(&[&pod], &[]);
        agent.wait_for_logs(&["registered at the container runtime", SETTLED]);
        scene.publish(&pod);
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.connect(), "direct");

        let passes = |id: &str, parts: &[&str]| {
            let (outcome, found) = check(scene, &pod, id);
            assert!(outcome == "pass" && parts.iter().all(|part| found.contains(part)), "{id}: {outcome}: {found}");
        };
        passes("containers-ready", &["at simulated v1.2"]);
        let named = format!("{VAULT} (control group {})", vault.cgroup());
        passes("containers-bypass", &[&named]);

        let rules = report("rules", &["--container", &pod.sandbox]);
        let elements = rules["containers"]["elements"].as_array().expect("a list");
        let (element, id) = (&elements[0], &vault.id[..16]);
        assert_eq!(
            (&element["container"], &element["id"], &element["foreign"]),
            (&VAULT.into(), &id.into(), &false.into())
        );
        assert_eq!(element["path"], vault.cgroups_path());
        let trace = |name: &str| {
            let from = format!("container={name},uid=0");
            report("trace", &["--container", &pod.sandbox, "--from", &from, "--to", "10.88.0.1:80/tcp"])
        };
        let traced = trace(VAULT);
        assert_eq!((&traced["arrives_at"], &traced["container"]["bypasses"]), (&"direct".into(), &"all".into()));
        assert_eq!(trace(WEB)["arrives_at"], "sidecar:15001");

        vault.exit();
        pod.wait_for_elements(&[]);
        passes("containers-bypass", &["no excluded container bypasses the sidecar now"]);
        let traced = trace(VAULT);
        assert_eq!((&traced["arrives_at"], &traced["container"]["bypasses"]), (&"sidecar:15001".into(), &Value::Null));

        drop(plugin);
        drop(runtime);
        until("the connection ends", || check(scene, &pod, "containers-ready").0 == "fail");
        let (_, found) = check(scene, &pod, "containers-ready");
        assert!(found.contains("; excluded containers start captured"), "{found}");
        agent.end(Signal::SIGKILL);
        let (outcome, found) = check(scene, &pod, "containers-ready");
        assert_eq!((outcome.as_str(), found.as_str()), ("not-checked", "because agent-reachable failed"));
    });
}
