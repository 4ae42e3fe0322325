//! The bypass of excluded containers: from the start of a container to its exit, also after another process deleted elements
//! or the table; containers that start captured, and the Events with the cause.

use crate::scene::{CAPTURED, Container, Runtime, SOCKET, VAULT, WEB, scene};
use crate::support::agent_node::{AGENT_SOCKET, reach};
use crate::support::wait::DEADLINE;
use detour_cni::cluster::agent::{BypassingContainer, excluded_containers};
use detour_cni::policy::ContainerScope;
use nix::sys::signal::Signal;
use std::path::Path;

#[test]
fn an_excluded_container_bypasses_the_sidecar_from_its_first_connection_on() {
    scene(|scene| {
        let (pod, other) = (scene.pod(VAULT), scene.pod(""));
        let (agent, _runtime, mut plugin) = scene.registered(&[&pod, &other]);
        let mut vault = Container::create(&pod, VAULT);
        plugin.start(&vault);
        assert_eq!(vault.connect(), "direct");
        assert_eq!(pod.elements(), [vault.cgroup()]);
        let mut web = plugin.run(&pod, WEB);
        assert_eq!(web.connect(), "failed", "it is redirected, and no proxy listens");
        let mut same_name = plugin.run(&other, VAULT);
        assert_eq!(same_name.connect(), "failed", "this pod excludes no container");
        let log = agent.wait_for_log("the container's traffic bypasses the sidecar");
        assert!(log.contains(VAULT) && log.contains(&pod.name), "{log}");
        // The agent tells CHECK which elements to expect.
        let status = excluded_containers(Path::new(AGENT_SOCKET), &pod.sandbox, DEADLINE).expect("an answer");
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
        let (fat, pod) = (scene.pod(VAULT), scene.pod(VAULT));
        let (_agent, _runtime, mut plugin) = scene.registered(&[&fat, &pod]);
        fat.add_records();
        for name in [VAULT, WEB] {
            let container = Container::create(&fat, name);
            plugin.start(&container);
        }
        let message = scene.wait_for_event(&fat, CAPTURED, VAULT);
        assert!(message.contains("the pod's rules were not changed within 1000 ms"), "{message}");
        // Other pods are not affected.
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.connect(), "direct");
    });
}

#[test]
fn two_agents_at_the_same_time_make_the_same_changes() {
    scene(|scene| {
        let pod = scene.pod(VAULT);
        let (runtime, older) = (Runtime::listen(), scene.agent());
        let mut of_older = runtime.register_agent(&older, &[&pod]);
        let newer = scene.agent();
        let mut of_newer = runtime.register_agent(&newer, &[&pod]);
        let mut vault = Container::create(&pod, VAULT);
        of_older.start(&vault);
        of_newer.start(&vault);
        assert_eq!(vault.connect(), "direct");
        assert_eq!(pod.elements(), [vault.cgroup()]);
        assert!(older.end(Signal::SIGTERM).success());
        vault.exit();
        pod.wait_for_elements(&[]);
    });
}

#[test]
fn a_bypass_lasts_until_the_exit_and_not_until_the_proxy_listens_or_the_runtime_reports() {
    scene(|scene| {
        let pod = scene.pod(WEB);
        let (_agent, _runtime, mut plugin) = scene.registered(&[&pod]);
        pod.start_proxy();
        let mut web = plugin.run(&pod, WEB);
        assert_eq!(web.connect(), "direct");
        plugin.stop(&web);
        // The element of a later container shows that the sandbox was reconciled.
        let other = plugin.run(&pod, WEB);
        assert_eq!(web.connect(), "direct");
        web.exit();
        pod.wait_for_elements(&[other.cgroup()]);
        plugin.remove(&other);
        pod.wait_for_elements(&[]);
    });
}

#[test]
fn an_agent_that_starts_removes_the_elements_of_containers_that_have_exited() {
    scene(|scene| {
        let pod = scene.pod(WEB);
        let (agent, runtime, mut plugin) = scene.registered(&[&pod]);
        let (mut gone, mut stays) = (Container::create(&pod, WEB), Container::create(&pod, WEB));
        plugin.start(&gone);
        plugin.start(&stays);
        agent.end(Signal::SIGKILL);
        drop(plugin);
        gone.exit();
        assert_eq!(pod.elements().len(), 2);
        let _agent = scene.agent();
        let _plugin = runtime.register(&[&pod], &[&stays]);
        pod.wait_for_elements(&[stays.cgroup()]);
        assert_eq!(stays.connect(), "direct");
        assert!(scene.events(&pod, CAPTURED).is_empty(), "it did not start captured");
    });
}

#[test]
fn a_deleted_table_is_restored_with_its_elements_and_logged_once() {
    scene(|scene| {
        let pod = scene.pod(WEB);
        // As in a container: the rules are written from the node's cgroup namespace.
        let (runtime, agent) = (Runtime::listen(), scene.agent_in_private_cgroup_namespace());
        scene.publish(&pod);
        let mut plugin = runtime.register_agent(&agent, &[&pod]);
        let mut web = plugin.run(&pod, WEB);
        for _ in 0..2 {
            pod.delete_table();
            pod.wait_for_elements(&[web.cgroup()]);
            assert_eq!(web.connect(), "direct");
        }
        pod.tool("nft", &["flush", "set", "inet", "detour-exclusions", "excluded-all"], "");
        pod.wait_for_elements(&[web.cgroup()]);
        agent.wait_for_log("another process deleted");
        let logged = agent.log();
        let lost: Vec<_> = logged.iter().filter(|line| line.contains("another process deleted")).collect();
        assert_eq!(lost.len(), 1, "{logged:#?}");
        assert!(lost[0].contains("; the agent restores it from saved state"), "{lost:?}");
        assert!(scene.events(&pod, CAPTURED).is_empty(), "it has not started captured");
    });
}

#[test]
fn without_repair_a_deleted_table_is_reported_once_with_the_next_step() {
    scene(|scene| {
        let pod = scene.pod(WEB);
        let (runtime, agent) = (Runtime::listen(), scene.agent_without_repair());
        let mut plugin = runtime.register_agent(&agent, &[&pod]);
        let _web = plugin.run(&pod, WEB);
        pod.delete_table();
        let log = agent.wait_for_log("can't update the excluded containers: table inet detour-exclusions");
        assert!(log.contains("; set the agent's flag --repair=repair "), "{log}");
        // Containers that start and exit do not repeat the message.
        for _ in 0..3 {
            let mut next = Container::create(&pod, WEB);
            plugin.start(&next);
            assert_eq!(next.connect(), "failed", "it is redirected, and no proxy listens");
        }
        let message = scene.wait_for_event(&pod, CAPTURED, WEB);
        assert!(message.contains("another process deleted the set or the table"), "{message}");
        assert_eq!(scene.events(&pod, CAPTURED).len(), 1);
        let repeated = agent.logged().iter().filter(|line| line.contains("can't update the excluded")).count();
        assert_eq!((repeated, pod.has_table()), (0, false));
    });
}

#[test]
fn a_container_that_started_without_the_agent_is_excluded_and_reported_when_the_agent_returns() {
    scene(|scene| {
        let (pod, runtime) = (scene.pod(VAULT), Runtime::listen());
        let mut vault = Container::create(&pod, VAULT);
        assert_eq!(vault.connect(), "failed", "it is redirected, and no proxy listens");
        let _agent = scene.agent();
        let mut plugin = runtime.register(&[&pod], &[&vault]);
        let message = scene.wait_for_event(&pod, CAPTURED, VAULT);
        assert!(message.contains("not registered"), "{message}");
        assert_eq!(vault.connect(), "direct");
        let mut next = plugin.run(&pod, VAULT);
        assert_eq!(next.connect(), "direct");
        assert_eq!(scene.events(&pod, CAPTURED).len(), 1);
    });
}

#[test]
fn without_nri_each_new_pod_gets_an_event_with_the_cause() {
    scene(|scene| {
        let agent = scene.agent();
        let log = agent.wait_for_log("not registered at the container runtime");
        assert!(log.contains("socket not found"), "{log}");
        let pod = scene.pod(VAULT);
        let message = scene.wait_for_event(&pod, CAPTURED, VAULT);
        assert!(message.contains("socket not found"), "{message}");
        // As soon as the runtime listens, containers are excluded.
        let runtime = Runtime::listen();
        let mut plugin = runtime.register(&[&pod], &[]);
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.connect(), "direct");
        assert_eq!(scene.events(&pod, CAPTURED).len(), 1);
    });
}

#[test]
fn a_container_that_has_exited_before_its_start_is_handled_is_not_reported() {
    scene(|scene| {
        let pod = scene.pod(VAULT);
        let (_agent, runtime, mut plugin) = scene.registered(&[&pod]);
        let mut gone = Container::create(&pod, VAULT);
        gone.vanish();
        plugin.start(&gone);
        // The Event of a later pod shows that the agent has reported.
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.connect(), "direct");
        drop((plugin, runtime));
        std::fs::remove_file(reach(SOCKET)).expect("removed");
        let later = scene.pod(VAULT);
        scene.wait_for_event(&later, CAPTURED, VAULT);
        assert!(scene.events(&pod, CAPTURED).is_empty());
    });
}

#[test]
fn an_api_server_that_does_not_answer_delays_no_container() {
    scene(|scene| {
        let (pod, runtime) = (scene.pod(VAULT), Runtime::listen());
        let agent = scene.agent();
        let mut plugin = runtime.register_agent(&agent, &[&pod]);
        scene.api.go_silent();
        let mut vault = Container::create(&pod, VAULT);
        plugin.start(&vault);
        assert_eq!(vault.connect(), "direct");
        vault.exit();
        pod.wait_for_elements(&[]);
    });
}
