//! Excluded containers that start captured, and the Events with the cause.

use crate::cgroup::Cgroup;
use crate::container::Container;
use crate::scene::{SOCKET, SOON, VAULT, WEB, scene};
use nix::mount::umount;
use nix::sys::signal::Signal;
use serde_json::json;

const CAPTURED: &str = "DetourContainerCaptured";

#[test]
fn a_container_that_started_without_the_agent_is_excluded_and_reported_when_the_agent_returns() {
    scene(|scene| {
        let (pod, runtime) = (scene.pod(VAULT, &json!({})), scene.runtime());
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
        let pod = scene.pod(VAULT, &json!({}));
        let message = scene.wait_for_event(&pod, CAPTURED, VAULT);
        assert!(message.contains("socket not found"), "{message}");
        // As soon as the runtime listens, containers are excluded.
        let runtime = scene.runtime();
        let mut plugin = runtime.register(&[&pod], &[]);
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.connect(), "direct");
        assert_eq!(scene.events(&pod, CAPTURED).len(), 1);
    });
}

#[test]
fn an_agent_that_starts_without_the_runtime_reports_no_container_that_bypasses_the_sidecar() {
    scene(|scene| {
        let pod = scene.pod(WEB, &json!({}));
        let (agent, runtime, mut plugin) = scene.registered(&[&pod]);
        let mut web = plugin.run(&pod, WEB);
        agent.end(Signal::SIGKILL);
        drop((plugin, runtime));
        std::fs::remove_file(scene.reach(SOCKET)).expect("removed");
        let _agent = scene.agent();
        // The Event of a pod without elements shows that the agent has reported.
        let other = scene.pod(WEB, &json!({}));
        scene.wait_for_event(&other, CAPTURED, WEB);
        assert_eq!(web.connect(), "direct");
        assert!(scene.events(&pod, CAPTURED).is_empty());
    });
}

#[test]
fn a_pod_whose_network_namespace_is_not_visible_gets_an_event_with_the_cause() {
    scene(|scene| {
        let (pod, runtime) = (scene.pod(VAULT, &json!({})), scene.runtime());
        // The files stay, as without mount propagation. Otherwise, the agent would remove the pod's saved state.
        for path in [scene.reach("/run/netns"), "/run/netns".into()] {
            umount(&path.join(&pod.sandbox)).expect("unmounted");
        }
        let agent = scene.agent();
        let mut plugin = runtime.register(&[&pod], &[]);
        agent.wait_for_log("registered at the container runtime");
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.connect(), "failed", "it is redirected, and no proxy listens");
        let message = scene.wait_for_event(&pod, CAPTURED, VAULT);
        assert!(message.contains("network namespace"), "{message}");
    });
}

/// The control group of the pod would exclude all its containers; so would that of a process with a reused PID.
#[test]
fn a_container_without_a_control_group_of_its_own_is_captured_and_reported() {
    scene(|scene| {
        let pod = scene.pod(VAULT, &json!({}));
        let (_agent, _runtime, mut plugin) = scene.registered(&[&pod]);
        let mut vault = Container::create_in(&pod, VAULT, |_| Cgroup::new());
        let process = format!("/proc/{}", vault.pid());
        std::os::unix::fs::symlink(&process, scene.reach(&process)).expect("linked");
        plugin.start(&vault);
        assert_eq!(vault.connect(), "failed", "it is redirected, and no proxy listens");
        assert!(pod.elements().is_empty());
        let message = scene.wait_for_event(&pod, CAPTURED, VAULT);
        assert!(message.contains(&format!("expected the container's ID {}", vault.id)), "{message}");
    });
}

#[test]
fn a_container_that_has_exited_before_its_start_is_handled_is_not_reported() {
    scene(|scene| {
        let pod = scene.pod(VAULT, &json!({}));
        let (_agent, runtime, mut plugin) = scene.registered(&[&pod]);
        let mut gone = Container::create(&pod, VAULT);
        gone.vanish();
        plugin.start(&gone);
        // The Event of a later pod shows that the agent has reported.
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.connect(), "direct");
        drop((plugin, runtime));
        std::fs::remove_file(scene.reach(SOCKET)).expect("removed");
        let later = scene.pod(VAULT, &json!({}));
        scene.wait_for_event(&later, CAPTURED, VAULT);
        assert!(scene.events(&pod, CAPTURED).is_empty());
    });
}

#[test]
fn an_api_server_that_does_not_answer_delays_no_container() {
    scene(|scene| {
        let (pod, runtime) = (scene.pod(VAULT, &json!({})), scene.runtime());
        let agent = scene.agent();
        let mut plugin = runtime.register(&[&pod], &[]);
        agent.wait_for_log("registered at the container runtime");
        scene.api.go_silent();
        let mut vault = Container::create(&pod, VAULT);
        let waited = plugin.start(&vault);
        assert!(waited < SOON, "{waited:?}");
        assert_eq!(vault.connect(), "direct");
        vault.exit();
        pod.wait_for_elements(&[], SOON);
    });
}
