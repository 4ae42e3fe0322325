//! A bypass that is no longer allowed ends, whatever the pod's annotations say.

use crate::node::id;
use crate::pod::{EXCLUDE_UIDS, Pod};
use crate::scene::{CHAIN, pause, publish, scene};

const LIVE_POLICY: &str = "detour.io/live-policy";
const PINNED: &str = r#""uid-exclude", "uids": ["8000"], "pod_overrides": false"#;

#[test]
fn a_pinned_policy_ends_bypasses_also_of_pods_that_follow_no_changes() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let added = |name: &str, more: (&str, &str)| {
            let pod = Pod::added(scene, api, name, &[(EXCLUDE_UIDS, "7000")]);
            pod.set(more.0, more.1);
            publish(api, &pod);
            pod
        };
        let opted_out = added("opted-out", (LIVE_POLICY, "false"));
        let invalid = added("invalid", (LIVE_POLICY, "no"));
        let other = added("other", ("detour.io/exclude-dns", "10.0.0.300"));
        for pod in [&opted_out, &invalid, &other] {
            pod.until(|pod| pod.excludes_uid(7000));
        }
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, PINNED));
        for pod in [&opted_out, &invalid, &other] {
            pod.until(|pod| !pod.excludes_uid(7000));
        }
        other.until(|pod| pod.excludes_uid(8000));
        assert!(!opted_out.excludes_uid(8000) && !invalid.excludes_uid(8000));
        let report = scene.wait_for_counts([0, 1, 2, 0]);
        assert!(report.pods.iter().any(|pod| pod.reason.contains("is false")), "{report:?}");
    });
}

#[test]
fn the_newest_sandbox_of_a_pod_follows() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let older = Pod::added(scene, api, "web-0", &[]);
        // The kernel's clock for files has a coarse resolution.
        pause();
        let mut newer = Pod::with_sandbox(scene, "web-0", id("a"));
        newer.uid.clone_from(&older.uid);
        assert!(newer.sandbox < older.sandbox);
        newer.call(scene, "ADD").expect("added");
        newer.set(EXCLUDE_UIDS, "7000");
        publish(api, &newer);
        newer.until(|pod| pod.excludes_uid(7000));
        assert!(!older.excludes_uid(7000));
    });
}
