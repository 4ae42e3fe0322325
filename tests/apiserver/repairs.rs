//! Repairs, the node's taint, Events about excluded containers, and the removal of the plugin with its DaemonSet, with the
//! shipped rights.

use crate::client::Client;
use crate::control_plane::ControlPlane;
use crate::node::{LIST, NAME, on_a_node};
use crate::shipped::{base, chart, cluster, cluster_with, of_kind};
use serde_json::{Value, json};

#[test]
fn a_new_node_has_the_taint_until_its_agent_is_ready() {
    let objects = chart(&["taint.enabled=true,taint.atCreation=true"]);
    let plane = cluster_with(&objects);
    let admin = plane.admin();
    let machine = |name: &str, system: &str, taints: &Value| {
        let labels = json!({"kubernetes.io/os": system});
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "spec": {"taints": taints},
        })
    };
    let taints = |node: &Value| admin.get(node).expect("there")["spec"]["taints"].as_array().expect("a list").clone();
    let ours = |node: &Value| -> Vec<Value> {
        taints(node).into_iter().filter(|taint| taint["key"] == "cni.istio.io/not-ready").collect()
    };
    let probe = machine("probe", "linux", &json!([]));
    let is_tainted = || {
        admin.apply(&probe).expect("accepted");
        let tainted = !ours(&probe).is_empty();
        admin.delete(&probe).expect("deleted");
        tainted
    };
    // The API server reads new policies after a moment.
    plane.until(is_tainted);

    let added = json!({"key": "cni.istio.io/not-ready", "effect": "NoSchedule"});
    let windows = machine("windows", "windows", &json!([]));
    admin.apply(&windows).expect("accepted");
    assert_eq!(ours(&windows), [] as [Value; 0], "no agent would remove it");
    let registered = json!({"key": "cni.istio.io/not-ready", "value": "true", "effect": "NoSchedule"});
    let evicting = json!({"key": "cni.istio.io/not-ready", "effect": "NoExecute"});
    let with_taint = machine("with-taint", "linux", &json!([evicting, registered]));
    admin.apply(&with_taint).expect("accepted");
    assert_eq!(ours(&with_taint), [evicting.clone(), registered], "the kubelet's taint, once");
    let with_other = machine("with-other", "linux", &json!([evicting]));
    admin.apply(&with_other).expect("accepted");
    assert_eq!(ours(&with_other), [evicting, added.clone()]);

    let new = machine(NAME, "linux", &json!([{"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}]));
    admin.apply(&new).expect("accepted");
    let other: Vec<Value> = taints(&new).into_iter().filter(|taint| *taint != added).collect();
    assert_eq!(taints(&new).len(), other.len() + 1);
    assert!(other.iter().any(|taint| taint["key"] == "dedicated"));
    on_a_node(&plane, &objects, |node| {
        let _agent = node.settled_agent("a");
        plane.until(|| taints(&new) == other);
        // The policy does not apply to updates of a node.
        admin.merge(&new, &json!({"metadata": {"labels": {"changed": "yes"}}})).expect("accepted");
        assert_eq!(taints(&new), other);
        // A running agent adds it again while the node is not ready.
        let network = node.read(LIST);
        node.write(LIST, "{");
        plane.until(|| taints(&new) == [other.clone(), vec![added.clone()]].concat());
        node.write(LIST, &network);
        plane.until(|| taints(&new) == other);
    });

    // Without the chart, and for the next test.
    let policies = objects.iter().filter(|object| object["kind"].as_str().is_some_and(|kind| kind.starts_with("Mut")));
    policies.for_each(|policy| admin.delete(policy).expect("deleted"));
    plane.until(|| !is_tainted());
}

fn delete(admin: &Client, objects: &[Value], kinds: &[&str]) {
    for kind in kinds {
        for object in objects.iter().filter(|object| object["kind"] == *kind) {
            admin.delete(object).expect("it was there");
        }
    }
}

#[test]
fn the_plugin_stays_during_a_rollout() {
    let plane = cluster();
    let objects = base("kubernetes");
    on_a_node(&plane, &objects, |node| {
        let old = node.settled_agent("old");
        let change = json!({"spec": {"template": {"metadata": {"annotations": {"a": "b"}}}}});
        plane.admin().merge(of_kind(&objects, "DaemonSet"), &change).expect("changed");
        let (status, logged) = old.ended();
        assert!(status.success() && node.is_installed(), "{logged:#?}");
        assert!(logged.last().expect("a line").contains("stays on the node"), "{logged:#?}");
    });
}

#[test]
fn the_plugin_is_removed_with_the_daemonset_in_any_order_of_deletion() {
    const RIGHTS: [&str; 4] = ["RoleBinding", "Role", "ClusterRoleBinding", "ClusterRole"];
    let objects = base("kubernetes");
    let (mut helm, mut kubectl) = (vec!["DaemonSet"], vec!["ServiceAccount"]);
    helm.extend(RIGHTS);
    helm.push("ServiceAccount");
    kubectl.extend(RIGHTS);
    kubectl.push("DaemonSet");
    for (name, order) in [("helm-uninstall", helm), ("kubectl-delete", kubectl), ("alone", vec!["DaemonSet"])] {
        let plane = cluster();
        let admin = plane.admin();
        on_a_node(&plane, &objects, |node| {
            let agent = node.settled_agent("a");
            until_watched(&plane);
            delete(&admin, &objects, &order);
            // The kubelet ends the pod later.
            let (status, logged) = agent.ended();
            assert!(status.success() && !node.is_installed(), "{name}: {logged:#?}");
            assert!(logged.last().expect("a line").contains("was removed from the node"), "{name}: {logged:#?}");
        });
    }
}

/// A restarted server has no earlier changes: the DaemonSet's resource version is too old for a watch.
#[test]
fn the_plugin_is_removed_with_the_daemonset_after_a_restart_of_the_api_server() {
    let plane = cluster();
    let (admin, objects) = (plane.admin(), base("kubernetes"));
    on_a_node(&plane, &objects, |node| {
        let agent = node.settled_agent("a");
        until_watched(&plane);
        for number in 0..30 {
            let change = json!({"metadata": {"annotations": {"number": number.to_string()}}});
            admin.merge(of_kind(&objects, "ServiceAccount"), &change).expect("changed");
        }
        plane.kill_api();
        let before = watches(&plane);
        plane.start_api();
        plane.until(|| watches(&plane) > before);
        delete(&admin, &objects, &["DaemonSet", "RoleBinding", "Role", "ClusterRoleBinding", "ClusterRole"]);
        let (status, logged) = agent.ended();
        assert!(status.success() && !node.is_installed(), "{logged:#?}");
    });
}

#[test]
fn without_an_answer_the_plugin_stays_and_a_warning_is_logged() {
    let plane = cluster();
    on_a_node(&plane, &base("kubernetes"), |node| {
        let agent = node.settled_agent("a");
        plane.kill_api();
        let (status, logged) = agent.ended();
        assert!(status.success() && node.is_installed(), "{logged:#?}");
        let why = logged.iter().find(|line| line.contains("the plugin stays on the node; run")).expect("a warning");
        assert!(why.contains("DaemonSet kube-system/detour-agent") && why.contains("detour uninstall"), "{why}");
    });
}

/// Waits until a watch of the DaemonSet was granted.
fn until_watched(plane: &ControlPlane) {
    plane.until(|| watches(plane) > 0);
}

/// Returns how many watches of DaemonSets were granted.
pub(crate) fn watches(plane: &ControlPlane) -> usize {
    let of_daemon_set = |event: &&Value| event["objectRef"]["resource"] == "daemonsets" && event["verb"] == "watch";
    let granted = |event: &Value| event["stage"] == "ResponseStarted" && event["responseStatus"]["code"] == 200;
    plane.audit().iter().filter(of_daemon_set).filter(|event| granted(event)).count()
}
