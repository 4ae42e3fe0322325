//! Containers that start while the agent runs.

use crate::container::Container;
use crate::scene::{AGENT_SOCKET, SLOW, SOON, VAULT, WEB, scene};
use detour_cni::cluster::agent::{BypassingContainer, excluded_containers};
use detour_cni::policy::ContainerScope;
use nix::sys::signal::Signal;
use serde_json::json;
use std::path::Path;

#[test]
fn an_excluded_container_bypasses_the_sidecar_from_its_first_connection_on() {
    scene(|scene| {
        let (pod, other) = (scene.pod(VAULT, &json!({})), scene.pod("", &json!({})));
        let (agent, _runtime, mut plugin) = scene.registered(&[&pod, &other]);
        let mut vault = Container::create(&pod, VAULT);
        let waited = plugin.start(&vault);
        assert!(waited < SOON, "{waited:?}");
        assert_eq!(vault.connect(), "direct");
        assert_eq!(pod.elements(), [vault.cgroup()]);
        let mut web = plugin.run(&pod, WEB);
        assert_eq!(web.connect(), "failed", "it is redirected, and no proxy listens");
        let mut same_name = plugin.run(&other, VAULT);
        assert_eq!(same_name.connect(), "failed", "this pod excludes no container");
        let log = agent.wait_for_log("the container's traffic bypasses the sidecar");
        assert!(log.contains(VAULT) && log.contains(&pod.name()), "{log}");
        // The agent tells CHECK which elements to expect.
        let status = excluded_containers(Path::new(AGENT_SOCKET), &pod.sandbox, SLOW).expect("an answer");
        let bypassing = BypassingContainer {
            name: VAULT.into(),
            id: vault.id.clone(),
            cgroup: vault.cgroup(),
            scope: ContainerScope::All,
        };
        assert_eq!(status.expected, Some(vec![bypassing]));
        assert_eq!(status.runtime.as_deref(), Some("simulated v1.2"));
        assert!(agent.end(Signal::SIGTERM).success());
    });
}

/// The records of the fat pod take minutes to read. The runtime waits for 1 s.
#[test]
fn the_start_of_a_container_is_bounded_in_time_while_saved_state_is_read() {
    scene(|scene| {
        let (fat, pod) = (scene.pod(VAULT, &json!({})), scene.pod(VAULT, &json!({})));
        let (_agent, _runtime, mut plugin) = scene.registered(&[&fat, &pod]);
        fat.add_records();
        for name in [VAULT, WEB] {
            let container = Container::create(&fat, name);
            let waited = plugin.start(&container);
            assert!(waited < SOON, "{name}: {waited:?}");
        }
        let message = scene.wait_for_event(&fat, "DetourContainerCaptured", VAULT);
        assert!(message.contains("the pod's rules were not changed within 1000 ms"), "{message}");
        // Other pods are not affected.
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.connect(), "direct");
    });
}

#[test]
fn elements_that_another_process_removes_are_restored() {
    scene(|scene| {
        let pod = scene.pod(VAULT, &json!({}));
        let (_agent, _runtime, mut plugin) = scene.registered(&[&pod]);
        let mut vault = plugin.run(&pod, VAULT);
        pod.flush_elements();
        pod.wait_for_elements(&[vault.cgroup()], SOON);
        assert_eq!(vault.connect(), "direct");
    });
}

#[test]
fn two_agents_at_the_same_time_make_the_same_changes() {
    scene(|scene| {
        let pod = scene.pod(VAULT, &json!({}));
        let (runtime, older) = (scene.runtime(), scene.agent());
        let mut of_older = runtime.register(&[&pod], &[]);
        older.wait_for_log("registered at the container runtime");
        let newer = scene.agent();
        let mut of_newer = runtime.register(&[&pod], &[]);
        newer.wait_for_log("registered at the container runtime");
        let mut vault = Container::create(&pod, VAULT);
        of_older.start(&vault);
        of_newer.start(&vault);
        assert_eq!(vault.connect(), "direct");
        assert_eq!(pod.elements(), [vault.cgroup()]);
        assert!(older.end(Signal::SIGTERM).success());
        vault.exit();
        pod.wait_for_elements(&[], SOON);
    });
}

#[test]
fn an_agent_in_a_private_cgroup_namespace_restores_rules_that_match() {
    scene(|scene| {
        let pod = scene.pod(VAULT, &json!({}));
        let runtime = scene.runtime();
        let agent = scene.agent_in_private_cgroup_namespace();
        scene.publish(&pod, "1");
        let mut plugin = runtime.register(&[&pod], &[]);
        agent.wait_for_log("registered at the container runtime");
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.connect(), "direct");
        // The sets remain, so the repair restores the rules, not the thread that watches the sets.
        pod.tool("nft", &["flush", "chain", "inet", "detour-exclusions", "DETOUR_OUTPUT"], "");
        assert_eq!(vault.connect(), "failed");
        scene.publish(&pod, "2");
        agent.wait_for_log("traffic is redirected to the sidecar again");
        pod.wait_for_elements(&[vault.cgroup()], SOON);
        assert_eq!(vault.connect(), "direct");
    });
}
