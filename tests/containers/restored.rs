//! The table of excluded containers after another process deleted it.

use crate::container::Container;
use crate::scene::{SLOW, WEB, scene};
use crate::support::wait::until_within;
use serde_json::json;

#[test]
fn a_deleted_table_is_restored_with_its_elements_and_logged_once() {
    scene(|scene| {
        let pod = scene.pod(WEB, &json!({}));
        // As in a container: the rules are written from the node's cgroup namespace.
        let (runtime, agent) = (scene.runtime(), scene.agent_in_private_cgroup_namespace());
        scene.publish(&pod, "1");
        let mut plugin = runtime.register(&[&pod], &[]);
        agent.wait_for_log("registered at the container runtime");
        let mut web = plugin.run(&pod, WEB);
        for _ in 0..2 {
            pod.delete_table();
            pod.wait_for_elements(&[web.cgroup()], SLOW);
            assert_eq!(web.connect(), "direct");
        }
        agent.wait_for_log("another process deleted");
        let logged = agent.log();
        let lost: Vec<_> = logged.iter().filter(|line| line.contains("another process deleted")).collect();
        assert_eq!(lost.len(), 1, "{logged:#?}");
        assert!(lost[0].contains("; the agent restores it from saved state"), "{lost:?}");
        assert!(scene.events(&pod, "DetourContainerCaptured").is_empty(), "it has not started captured");
    });
}

#[test]
fn without_repair_a_deleted_table_is_reported_once_with_the_next_step() {
    scene(|scene| {
        let pod = scene.pod(WEB, &json!({}));
        let (runtime, agent) = (scene.runtime(), scene.agent_without_repair());
        let mut plugin = runtime.register(&[&pod], &[]);
        agent.wait_for_log("registered at the container runtime");
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
        let message = scene.wait_for_event(&pod, "DetourContainerCaptured", WEB);
        assert!(message.contains("another process deleted the set or the table"), "{message}");
        assert_eq!(scene.events(&pod, "DetourContainerCaptured").len(), 1);
        let repeated = agent.logged().iter().filter(|line| line.contains("can't update the excluded")).count();
        assert_eq!((repeated, pod.has_table()), (0, false));
    });
}

#[test]
fn a_deleted_table_is_restored_before_a_container_starts() {
    scene(|scene| {
        let pod = scene.pod(WEB, &json!({"containers": [WEB]}));
        scene.publish(&pod, "1");
        let (_agent, _runtime, mut plugin) = scene.registered(&[&pod]);
        pod.delete_table();
        until_within(SLOW, "the table exists", || pod.has_table());
        let mut web = plugin.run(&pod, WEB);
        assert_eq!(web.connect(), "direct");
    });
}
