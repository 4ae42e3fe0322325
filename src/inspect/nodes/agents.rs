//! The agents' pods and DaemonSets, and the nodes, as the command line finds them in the API.

use super::{NodeCheck, NodeResult};
use crate::cluster::ObjectRef;
use crate::pod::well_known::PROXY_CONTAINER;
use serde_json::Value;

/// The container of the agent in its pod.
const CONTAINER: &str = "agent";
/// The directory of the node that each agent mounts. Only privileged namespaces may mount directories of nodes (Pod
/// Security Standards), so labels alone do not make a pod of another user an agent.
const STATE_DIRECTORY: &str = "/var/lib/cni/detour";
/// The capability with which the agent enters the network namespaces of pods.
const ENTERS_PODS: &str = "SYS_ADMIN";

/// The pod of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentPod {
    /// Its namespace and name.
    pub object: ObjectRef,
    /// The name of its node.
    pub node: String,
    /// The name of its release.
    pub release: String,
    /// Why no command can run in its container; `None` if the container is running.
    pub stopped: Option<String>,
    /// Whether it is ready.
    pub ready: bool,
    /// Whether its container has the capabilities to enter the network namespaces of pods.
    pub enters_pods: bool,
}

impl AgentPod {
    /// Parses a `Pod`; `None` if it is not an agent's or not scheduled.
    #[must_use]
    pub fn of(pod: &Value) -> Option<Self> {
        let (metadata, spec, status) = (&pod["metadata"], &pod["spec"], &pod["status"]);
        let mounts_state = |volume: &Value| volume["hostPath"]["path"] == STATE_DIRECTORY;
        if !is_agent(metadata) || !items(&spec["volumes"]).any(mounts_state) {
            return None;
        }
        let container = items(&spec["containers"]).find(|container| container["name"] == CONTAINER)?;
        let state = items(&status["containerStatuses"]).find(|container| container["name"] == CONTAINER);
        let state = &state.unwrap_or(&Value::Null)["state"];
        let reason = || ["waiting", "terminated"].iter().find_map(|kind| state[*kind]["reason"].as_str());
        let stopped = match metadata["deletionTimestamp"].is_string() {
            true => Some("the pod is being deleted"),
            false => (!state["running"].is_object()).then(|| reason().unwrap_or("not started")),
        };
        let is_ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
        let added = &container["securityContext"]["capabilities"]["add"];
        Some(Self {
            object: object(metadata)?,
            node: spec["nodeName"].as_str()?.to_owned(),
            release: metadata["labels"][RELEASE].as_str()?.to_owned(),
            stopped: stopped.map(str::to_owned),
            ready: items(&status["conditions"]).any(is_ready),
            enters_pods: items(added).any(|name| name == ENTERS_PODS),
        })
    }

    /// Returns the agent in which to run a command about a pod. It prefers, in this order, an agent whose container is
    /// running, one that can enter network namespaces, one that is ready, and the first by release.
    #[must_use]
    pub fn choose(agents: &[Self]) -> Option<&Self> {
        agents
            .iter()
            .min_by_key(|agent| (agent.stopped.is_some(), !agent.enters_pods, !agent.ready, agent.release.clone()))
    }
}

/// Returns the result of a node without an agent, and why it has none according to the DaemonSets of agents. The node is
/// skipped if no DaemonSet selects it, or if a node affinity decides: those are not evaluated.
#[must_use]
pub fn missing_agent(node: &Value, sets: &[Value]) -> NodeCheck {
    let labels = &node["metadata"]["labels"];
    let selects = |set: &&Value| {
        let selector = set["spec"]["template"]["spec"]["nodeSelector"].as_object();
        is_agent(&set["metadata"]) && selector.into_iter().flatten().all(|(key, value)| labels[key] == *value)
    };
    let has_affinity = |set: &Value| set["spec"]["template"]["spec"]["affinity"]["nodeAffinity"].is_object();
    let selecting = sets.iter().filter(selects).find(|set| !has_affinity(set));
    let (result, reason) = match selecting.and_then(|set| object(&set["metadata"])) {
        Some(ObjectRef { namespace, name }) => {
            let next = format!("see kubectl describe daemonset -n {namespace} {name}");
            let why = format!("no agent, but DaemonSet {namespace}/{name} selects this node; {next}");
            (NodeResult::Unhealthy, why)
        }
        None => {
            let why = "no agent; no DaemonSet of an agent selects this node, or one has a node affinity";
            (NodeResult::Skipped, why.to_owned())
        }
    };
    let node = node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    NodeCheck { node, result, reason: Some(reason), ..NodeCheck::default() }
}

/// Whether a pod has a sidecar.
#[must_use]
pub fn has_sidecar(pod: &Value) -> bool {
    let containers = ["containers", "initContainers"].iter().flat_map(|key| items(&pod["spec"][*key]));
    containers.into_iter().any(|one| one["name"] == PROXY_CONTAINER)
}

const RELEASE: &str = "app.kubernetes.io/name";

/// Returns whether labels are those of an agent.
fn is_agent(metadata: &Value) -> bool {
    let label = |name: &str| metadata["labels"][name].as_str();
    (label("app.kubernetes.io/component"), label("app.kubernetes.io/part-of")) == (Some("agent"), Some("detour"))
}

fn object(metadata: &Value) -> Option<ObjectRef> {
    let text = |key: &str| metadata[key].as_str().map(str::to_owned);
    Some(ObjectRef { namespace: text("namespace")?, name: text("name")? })
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, change: impl FnOnce(&mut Value)) -> Option<AgentPod> {
        let labels = json!({
            "app.kubernetes.io/name": "detour", "app.kubernetes.io/component": "agent",
            "app.kubernetes.io/part-of": "detour",
        });
        let mut pod = json!({
            "metadata": {"name": name, "namespace": "mesh", "labels": labels},
            "spec": {
                "nodeName": "n",
                "containers": [{"name": "agent", "args": ["agent"], "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}],
                "volumes": [
                    {"name": "state", "hostPath": {"path": "/var/lib/cni/detour"}},
                    {"name": "config", "configMap": {"name": "detour-agent"}},
                ],
            },
            "status": {
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": "agent", "state": {"running": {}}}],
            },
        });
        change(&mut pod);
        AgentPod::of(&pod)
    }

    #[test]
    fn agents_are_recognized_by_labels_and_by_the_directory_that_they_mount() {
        let agent = pod("a", |_| {}).expect("an agent");
        assert_eq!((agent.stopped, agent.ready, agent.enters_pods), (None, true, true));
        for change in [
            |pod: &mut Value| pod["metadata"]["labels"]["app.kubernetes.io/part-of"] = json!("other"),
            |pod: &mut Value| pod["metadata"]["labels"]["app.kubernetes.io/part-of"] = Value::Null,
            |pod: &mut Value| pod["metadata"]["labels"]["app.kubernetes.io/component"] = json!("server"),
            |pod: &mut Value| pod["spec"]["volumes"][0] = json!({"name": "state", "emptyDir": {}}),
            |pod: &mut Value| pod["spec"]["containers"][0]["name"] = json!("other"),
            |pod: &mut Value| pod["spec"]["nodeName"] = Value::Null,
        ] {
            assert_eq!(pod("a", change), None);
        }
        let waiting =
            pod("a", |pod| pod["status"]["containerStatuses"][0]["state"] = json!({"waiting": {"reason": "X"}}));
        assert_eq!(waiting.expect("an agent").stopped.as_deref(), Some("X"));
        let deleted = pod("a", |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
        assert!(deleted.expect("an agent").stopped.is_some_and(|why| why.contains("deleted")));
    }

    #[test]
    fn a_running_agent_that_can_enter_pods_is_chosen() {
        let release = |name: &str, change: fn(&mut AgentPod)| {
            let mut agent =
                pod(name, |pod| pod["metadata"]["labels"]["app.kubernetes.io/name"] = json!(name)).expect("one");
            change(&mut agent);
            agent
        };
        let chosen = |agents: &[AgentPod]| AgentPod::choose(agents).map(|agent| agent.release.clone());
        let stopped = release("a", |agent| agent.stopped = Some("x".to_owned()));
        let powerless = release("b", |agent| agent.enters_pods = false);
        let unready = release("c", |agent| agent.ready = false);
        let (first, second) = (release("d", |_| {}), release("e", |_| {}));
        let all = [second, first, unready, powerless, stopped];
        for (from, expected) in ["d", "d", "c", "b", "a"].into_iter().enumerate() {
            assert_eq!(chosen(&all[from..]).as_deref(), Some(expected), "{from}");
        }
        assert_eq!(chosen(&[]), None);
    }

    #[test]
    fn the_selector_of_a_daemon_set_decides_which_nodes_need_an_agent() {
        let set = |affinity: Value| {
            let labels = json!({
                "app.kubernetes.io/name": "a", "app.kubernetes.io/component": "agent",
                "app.kubernetes.io/part-of": "detour",
            });
            let template = json!({"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}, "affinity": affinity}});
            let metadata = json!({"name": "a", "namespace": "mesh", "labels": labels});
            json!({"metadata": metadata, "spec": {"template": template}})
        };
        let is_expected = |set: Value, os: &str| {
            let node = json!({"metadata": {"name": "n", "labels": {"kubernetes.io/os": os}}});
            missing_agent(&node, &[set]).result == NodeResult::Skipped
        };
        assert!(!is_expected(set(Value::Null), "linux"));
        assert!(is_expected(set(Value::Null), "windows"));
        assert!(is_expected(set(json!({"nodeAffinity": {}})), "linux"));
    }
}
