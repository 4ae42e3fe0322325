//! The end of a bypass: the container exits.

use crate::container::Container;
use crate::scene::{SLOW, SOON, WEB, scene};
use nix::sys::signal::Signal;
use serde_json::json;

#[test]
fn a_bypass_lasts_until_the_exit_also_when_the_proxy_listens() {
    scene(|scene| {
        let pod = scene.pod(WEB, &json!({}));
        let (_agent, _runtime, mut plugin) = scene.registered(&[&pod]);
        pod.start_proxy();
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
