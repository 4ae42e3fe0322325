//! A bypass that is no longer allowed ends, whatever the pod's annotations say.

use crate::live_policy::api::NAMESPACES;
use crate::live_policy::node::id;
use crate::live_policy::pod::{EXCLUDE_UIDS, Pod};
use crate::live_policy::scene::{CHAIN, pause, publish, scene, wait_for_event};
use serde_json::json;

const PINNED: &str = r#""uid-exclude", "uids": ["8000"], "pod_overrides": false"#;

#[test]
fn a_pinned_policy_ends_bypasses_also_beside_an_invalid_annotation() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let added = |name: &str, more: Option<(&str, &str)>| {
            let pod = Pod::added(scene, api, name, &[(EXCLUDE_UIDS, "7000")]);
            more.iter().for_each(|(key, value)| pod.set(key, value));
            publish(api, &pod);
            pod
        };
        let pods = [added("valid", None), added("invalid", Some(("detour.io/exclude-dns", "10.0.0.300")))];
        pods.iter().for_each(|pod| pod.until(|pod| pod.excludes_uid(7000)));
        wait_for_event(api, &pods[1], "DetourPolicyRejected", "10.0.0.300");
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, PINNED));
        pods.iter().for_each(|pod| pod.until(|pod| !pod.excludes_uid(7000) && pod.excludes_uid(8000)));
        scene.wait_for_counts([1, 1, 0, 0]);
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

#[test]
fn tighter_bounds_end_bypasses_also_of_other_attachments_and_beside_an_invalid_value() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let pod = Pod::added(scene, api, "web-0", &[(EXCLUDE_UIDS, "7000,8000")]);
        let invalid = Pod::added(scene, api, "invalid", &[(EXCLUDE_UIDS, "7000,8000")]);
        invalid.set(EXCLUDE_UIDS, "7000,8000,x");
        publish(api, &invalid);
        // The agent does not know the configuration of this network.
        let attached = Pod::added(scene, api, "attached", &[(EXCLUDE_UIDS, "7000,8000")]);
        attached.call(scene, "DEL").expect("removed");
        let mut other = scene.entry();
        other["name"] = json!("other");
        attached.call_with(&other, "ADD").expect("added");
        wait_for_event(api, &invalid, "DetourPolicyRejected", "\"x\"");
        invalid.until(|pod| !pod.excludes_uid(7000) && !pod.excludes_uid(8000));
        let pods = [&pod, &attached];
        pods.iter().for_each(|pod| pod.until(|pod| pod.excludes_uid(7000) && pod.excludes_uid(8000)));
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, r#""uid-exclude", "allow": {"uids": "7000"}"#));
        pods.iter().for_each(|pod| pod.until(|pod| pod.excludes_uid(7000) && !pod.excludes_uid(8000)));
        for pod in [&pod, &attached] {
            let message = wait_for_event(api, pod, "DetourPolicyRejected", "\"8000\" is outside the bounds");
            assert!(
                message.contains("chain[1].allow.uids (the node configuration /var/lib/cni/detour/node.json)"),
                "{message}"
            );
        }
        // A new pod with such a request does not start, and the wider bounds apply to running pods too.
        let new = Pod::new(scene, "new");
        new.set(EXCLUDE_UIDS, "8000");
        publish(api, &new);
        let error = new.call(scene, "ADD").expect_err("outside the bounds");
        assert!(error.contains("outside the bounds"), "{error}");
        scene.configure(CHAIN);
        [&pod, &attached].iter().for_each(|pod| pod.until(|pod| pod.excludes_uid(8000)));
    });
}

#[test]
fn a_pod_loses_what_only_a_label_of_its_namespace_permitted() {
    scene(|scene, api| {
        let label = |tier: &str| api.put(NAMESPACES, &json!({"metadata": {"name": "shop", "labels": {"tier": tier}}}));
        let allow =
            r#""uid-exclude", "allow": [{"uids": "8000"}, {"namespace_selector": {"matchLabels": {"tier": "batch"}}}]"#;
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, allow));
        label("batch");
        let _agent = scene.agent(&[]);
        let pod = Pod::added(scene, api, "web-0", &[(EXCLUDE_UIDS, "7000,8000")]);
        pod.until(|pod| pod.excludes_uid(7000) && pod.excludes_uid(8000));
        label("web");
        pod.until(|pod| !pod.excludes_uid(7000) && pod.excludes_uid(8000));
        let message = wait_for_event(api, &pod, "DetourPolicyRejected", "\"7000\" is outside the bounds");
        assert!(message.contains("chain[1].allow[0].uids") || message.contains("chain[0].allow[0].uids"), "{message}");
        label("batch");
        pod.until(|pod| pod.excludes_uid(7000));
    });
}
