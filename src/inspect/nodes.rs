//! Reports about all nodes, merged from those of their agents: `kubectl detour check` runs doctor on each node. Also the
//! agents' pods and DaemonSets and the nodes, as the API lists them, and the hint to run detour on a pod's node.

use super::doctor::{self, CheckOutcome, Checklist, NeedlessExclusion, ReportLine};
use super::terminal::{Cell, Screen, TextReport, Tone, joined};
use crate::cluster::ObjectRef;
use crate::cluster::agent::PolicyCounts;
use crate::plugin::FormatCounts;
use crate::pod::{Pod, well_known::PROXY_CONTAINER};
use crate::printable;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::process::Output;

/// The start of an output that is not a report, in a message.
const MAX_SHOWN: usize = 300;

/// Parses the report that a command in an agent's container printed. It is input from another machine.
///
/// # Errors
/// The error that the command printed, or what it printed in place of a report.
pub fn report_of<T: DeserializeOwned>(Output { stdout, stderr, .. }: Output) -> Result<T, String> {
    serde_json::from_slice(&stdout).map_err(|error| {
        let failed: Value = serde_json::from_slice(&stdout).unwrap_or_default();
        if let Some(error) = failed["error"].as_str() {
            return error.to_owned();
        }
        let text = [stderr, stdout].concat();
        let text = String::from_utf8_lossy(&text);
        format!("expected a report, got {:?} ({error})", printable::cut(text.trim(), MAX_SHOWN))
    })
}

/// Returns the command that runs detour with `arguments` on the pod's node.
#[must_use]
pub fn node_hint(Pod { namespace, name, node_name, .. }: &Pod, arguments: &str) -> String {
    match node_name {
        Some(node) => format!(
            "the pod is on node {node}; run kubectl detour {arguments} -n {namespace} {name}, or, with DIR being the plugin's \
             directory on the node: oc debug node/{node} -- chroot /host DIR/detour {arguments} -n {namespace} {name}"
        ),
        None => format!("the pod is not scheduled to a node; see kubectl describe pod -n {namespace} {name}"),
    }
}

/// The report about all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodesCheck {
    /// Whether no node has a problem.
    pub healthy: bool,
    /// The policies of the running pods of all nodes; `None` if no agent reports them.
    pub policies: Option<PolicyCounts>,
    /// The redirected pods of all nodes by rule format; `None` if no agent reports them.
    pub rule_formats: Option<FormatCounts>,
    /// The exclusions of the nodes' workloads that are not needed; `None` if no agent reports them.
    pub needless_exclusions: Option<Vec<NeedlessExclusion>>,
    /// One entry per agent, and one per node without an agent; sorted by node.
    pub nodes: Vec<NodeCheck>,
}

/// The checks of one agent, or a node without an agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NodeCheck {
    /// The name of the node.
    pub node: String,
    /// `NAMESPACE/NAME` of the agent's pod; `None` if the node has no agent.
    pub agent: Option<String>,
    /// The agent's release.
    pub release: Option<String>,
    /// The agent's version, if known.
    pub version: Option<Cow<'static, str>>,
    /// Whether the node has a problem.
    pub result: NodeResult,
    /// Why the node could not be checked or was skipped, or what is wrong with its agent.
    pub reason: Option<String>,
    /// The checks that failed.
    pub failed: Vec<ReportLine>,
    /// The checks with a warning.
    pub warnings: Vec<ReportLine>,
    /// The policies of the node's running pods; `None` if the agent does not report them.
    pub policies: Option<PolicyCounts>,
    /// The node's redirected pods by rule format; `None` if the agent does not report them.
    pub rule_formats: Option<FormatCounts>,
    /// The exclusions of the node's workloads that are not needed; `None` if the agent does not report them.
    #[serde(skip)]
    pub needless_exclusions: Option<Vec<NeedlessExclusion>>,
}

/// The result of a node. Of a node with several agents, the greatest result counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeResult {
    /// No agent should run on the node.
    #[default]
    Skipped,
    /// No check failed, and the agent is ready.
    Healthy,
    /// A check failed, the agent is not ready, or it is missing.
    Unhealthy,
}

impl NodesCheck {
    /// Returns the report about these nodes.
    #[must_use]
    pub fn of(mut nodes: Vec<NodeCheck>) -> Self {
        nodes.sort_by(|a, b| (&a.node, &a.release, &a.agent).cmp(&(&b.node, &b.release, &b.agent)));
        // Two agents of a node count the same pods.
        let once = || nodes.chunk_by(|a, b| a.node == b.node);
        let rule_formats = once().filter_map(|agents| agents.iter().find_map(|one| one.rule_formats));
        let needless = once().filter_map(|agents| agents.iter().find_map(|one| one.needless_exclusions.clone()));
        Self {
            healthy: nodes.iter().all(|node| node.result != NodeResult::Unhealthy),
            policies: nodes.iter().filter_map(|node| node.policies).reduce(PolicyCounts::plus),
            rule_formats: rule_formats.reduce(FormatCounts::plus),
            needless_exclusions: needless.reduce(|all, more| [all, more].concat()).map(doctor::merged),
            nodes,
        }
    }

    /// Returns the names of the nodes with problems.
    #[must_use]
    pub fn unhealthy(&self) -> BTreeSet<&str> {
        let unhealthy = self.nodes.iter().filter(|node| node.result == NodeResult::Unhealthy);
        unhealthy.map(|node| node.node.as_str()).collect()
    }
}

impl NodeCheck {
    /// Returns the result of an agent from the output of `detour doctor -o json`, or from the reason why it is missing.
    #[must_use]
    pub fn of_agent(agent: &AgentPod, output: Result<Output, String>) -> Self {
        let own = Self {
            node: agent.node.clone(),
            agent: Some(agent.object.to_string()),
            release: Some(agent.release.clone()),
            result: NodeResult::Unhealthy,
            ..Self::default()
        };
        let list: Checklist = match output.and_then(report_of) {
            Ok(list) => list,
            Err(why) => return Self { reason: Some(why), ..own },
        };
        let with = |outcome| list.with(outcome).cloned().collect::<Vec<_>>();
        let (failed, warnings) = (with(CheckOutcome::Fail), with(CheckOutcome::Warn));
        let is_healthy = list.healthy && agent.ready && failed.is_empty();
        Self {
            version: Some(list.version),
            result: if is_healthy { NodeResult::Healthy } else { NodeResult::Unhealthy },
            reason: (!agent.ready).then(|| "the agent is not ready".to_owned()),
            failed,
            warnings,
            policies: list.policies.map(|report| report.counts),
            rule_formats: list.rule_formats,
            needless_exclusions: list.needless_exclusions,
            ..own
        }
    }

    fn row(&self) -> Vec<Cell> {
        let (word, tone) = match self.result {
            NodeResult::Healthy => ("healthy", Tone::Good),
            NodeResult::Unhealthy => ("UNHEALTHY", Tone::Bad),
            NodeResult::Skipped => ("skipped", Tone::Faint),
        };
        let named = |title: &str, checks: &[ReportLine]| {
            let mut ids: Vec<&str> = checks.iter().map(|check| &*check.id).collect();
            ids.dedup();
            (!ids.is_empty()).then(|| format!("{title}: {}", joined(ids)))
        };
        let checks = [named("failed", &self.failed), named("warnings", &self.warnings)];
        let what: Vec<String> = self.reason.iter().cloned().chain(checks.into_iter().flatten()).collect();
        vec![
            Cell::of(&self.node).tone(Tone::Strong),
            Cell::of(word).tone(tone),
            Cell::of(self.version.as_deref().unwrap_or("-")),
            Cell::of(self.agent.as_deref().unwrap_or("no agent")),
            Cell::of(what.join("; ")).tone(Tone::Faint),
        ]
    }
}

impl TextReport for NodesCheck {
    fn write(&self, screen: &mut Screen) {
        let results = self.nodes.chunk_by(|a, b| a.node == b.node);
        let results: Vec<NodeResult> = results.filter_map(|agents| agents.iter().map(|one| one.result).max()).collect();
        let count = |result| results.iter().filter(|one| **one == result).count();
        let (healthy, unhealthy) = (count(NodeResult::Healthy), count(NodeResult::Unhealthy));
        let text = format!("{healthy} healthy, {unhealthy} unhealthy, {} skipped", count(NodeResult::Skipped));
        let tone = if self.healthy { Tone::Good } else { Tone::Bad };
        screen.labeled("Nodes:", text, tone);
        if let Some(counts) = self.policies {
            let tone = if counts.lost() > 0 { Tone::Bad } else { Tone::Plain };
            screen.labeled("Policies of running pods:", counts.to_string(), tone);
        }
        if let Some(FormatCounts { iptables, nftables }) = self.rule_formats {
            let text = format!("{iptables} iptables, {nftables} nftables");
            screen.labeled("Redirected pods by rule format:", text, Tone::Plain);
        }
        screen.table(&self.nodes.iter().map(NodeCheck::row).collect::<Vec<_>>());
        let needless = self.needless_exclusions.iter().flatten().map(NeedlessExclusion::row);
        screen.section("Exclusions that are no longer needed, because istio-proxy is a native sidecar", needless);
        for node in self.nodes.iter().filter(|node| !node.failed.is_empty() || !node.warnings.is_empty()) {
            screen.heading(&format!("Node {}, agent {}", node.node, node.agent.as_deref().unwrap_or("-")));
            node.failed.iter().chain(&node.warnings).for_each(|line| line.write(screen));
        }
    }
}

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
        let added = &container["securityContext"]["capabilities"]["add"];
        let is_ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
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
        agents.iter().min_by_key(|&agent| (agent.stopped.is_some(), !agent.enters_pods, !agent.ready, &agent.release))
    }
}

/// Returns the result of a node without an agent, and why it has none according to the DaemonSets of agents. The node is
/// skipped if no DaemonSet selects it, or if a node affinity decides: those are not evaluated.
#[must_use]
pub fn missing_agent(node: &Value, sets: &[Value]) -> NodeCheck {
    let labels = &node["metadata"]["labels"];
    let selects = |set: &&Value| {
        let pod = &set["spec"]["template"]["spec"];
        let mut selector = pod["nodeSelector"].as_object().into_iter().flatten();
        let is_decisive = is_agent(&set["metadata"]) && !pod["affinity"]["nodeAffinity"].is_object();
        is_decisive && selector.all(|(key, value)| labels[key] == *value)
    };
    let (result, reason) = match sets.iter().find(selects).and_then(|set| object(&set["metadata"])) {
        Some(ObjectRef { namespace, name }) => {
            let next = format!("see kubectl describe daemonset -n {namespace} {name}");
            let why = format!("no agent, but DaemonSet {namespace}/{name} selects this node; {next}");
            (NodeResult::Unhealthy, why)
        }
        None => {
            (NodeResult::Skipped, "no agent; none is expected, unless a node affinity selects this node".to_owned())
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
    use crate::inspect::{Format, render};
    use serde_json::json;
    use std::process::ExitStatus;

    const REPORT: &str = r#"{"pod": null, "node": "other", "platform": "kubernetes", "version": "0.2.0", "healthy": false, "checks": [
        {"id": "program-installed", "group": "node", "checked": "a", "outcome": "pass", "found": "b", "next": null},
        {"id": "token-valid", "group": "cluster", "checked": "c", "outcome": "fail", "found": "d\u001b[2J", "next": "e"}]}"#;

    /// With a field of a later version.
    const POLICIES: &str = r#"{"version": "0.3.0", "healthy": true,
        "policies": {"follows": true, "current": 3, "rejected": 2, "outside": 1, "findings": [], "later": 1}, "checks": [
        {"id": "policies", "checked": "a", "outcome": "warn", "found": "2 older", "next": "b"},
        {"id": "pod-policy", "checked": "c", "outcome": "warn", "found": "x/y: older\u001b[2J", "next": "d"},
        {"id": "pod-policy", "checked": "c", "outcome": "warn", "found": "x/z: older", "next": "d"}]}"#;

    fn agent(ready: bool, output: Result<&str, &str>) -> NodeCheck {
        let object = ObjectRef { namespace: "kube-system".into(), name: "a".into() };
        let (node, release) = ("n1".to_owned(), "detour".to_owned());
        let agent = AgentPod { object, node, release, stopped: None, ready, enters_pods: true };
        let (stderr, status) = ("detour: x".into(), ExitStatus::default());
        let output = output.map(|stdout| Output { stdout: stdout.into(), stderr, status });
        NodeCheck::of_agent(&agent, output.map_err(str::to_owned))
    }

    #[test]
    fn failed_checks_and_missing_agents_are_problems() {
        let healthy = r#"{"version": "0.2.0", "healthy": true, "checks": []}"#;
        let ok = agent(true, Ok(healthy));
        assert_eq!((ok.result, ok.reason), (NodeResult::Healthy, None));
        assert_eq!(agent(false, Ok(healthy)).reason.as_deref(), Some("the agent is not ready"));
        let failed = agent(true, Ok(REPORT));
        assert_eq!(failed.failed.iter().map(|check| &*check.id).collect::<Vec<_>>(), ["token-valid"]);
        // A node can't hide a failed check.
        assert_eq!(
            agent(true, Ok(&REPORT.replace("\"healthy\": false", "\"healthy\": true"))).result,
            NodeResult::Unhealthy
        );
        assert_eq!(agent(true, Err("why")).reason.as_deref(), Some("why"));
        let failed_command = agent(true, Ok(r#"{"error": "--root /host: expected a directory", "exit_code": 2}"#));
        assert_eq!(failed_command.reason.as_deref(), Some("--root /host: expected a directory"));
        let garbage = agent(true, Ok("\u{1b}[2J"));
        assert!(garbage.reason.expect("why").starts_with("expected a report, got \"detour: x\\u{1b}[2J\" ("));
        let two = NodesCheck::of(vec![agent(true, Ok(healthy)), agent(true, Err("why"))]);
        let text = render(&two, Format::Table, Screen::plain()).expect("text");
        assert!(text.as_str().starts_with("Nodes: 0 healthy, 1 unhealthy, 0 skipped\n"), "{text}");
        let without_agent = |node: &str, result| NodeCheck { node: node.to_owned(), result, ..NodeCheck::default() };
        let missing = without_agent("n2", NodeResult::Unhealthy);
        let skipped = without_agent("n3", NodeResult::Skipped);
        let report = NodesCheck::of(vec![skipped, missing, agent(true, Ok(healthy)), failed]);
        assert_eq!((report.healthy, report.unhealthy()), (false, BTreeSet::from(["n1", "n2"])));
        let text = render(&report, Format::Table, Screen::plain()).expect("text");
        assert!(text.as_str().starts_with("Nodes: 0 healthy, 2 unhealthy, 1 skipped\n"), "{text}");
        assert!(text.as_str().contains("  FAIL token-valid (c)\n        d\\u{1b}[2J\n        next: e\n"), "{text}");
    }

    #[test]
    fn warnings_do_not_make_a_node_unhealthy_and_policies_add_up() {
        let warned = agent(true, Ok(POLICIES));
        assert_eq!(warned.result, NodeResult::Healthy);
        let failed = PolicyCounts { failed: u32::MAX, ..PolicyCounts::default() };
        let other = NodeCheck {
            policies: Some(failed),
            ..agent(true, Ok(r#"{"version": "0.2.0", "healthy": true, "checks": []}"#))
        };
        let alone = NodesCheck::of(vec![agent(true, Err("why"))]);
        assert_eq!(alone.policies, None);
        let report = NodesCheck::of(vec![warned.clone(), other, warned]);
        let counts = PolicyCounts { current: 6, rejected: 4, failed: u32::MAX, none: 0, outside: 2 };
        assert_eq!(report.policies, Some(counts));
        let text = render(&report, Format::Table, Screen::plain()).expect("text");
        let text = text.as_str();
        let sum = "Policies of running pods: 6 current, 4 with rejected requests, 4294967295 failed, 0 without rules, \
            2 outside of the ambient mesh";
        assert!(text.lines().any(|line| line == sum), "{text}");
        assert!(text.contains("warnings: policies, pod-policy\n"), "{text}");
        assert!(text.contains("  warn pod-policy (c)\n        x/y: older\\u{1b}[2J\n        next: d\n"), "{text}");
    }

    #[test]
    fn hints_contain_the_node_and_the_arguments() {
        let pod = Pod { namespace: "shop".into(), name: "web-0".into(), ..Pod::default() };
        let there = node_hint(&Pod { node_name: Some("worker-1".into()), ..pod.clone() }, "rules");
        assert!(there.starts_with("the pod is on node worker-1; run kubectl detour rules -n shop web-0, "), "{there}");
        assert!(node_hint(&pod, "rules").contains("not scheduled"));
    }

    fn labels() -> Value {
        json!({
            "app.kubernetes.io/name": "detour", "app.kubernetes.io/component": "agent",
            "app.kubernetes.io/part-of": "detour",
        })
    }

    fn pod(name: &str, change: impl FnOnce(&mut Value)) -> Option<AgentPod> {
        let mut pod = json!({
            "metadata": {"name": name, "namespace": "mesh", "labels": labels()},
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
            let mut agent = AgentPod { release: name.to_owned(), ..pod("a", |_| {}).expect("an agent") };
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
            let template = json!({"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}, "affinity": affinity}});
            let metadata = json!({"name": "a", "namespace": "mesh", "labels": labels()});
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
