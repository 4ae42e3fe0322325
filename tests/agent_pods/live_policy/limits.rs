//! Limits: pods that change all the time, network namespaces that are busy, an API server that does not answer.

use crate::live_policy::pod::{EXCLUDE_PORTS, EXCLUDE_UIDS, Pod};
use crate::live_policy::scene::{DEADLINE, annotate_namespace, events, publish, sample, scene, until, wait_for_event};
use nix::sys::signal::Signal;
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::time::Instant;

#[test]
fn a_busy_network_namespace_is_retried_and_delays_no_other_pod() {
    scene(|scene, api| {
        let (_agent, address) = scene.agent_with_metrics(&[]);
        // More than there are threads.
        let busy: Vec<Pod> = (0..6).map(|number| Pod::added(scene, api, &format!("busy-{number}"), &[])).collect();
        let free = Pod::added(scene, api, "free", &[]);
        scene.wait_for_counts([7, 0, 0, 0]);
        let locks: Vec<_> = busy
            .iter()
            .map(|pod| {
                let netns = std::fs::metadata(pod.netns()).expect("there");
                let path = format!("/run/detour/locks/{}-{}", netns.dev(), netns.ino());
                let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
                let lock = nix::fcntl::Flock::lock(file.expect("a lock"), nix::fcntl::FlockArg::LockExclusive);
                lock.map_err(|(_, errno)| errno).expect("locked")
            })
            .collect();
        annotate_namespace(api, &json!({EXCLUDE_UIDS: "7000"}));
        free.until(|pod| pod.excludes_uid(7000));
        let report = scene.wait_for_counts([1, 0, 6, 0]);
        assert!(busy.iter().all(|pod| !pod.excludes_uid(7000)), "{report:?}");
        until("each failure is counted", || {
            sample(&address, "detour_policy_changes_total{result=\"failed\"}").is_some_and(|failed| failed >= 6)
        });
        drop(locks);
        scene.wait_for_counts([7, 0, 0, 0]);
        assert!(busy.iter().all(|pod| pod.excludes_uid(7000)));
    });
}

/// Rules change although nothing can be written, and the reports follow.
#[test]
fn without_the_api_server_rules_still_change_and_reports_wait() {
    scene(|scene, api| {
        let agent = scene.agent(&[]);
        let pod = Pod::added(scene, api, "web-0", &[]);
        scene.wait_for_counts([1, 0, 0, 0]);
        api.refuse_writes(Some(503));
        pod.set(EXCLUDE_PORTS, "3306");
        publish(api, &pod);
        pod.until(|pod| pod.excludes_port(3306));
        scene.wait_for_counts([1, 0, 0, 0]);
        assert_eq!(events(api, &pod, "DetourPolicyChanged"), [""; 0]);
        api.refuse_writes(None);
        wait_for_event(api, &pod, "DetourPolicyChanged", "3306");
        // A change that was delivered before the connection broke.
        pod.set(EXCLUDE_PORTS, "3307");
        publish(api, &pod);
        api.go_down();
        pod.until(|pod| pod.excludes_port(3307));
        let started = Instant::now();
        assert!(agent.end(Signal::SIGTERM).success());
        assert!(started.elapsed() < DEADLINE / 2, "the end does not wait for the API server");
    });
}

#[test]
fn a_missing_right_is_logged_once_and_stops_nothing() {
    scene(|scene, api| {
        api.refuse_writes(Some(403));
        let agent = scene.agent(&[]);
        let pods: Vec<Pod> = (0..3).map(|number| Pod::added(scene, api, &format!("web-{number}"), &[])).collect();
        scene.wait_for_counts([3, 0, 0, 0]);
        for port in [3306, 3307] {
            for pod in &pods {
                pod.set(EXCLUDE_PORTS, &port.to_string());
                publish(api, pod);
            }
            pods.iter().for_each(|pod| pod.until(|pod| pod.excludes_port(port)));
        }
        agent.wait_for_log("Event not created");
        let logged = agent.log();
        let is_about = |line: &&String| line.contains("Event not created") && line.contains("level=warn");
        assert_eq!(logged.iter().filter(is_about).count(), 1, "{logged:#?}");
    });
}
