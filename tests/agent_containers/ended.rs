//! The end of a bypass: the proxy accepts connections, or the container exits.

use crate::container::Container;
use crate::scene::{SLOW, SOON, VAULT, WEB, scene};
use crate::support::wait::until_within;
use nix::sys::signal::Signal;
use serde_json::json;

#[test]
fn the_bypass_ends_when_the_proxy_listens_and_established_connections_continue() {
    scene(|scene| {
        let pod = scene.pod(VAULT, &json!({}));
        let (_agent, _runtime, mut plugin) = scene.registered(&[&pod]);
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.open(), "direct");
        let proxy = pod.start_proxy();
        until_within(SOON, "a new connection is captured", || vault.connect() == "sidecar");
        assert_eq!(vault.use_open(), "direct");
        let message = scene.wait_for_event(&pod, "DetourBypassEnded", VAULT);
        assert!(message.contains("the proxy accepts connections"), "{message}");
        // A container that starts from now on is captured, even while the proxy does not run.
        let mut again = plugin.run(&pod, VAULT);
        assert_eq!(again.connect(), "sidecar");
        proxy.stop();
        let mut last = plugin.run(&pod, VAULT);
        assert_eq!(last.connect(), "failed", "it is redirected, and no proxy listens");
        assert!(pod.elements().is_empty());
        assert_eq!(scene.events(&pod, "DetourBypassEnded").len(), 1);
        assert!(scene.events(&pod, "DetourContainerCaptured").is_empty());
    });
}

#[test]
fn a_restarted_agent_knows_that_the_proxy_has_accepted_connections() {
    scene(|scene| {
        let pod = scene.pod(VAULT, &json!({}));
        let (agent, runtime, mut plugin) = scene.registered(&[&pod]);
        let mut vault = plugin.run(&pod, VAULT);
        assert_eq!(vault.connect(), "direct");
        let proxy = pod.start_proxy();
        pod.wait_for_elements(&[], SLOW);
        proxy.stop();
        agent.end(Signal::SIGKILL);
        drop(plugin);
        let _agent = scene.agent();
        let mut plugin = runtime.register(&[&pod], &[&vault]);
        let mut next = plugin.run(&pod, VAULT);
        assert_eq!((next.connect(), vault.connect()), ("failed".into(), "failed".into()), "no proxy listens");
        assert!(pod.elements().is_empty());
    });
}

#[test]
fn a_bypass_until_the_exit_outlasts_the_start_of_the_proxy() {
    scene(|scene| {
        let pod = scene.pod(WEB, &json!({}));
        let (_agent, _runtime, mut plugin) = scene.registered(&[&pod]);
        let _proxy = pod.start_proxy();
        let mut web = plugin.run(&pod, WEB);
        assert_eq!(web.connect(), "direct");
        // The runtime does not report this exit.
        web.exit();
        pod.wait_for_elements(&[], SOON);
    });
}

#[test]
fn a_container_keeps_its_bypass_between_the_runtimes_report_and_its_exit() {
    scene(|scene| {
        let pod = scene.pod(WEB, &json!({}));
        let (_agent, _runtime, mut plugin) = scene.registered(&[&pod]);
        let mut web = plugin.run(&pod, WEB);
        plugin.stop(&web);
        // The element of a later container shows that the sandbox was reconciled.
        let other = plugin.run(&pod, WEB);
        assert_eq!(web.connect(), "direct");
        web.exit();
        pod.wait_for_elements(&[other.cgroup()], SOON);
    });
}

/// Its control group still has a process, as if it were that of another container or of the whole pod.
#[test]
fn the_removal_of_a_container_ends_its_bypass() {
    scene(|scene| {
        let pod = scene.pod(WEB, &json!({}));
        let (_agent, _runtime, mut plugin) = scene.registered(&[&pod]);
        let mut web = plugin.run(&pod, WEB);
        assert_eq!(web.connect(), "direct");
        plugin.stop(&web);
        plugin.remove(&web);
        pod.wait_for_elements(&[], SOON);
        assert_eq!(web.connect(), "failed", "it is redirected, and no proxy listens");
    });
}

#[test]
fn an_agent_that_starts_after_the_proxy_ends_the_bypass() {
    scene(|scene| {
        let pod = scene.pod(VAULT, &json!({}));
        let (agent, runtime, mut plugin) = scene.registered(&[&pod]);
        let mut vault = plugin.run(&pod, VAULT);
        agent.end(Signal::SIGKILL);
        drop(plugin);
        let _proxy = pod.start_proxy();
        assert_eq!(vault.connect(), "direct", "nothing ends the bypass without an agent");
        let agent = scene.agent();
        let _plugin = runtime.register(&[&pod], &[&vault]);
        agent.wait_for_log("registered at the container runtime");
        until_within(SOON, "a new connection is captured", || vault.connect() == "sidecar");
        scene.wait_for_event(&pod, "DetourBypassEnded", VAULT);
    });
}

#[test]
fn an_agent_that_starts_removes_the_elements_of_containers_that_have_exited() {
    scene(|scene| {
        let pod = scene.pod(WEB, &json!({}));
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
        pod.wait_for_elements(&[stays.cgroup()], SLOW);
        assert_eq!(stays.connect(), "direct");
        assert!(scene.events(&pod, "DetourContainerCaptured").is_empty(), "it did not start captured");
    });
}
