//! The node's configuration changes.

use crate::live_policy::pod::{EXCLUDE_PORTS, Pod};
use crate::live_policy::scene::{CHAIN, publish, scene, wait_for_event};
use crate::support::agent_node::write;

#[test]
fn running_pods_follow_the_nodes_configuration() {
    scene(|scene, api| {
        let _agent = scene.agent(&[]);
        let pods = ["a", "b"].map(|name| Pod::added(scene, api, name, &[]));
        scene.wait_for_counts([2, 0, 0, 0]);
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, r#""uid-exclude", "uids": ["7000"]"#));
        for pod in &pods {
            pod.until(|pod| pod.excludes_uid(7000));
            wait_for_event(api, pod, "DetourPolicyChanged", "excluded: UID 7000");
        }
        scene.wait_for_counts([2, 0, 0, 0]);
        // A pod that starts now has the same policy.
        let new = Pod::added(scene, api, "new", &[]);
        assert!(new.excludes_uid(7000));
        scene.wait_for_counts([3, 0, 0, 0]);
        // An invalid configuration is refused for the whole node.
        scene.configure(&CHAIN.replace(r#""uid-exclude""#, r#""uid-exclude", "uids": ["abc"]"#));
        pods[0].set(EXCLUDE_PORTS, "3306");
        publish(api, &pods[0]);
        pods[0].until(|pod| pod.excludes_port(3306) && pod.excludes_uid(7000));
        scene.configure(CHAIN);
        for pod in &pods {
            pod.until(|pod| !pod.excludes_uid(7000));
        }
        scene.wait_for_counts([3, 0, 0, 0]);
        // An agent's container has no mount of the node's groups.
        write("/proc/1/root/etc/group", "builders:x:4321:\n");
        let redirect = r#""istio-redirect", "owner_groups_exclude": ["builders"]"#;
        scene.configure(&CHAIN.replace(r#""istio-redirect""#, redirect));
        pods[0].until(|pod| pod.rules().contains("--gid-owner 4321"));
    });
}
