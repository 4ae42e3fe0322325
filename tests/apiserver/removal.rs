//! Whether the plugin stays when its agent ends: the DaemonSet decides.

use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::node::{SETTLED, on_a_node};
use crate::shipped::{base, cluster, of_kind};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn delete(admin: &Client, objects: &[Value], kinds: &[&str]) {
    for kind in kinds {
        for object in objects.iter().filter(|object| object["kind"] == *kind) {
            admin.delete(object).expect("it was there");
        }
    }
}

#[test]
fn through_a_rollout_it_stays() {
    let plane = cluster("rollout", "kubernetes");
    let objects = base("kubernetes");
    on_a_node(&plane, &objects, |node| {
        let old = node.start_agent("old");
        old.says(SETTLED);
        let change = json!({"spec": {"template": {"metadata": {"annotations": {"a": "b"}}}}});
        plane.admin().merge(of_kind(&objects, "DaemonSet"), &change).expect("changed");
        let (status, said) = old.end();
        assert!(status.success() && node.is_installed(), "{said:#?}");
        assert!(said.last().expect("a line").contains("stays on the node"), "{said:#?}");
    });
}

#[test]
fn with_the_daemonset_it_goes_in_whatever_order_the_rest_goes() {
    const RIGHTS: [&str; 4] = ["RoleBinding", "Role", "ClusterRoleBinding", "ClusterRole"];
    let objects = base("kubernetes");
    let (mut helm, mut kubectl) = (vec!["DaemonSet"], vec!["ServiceAccount"]);
    helm.extend(RIGHTS);
    helm.push("ServiceAccount");
    kubectl.extend(RIGHTS);
    kubectl.push("DaemonSet");
    for (name, order) in [("helm-uninstall", helm), ("kubectl-delete", kubectl), ("alone", vec!["DaemonSet"])] {
        let plane = cluster(name, "kubernetes");
        let admin = plane.admin();
        on_a_node(&plane, &objects, |node| {
            let agent = node.start_agent("a");
            agent.says(SETTLED);
            until_watched(&plane);
            delete(&admin, &objects, &order);
            // Kubelets hear of it later still.
            let (status, said) = agent.end();
            assert!(status.success() && !node.is_installed(), "{name}: {said:#?}");
            assert!(said.last().expect("a line").contains("was removed from the node"), "{name}: {said:#?}");
        });
    }
}

/// A server that starts again remembers no change from before: the DaemonSet's own version is too old for a
/// watch.
#[test]
fn after_a_restart_of_the_api_it_goes_with_the_daemonset_too() {
    let plane = cluster("restart", "kubernetes");
    let (admin, objects) = (plane.admin(), base("kubernetes"));
    on_a_node(&plane, &objects, |node| {
        let agent = node.start_agent("a");
        agent.says(SETTLED);
        until_watched(&plane);
        for number in 0..30 {
            let change = json!({"metadata": {"annotations": {"number": number.to_string()}}});
            admin.merge(of_kind(&objects, "ServiceAccount"), &change).expect("changed");
        }
        plane.kill_api();
        let before = watches(&plane);
        plane.start_api();
        plane.until(|plane| watches(plane) > before);
        delete(&admin, &objects, &["DaemonSet", "RoleBinding", "Role", "ClusterRoleBinding", "ClusterRole"]);
        let (status, said) = agent.end();
        assert!(status.success() && !node.is_installed(), "{said:#?}");
    });
}

#[test]
fn one_that_waits_for_its_pods_counts_as_gone() {
    let plane = cluster("foreground", "kubernetes");
    let objects = base("kubernetes");
    on_a_node(&plane, &objects, |node| {
        let agent = node.start_agent("a");
        agent.says(SETTLED);
        let daemon_set = of_kind(&objects, "DaemonSet");
        let waits = json!({"metadata": {"finalizers": ["foregroundDeletion"]}});
        plane.admin().merge(daemon_set, &waits).expect("changed");
        plane.admin().delete(daemon_set).expect("marked");
        assert!(plane.admin().get(daemon_set).expect("still there")["metadata"]["deletionTimestamp"].is_string());
        let (_, said) = agent.end();
        assert!(!node.is_installed(), "{said:#?}");
    });
}

#[test]
fn where_nobody_can_say_it_stays_and_that_is_said() {
    let plane = cluster("unknown", "kubernetes");
    on_a_node(&plane, &base("kubernetes"), |node| {
        let agent = node.start_agent("a");
        agent.says(SETTLED);
        plane.kill_api();
        let started = Instant::now();
        let (status, said) = agent.end();
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
        assert!(status.success() && node.is_installed(), "{said:#?}");
        let why = said.iter().find(|line| line.contains("so the plugin stays")).expect("a warning");
        assert!(why.contains("DaemonSet kube-system/detour-agent") && why.contains("detour uninstall"), "{why}");
    });
}

/// Waits until a watch of the DaemonSet was granted.
fn until_watched(plane: &ControlPlane) {
    plane.until(|plane| watches(plane) > 0);
}

/// How many watches of the DaemonSet were granted.
fn watches(plane: &ControlPlane) -> usize {
    let of_daemon_set = |event: &&Value| event["objectRef"]["resource"] == "daemonsets" && event["verb"] == "watch";
    let granted = |event: &Value| event["stage"] == "ResponseStarted" && event["responseStatus"]["code"] == 200;
    plane.audit().iter().filter(of_daemon_set).filter(|event| granted(event)).count()
}
