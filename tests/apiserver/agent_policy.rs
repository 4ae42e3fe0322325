//! The admission policy of the agent's and the plugin's accounts: what they may write. Both have all permissions here, so
//! that only the policy decides.

use crate::client::{Client, Refused};
use crate::control_plane::ControlPlane;
use crate::node::{NAME, agent_pod, meshed_pod};
use crate::shipped::{NAMESPACE, apply, chart, chart_for, cluster_with};
use serde_json::{Value, json};
use std::time::Instant;

const OTHER_NODE: &str = "node-2";
const POLICY: &str = "ValidatingAdmissionPolicy 'detour-agent' with binding 'detour-agent' denied request: ";
const NOT_OWN: &str = "may change only its own node";
const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
const TAINT: &str = "cni.istio.io/not-ready";

/// The values with which the agent writes most.
const MOST: &str = "repair.repairPods=false,repair.deletePods=true,primaryPlugin.enabled=true,taint.enabled=true";

struct Scene {
    plane: ControlPlane,
    admin: Client,
    /// As the agent's pod on [`NAME`].
    agent: Client,
    /// With a token of the plugin that is bound to this node.
    plugin: Client,
    pod: Value,
    other_pod: Value,
}

impl Scene {
    fn with(objects: &[Value]) -> Self {
        // The API server applies a new policy with a delay, and until then that of an earlier test.
        let mark = format!("{:?}", Instant::now());
        let mut objects = objects.to_vec();
        let is_policy = |object: &&mut Value| object["kind"] == "ValidatingAdmissionPolicy";
        let policy = objects.iter_mut().find(is_policy).expect("a policy");
        let message = &mut policy["spec"]["validations"][0]["message"];
        *message = format!("{}; {mark}", message.as_str().expect("text")).into();
        let plane = cluster_with(&objects);
        let admin = plane.admin();
        let account = |name: &str| json!({"kind": "ServiceAccount", "namespace": NAMESPACE, "name": name});
        let everything = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "everything"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [account("detour-agent"), account("detour-plugin")],
        });
        apply(&admin, &[everything]);
        let own = agent_pod(&admin, "detour-agent", NAME);
        agent_pod(&admin, "detour-agent", OTHER_NODE);
        let agent = plane.with_token(&admin.bound_token(NAMESPACE, "detour-agent", &own));
        let plugin = plane.with_token(&admin.bound_token(NAMESPACE, "detour-plugin", &node(NAME)));
        let ready = json!({"status": {"conditions": [condition("Ready")]}});
        let pod = admin.merge_status(&meshed_pod(&admin, "web-0"), &ready).expect("accepted");
        let other_pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "shop", "name": "web-1"},
            "spec": {"nodeName": OTHER_NODE, "containers": pod["spec"]["containers"]},
        });
        let other_pod = admin.apply(&other_pod).expect("accepted");
        let unbound = plane.with_token(&admin.token(NAMESPACE, "detour-agent"));
        let probe = || unbound.merge(&node(OTHER_NODE), &json!({}));
        plane.until(|| probe().is_err_and(|refused| refused.message.contains(&mark)));
        Self { plane, admin, agent, plugin, pod, other_pod }
    }

    fn unscheduled(&self, name: &str) -> Value {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "shop", "name": name},
            "spec": {"containers": self.pod["spec"]["containers"]},
        });
        self.admin.apply(&pod).expect("accepted")
    }
}

fn node(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
}

fn condition(kind: &str) -> Value {
    json!({"type": kind, "status": "True", "reason": "Current", "message": ""})
}

fn conditions(kinds: &[&str]) -> Value {
    json!({"status": {"conditions": kinds.iter().map(|kind| condition(kind)).collect::<Vec<_>>()}})
}

fn labels(key: &str) -> Value {
    json!({"metadata": {"labels": {key: "true"}}})
}

fn annotations(key: &str, value: &Value) -> Value {
    json!({"metadata": {"annotations": {key: value}}})
}

/// An Event as the agent writes it, with one field replaced.
fn event(field: &str, value: &str) -> Value {
    let mut event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": {"namespace": "shop", "generateName": "web-0."},
        "type": "Normal", "reason": "DetourRepaired", "source": {"component": "detour", "host": NAME},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "shop", "name": "web-0"},
    });
    if let Some(place) = event.pointer_mut(field) {
        *place = value.into();
    }
    event
}

fn token(seconds: u32, kind: &str, name: &str) -> Value {
    json!({"expirationSeconds": seconds, "boundObjectRef": {"kind": kind, "apiVersion": "v1", "name": name}})
}

#[track_caller]
fn allowed<T>(what: &str, outcome: Result<T, Refused>) -> T {
    outcome.unwrap_or_else(|refused| panic!("{what}: {refused:?}"))
}

#[track_caller]
fn denied<T>(what: &str, outcome: Result<T, Refused>, message: &str) {
    let Err(refused) = outcome else { panic!("{what}: allowed") };
    let is_expected = refused.code == 403 && refused.message.contains(POLICY) && refused.message.contains(message);
    assert!(is_expected, "{what}: expected {message:?}, got {refused:?}");
}

#[test]
fn the_agent_writes_only_detours_parts_of_its_own_nodes_pods() {
    let scene = Scene::with(&chart(&[MOST]));
    let (agent, pod, other) = (&scene.agent, &scene.pod, &scene.other_pod);
    let network_status = annotations(NETWORK_STATUS, &json!("[]"));
    allowed("network-status", agent.merge_status(pod, &network_status));
    denied("network-status", agent.merge_status(other, &network_status), NOT_OWN);
    denied("network-status", agent.merge_status(&scene.unscheduled("web-2"), &network_status), NOT_OWN);
    let status = "expected changes of the annotations [\"k8s.v1.cni.cncf.io/network-status\"] only, got conditions";
    denied("a condition", agent.merge_status(pod, &conditions(&["Ready", "Initialized"])), status);
    denied("a removed condition", agent.merge_status(pod, &conditions(&[])), status);
    let ip = json!({"status": {"podIP": "10.0.0.9", "podIPs": [{"ip": "10.0.0.9"}]}});
    denied("another field", agent.merge_status(pod, &ip), "only, got podIP");
    denied("the phase", agent.merge_status(pod, &json!({"status": {"phase": "Failed"}})), "only, got phase");
    let metadata = "expected changes of the annotations [\"k8s.v1.cni.cncf.io/network-status\"] only, got ";
    denied("another label", agent.merge_status(pod, &labels("app")), metadata);
    let sidecar = "sidecar.istio.io/status";
    for value in [json!("{\"a\":1}"), Value::Null] {
        denied("another annotation", agent.merge_status(pod, &annotations(sidecar, &value)), metadata);
    }
    let exclude = annotations("detour.io/exclude-uids", &json!("*"));
    denied("an exclusion", agent.merge_status(pod, &exclude), metadata);
    let finalizer = json!({"metadata": {"finalizers": ["detour.io/a"]}});
    denied("a finalizer", agent.merge_status(pod, &finalizer), "only, got finalizers");

    denied("another pod", agent.delete(other), NOT_OWN);
    denied("an unscheduled pod", agent.delete(&scene.unscheduled("web-2")), NOT_OWN);
    allowed("its pod", agent.delete(pod));
}

#[test]
fn the_agent_writes_only_its_own_nodes_taint() {
    let scene = Scene::with(&chart(&[MOST]));
    let (own, other) = (node(NAME), node(OTHER_NODE));
    let taint = |key: &str, effect: &str| json!({"key": key, "effect": effect});
    let foreign = taint("dedicated", "NoSchedule");
    let set = |taints: &[&Value]| json!({"spec": {"taints": taints}});
    for machine in [&own, &other] {
        allowed("a foreign taint", scene.admin.merge(machine, &set(&[&foreign])));
    }
    let ours = taint(TAINT, "NoSchedule");
    allowed("its taint", scene.agent.merge(&own, &set(&[&foreign, &ours])));
    denied("another node", scene.agent.merge(&other, &set(&[&foreign, &ours])), NOT_OWN);
    let message = "expected changes of the node's taint cni.istio.io/not-ready with the effect NoSchedule only";
    denied("a removed taint", scene.agent.merge(&own, &set(&[&ours])), message);
    denied("another taint", scene.agent.merge(&own, &set(&[&foreign, &taint("a", "NoSchedule")])), message);
    denied("another effect", scene.agent.merge(&own, &set(&[&foreign, &taint(TAINT, "NoExecute")])), message);
    denied("a label", scene.agent.merge(&own, &labels("a")), message);
    denied("the spec", scene.agent.merge(&own, &json!({"spec": {"unschedulable": true}})), message);
    allowed("its taint", scene.agent.merge(&own, &set(&[&foreign])));
}

#[test]
fn the_agent_requests_only_short_tokens_of_the_plugin_for_its_own_node() {
    let scene = Scene::with(&chart(&[MOST]));
    let request = |account: &str, spec: &Value| scene.agent.request_token(NAMESPACE, account, spec);
    let own = token(3600, "Node", NAME);
    allowed("the plugin's", request("detour-plugin", &own));
    denied("another node", request("detour-plugin", &token(3600, "Node", OTHER_NODE)), NOT_OWN);
    denied("no node", request("detour-plugin", &json!({"expirationSeconds": 3600})), NOT_OWN);
    let agent_pod = format!("detour-agent-{NAME}");
    denied("a pod", request("detour-agent", &token(3600, "Pod", &agent_pod)), NOT_OWN);
    let message =
        "expected a request of the agent for a token of detour-plugin with a lifetime of at most 3600 seconds";
    denied("a long one", request("detour-plugin", &token(3601, "Node", NAME)), message);
    denied("another account", request("detour-agent", &own), message);
    denied("another namespace", scene.agent.request_token("shop", "default", &own), message);
}

/// An Event contains no node of its pod, so that it can be about a pod of another node. But it names the node that it
/// comes from.
#[test]
fn the_agent_creates_only_detours_events_in_its_own_nodes_name() {
    let scene = Scene::with(&chart(&[MOST]));
    for reason in ["DetourRepaired", "AddedInterface", "NoNetworkFound"] {
        allowed(reason, scene.agent.create(&event("/reason", reason)));
    }
    denied("another node", scene.agent.create(&event("/source/host", OTHER_NODE)), NOT_OWN);
    for (field, value) in [("/source/component", "kubelet"), ("/involvedObject/kind", "Node"), ("/reason", "Killing")] {
        denied(field, scene.agent.create(&event(field, value)), "expected an Event of a pod with the source component");
    }
}

#[test]
fn the_plugin_writes_only_the_network_status_and_events_of_its_own_node() {
    let scene = Scene::with(&chart(&[MOST]));
    let (plugin, pod) = (&scene.plugin, &scene.pod);
    let network_status = annotations(NETWORK_STATUS, &json!("[]"));
    allowed("network-status", plugin.merge_status(pod, &network_status));
    denied("another node's", plugin.merge_status(&scene.other_pod, &network_status), NOT_OWN);
    let metadata = "expected changes of the annotations";
    denied("a condition", plugin.merge_status(pod, &conditions(&["Ready", "Initialized"])), metadata);
    denied("a label", plugin.merge_status(pod, &labels("app")), metadata);
    denied("a pod", plugin.delete(pod), "may not delete pods");
    let taint = json!({"spec": {"taints": [{"key": TAINT, "effect": "NoSchedule"}]}});
    denied("the taint", plugin.merge(&node(NAME), &taint), "expected changes of the node's taint");
    let own = token(3600, "Node", NAME);
    denied("a token", plugin.request_token(NAMESPACE, "detour-plugin", &own), "expected a request of the agent");
    allowed("an Event", plugin.create(&event("/type", "Normal")));
    denied("another node's", plugin.create(&event("/source/host", OTHER_NODE)), NOT_OWN);
}

#[test]
fn a_token_without_a_node_writes_nothing() {
    let scene = Scene::with(&chart(&[MOST]));
    for account in ["detour-agent", "detour-plugin"] {
        let client = scene.plane.with_token(&scene.admin.token(NAMESPACE, account));
        let message = "the token of this request names no node";
        denied("a condition", client.merge_status(&scene.pod, &conditions(&["Ready", "Initialized"])), message);
        denied("an Event", client.create(&event("/type", "Normal")), message);
        denied("a token", client.request_token(NAMESPACE, "detour-plugin", &token(3600, "Node", NAME)), message);
        denied("the taint", client.merge(&node(NAME), &labels("a")), message);
        denied("a pod", client.delete(&scene.pod), message);
    }
}

#[test]
fn the_policy_allows_only_what_the_values_need() {
    let scene = Scene::with(&chart(&["repair.enabled=false"]));
    let (agent, pod) = (&scene.agent, &scene.pod);
    let nothing = "expected changes of the annotations [] only";
    denied("a condition", agent.merge_status(pod, &conditions(&["Ready", "Initialized"])), nothing);
    denied("a label", agent.merge_status(pod, &labels("app")), nothing);
    denied("network-status", agent.merge_status(pod, &annotations(NETWORK_STATUS, &json!("[]"))), nothing);
    allowed("an Event", agent.create(&event("/type", "Normal")));
}

/// Kubernetes 1.30 does not bind tokens to nodes.
#[test]
fn in_kubernetes_1_30_only_the_agent_needs_a_token_of_its_node() {
    let scene = Scene::with(&chart_for("1.30.0", &[MOST]));
    let plugin = scene.plane.with_token(&scene.admin.token(NAMESPACE, "detour-plugin"));
    allowed("network-status", plugin.merge_status(&scene.other_pod, &annotations(NETWORK_STATUS, &json!("[]"))));
    denied("a label", plugin.merge_status(&scene.pod, &labels("app")), "expected changes of the annotations");
    let unbound = json!({"expirationSeconds": 3600});
    allowed("a token", scene.agent.request_token(NAMESPACE, "detour-plugin", &unbound));
    let agent = scene.plane.with_token(&scene.admin.token(NAMESPACE, "detour-agent"));
    denied("a token", agent.request_token(NAMESPACE, "detour-plugin", &unbound), "names no node");
    denied("another pod", scene.agent.merge_status(&scene.other_pod, &labels("app")), NOT_OWN);
}
