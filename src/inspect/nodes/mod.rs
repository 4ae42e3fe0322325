//! Reports about all nodes, merged from the reports of their agents: `kubectl detour check`, the node checks of the doctor,
//! and `kubectl detour audit`. Also the hint to run detour on a pod's node.

mod agents;

pub use agents::{AgentPod, has_sidecar, missing_agent};

use super::audit::{AuditReport, AuditedPod, verdict};
use super::doctor::{CheckOutcome, Checklist, ReportLine};
use super::needless_exclusions::{self, NeedlessExclusion};
use super::terminal::{Cell, Screen, TextReport, Tone, counted, joined};
use crate::cluster::agent::PolicyCounts;
use crate::plugin::FormatCounts;
use crate::pod::Pod;
use crate::printable;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt;
use std::process::Output;

/// The start of an output that is not a report, in a message.
const MAX_SHOWN: usize = 300;

/// Parses the report that a command in an agent's container printed. It is input from another machine.
fn report_of<T: DeserializeOwned>(Output { stdout, stderr, .. }: Output) -> Result<T, String> {
    /// What a command prints in place of its report.
    #[derive(Deserialize)]
    struct Failed {
        error: String,
    }
    serde_json::from_slice(&stdout).map_err(|error| match serde_json::from_slice(&stdout) {
        Ok(Failed { error }) => error,
        Err(_) => {
            let text = [stderr, stdout].concat();
            let text = String::from_utf8_lossy(&text);
            format!("expected a report, got {:?} ({error})", printable::cut(text.trim(), MAX_SHOWN))
        }
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

/// The report about the pods of all nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NodesAudit {
    /// The number of pods that were checked.
    pub checked: usize,
    /// The pods that bypass the mesh, in whole or in part, by bytes.
    pub pods: Vec<PodOfNode>,
    /// The nodes that could not be audited, with the reason.
    pub errors: Vec<NodeError>,
}

/// A node that could not be audited.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeError {
    /// The name of the node.
    pub node: String,
    /// The reason.
    pub error: String,
}

/// A pod that bypasses the mesh.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodOfNode {
    /// The name of its node.
    pub node: String,
    /// The report of the node's agent about it.
    #[serde(flatten)]
    pub pod: AuditedPod,
}

impl NodesAudit {
    /// Adds the output of `detour audit -o json` of an agent on a node.
    pub fn add(&mut self, node: &str, output: Result<Output, String>) {
        match output.and_then(report_of) {
            Ok(AuditReport { pods, checked, .. }) => {
                self.checked = self.checked.saturating_add(checked);
                let listed = pods.into_iter().filter(AuditedPod::is_listed);
                self.pods.extend(listed.map(|pod| PodOfNode { node: node.to_owned(), pod }));
            }
            Err(error) => self.errors.push(NodeError { node: node.to_owned(), error }),
        }
    }

    /// Sorts the pods: those that are not redirected, those with a bypass by another program, the others; each by
    /// bytes. Errors are sorted by node.
    #[must_use]
    pub fn sorted(mut self) -> Self {
        self.errors.sort_by(|a, b| a.node.cmp(&b.node));
        self.pods.sort_by_cached_key(|PodOfNode { node, pod }| {
            let bytes = pod.bypasses.iter().filter_map(|bypass| bypass.bytes).fold(0, u64::saturating_add);
            (
                pod.redirected,
                !pod.has_bypass_by_other_program(),
                Reverse(bytes),
                pod.namespace.clone(),
                pod.pod.clone(),
                node.clone(),
            )
        });
        self
    }

    /// Returns whether all nodes were audited, and all pods are clean.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.errors.is_empty() && self.pods.iter().all(|one| one.pod.is_clean())
    }
}

impl TextReport for NodesAudit {
    fn write(&self, screen: &mut Screen) {
        if self.pods.is_empty() {
            let none = match self.errors.is_empty() {
                true => "No pod bypasses the mesh",
                false => "No pod on the audited nodes bypasses the mesh",
            };
            screen.text(format!("{none}; pods checked: {}", self.checked), Tone::Plain);
        } else {
            let (verdict, tone) = verdict(&self.pods.iter().map(|one| &one.pod).collect::<Vec<_>>());
            screen.labeled(format!("{} checked,", counted(self.checked, "pod")), verdict, tone);
        }
        for PodOfNode { node, pod } in &self.pods {
            pod.write(&format!(" on node {node}"), screen);
        }
        let row = |NodeError { node, error }: &NodeError| vec![Cell::of(node).tone(Tone::Strong), Cell::of(error)];
        screen.section("Not audited", self.errors.iter().map(row));
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

impl PolicyCounts {
    const fn plus(self, other: Self) -> Self {
        Self {
            current: self.current.saturating_add(other.current),
            rejected: self.rejected.saturating_add(other.rejected),
            failed: self.failed.saturating_add(other.failed),
            none: self.none.saturating_add(other.none),
            outside: self.outside.saturating_add(other.outside),
        }
    }

    /// Returns the number of pods whose rules are missing or may be wrong.
    pub(in crate::inspect) const fn lost(self) -> u32 {
        self.failed.saturating_add(self.none).saturating_add(self.outside)
    }
}

impl fmt::Display for PolicyCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { current, rejected, failed, none, outside } = self;
        write!(f, "{current} current, {rejected} with rejected requests, {failed} failed, {none} without rules")?;
        if *outside > 0 { write!(f, ", {outside} outside of the ambient mesh") } else { Ok(()) }
    }
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
        let needless: Vec<_> =
            once().filter_map(|agents| agents.iter().find_map(|one| one.needless_exclusions.clone())).collect();
        Self {
            healthy: nodes.iter().all(|node| node.result != NodeResult::Unhealthy),
            policies: nodes.iter().filter_map(|node| node.policies).reduce(PolicyCounts::plus),
            rule_formats: rule_formats.reduce(FormatCounts::plus),
            needless_exclusions: (!needless.is_empty())
                .then(|| needless_exclusions::merged(needless.into_iter().flatten())),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ObjectRef;
    use crate::inspect::{Format, render};
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
        assert!(
            text.contains(
                "\nPolicies of running pods: 6 current, 4 with rejected requests, 4294967295 failed, 0 without rules, 2 outside of the ambient mesh\n"
            ),
            "{text}"
        );
        assert!(text.contains("warnings: policies, pod-policy\n"), "{text}");
        assert!(text.contains("  warn pod-policy (c)\n        x/y: older\\u{1b}[2J\n        next: d\n"), "{text}");
    }

    const FIRST: &str = r#"{"node": "x", "pods": [
        {"namespace": "shop", "pod": "web-0", "redirected": true, "reason": "has a sidecar", "error": null, "bypasses": [
            {"traffic": "UID 1337", "source": "pod, detour.io/exclude-uids", "packets": 1, "bytes": 60},
            {"traffic": "socket cgroupv2 level 4 @excluded-dns", "source": "b", "packets": 3, "bytes": 240}]},
        {"namespace": "shop", "pod": "clean-0", "redirected": true, "reason": "has a sidecar", "bypasses": [], "error": null}]}"#;
    const SECOND: &str = r#"{"node": "y", "pods": [
        {"namespace": "shop", "pod": "early\u001b[2J", "redirected": false, "reason": "no rules", "bypasses": []},
        {"namespace": "bank", "pod": "api-0", "redirected": true, "reason": "r", "drift": ["missing: x"], "left_out": 3, "bypasses": [{"traffic": "a", "source": "b", "packets": 9, "bytes": 900}]},
        {"namespace": "bank", "pod": "api-1", "redirected": false, "reason": "", "bypasses": [], "error": "can't be read"}]}"#;

    fn audit() -> NodesAudit {
        let mut audit = NodesAudit::default();
        let output = |stdout: &str, stderr: &str| Output {
            stdout: stdout.into(),
            stderr: stderr.into(),
            status: ExitStatus::default(),
        };
        audit.add("n4", Err("no answer".to_owned()));
        audit.add("n3", Ok(output("", "error: unrecognized subcommand")));
        audit.add("n2", Ok(output(SECOND, "")));
        audit.add("n1", Ok(output(FIRST, "")));
        audit.sorted()
    }

    #[test]
    fn pods_that_bypass_the_mesh_are_sorted_by_bytes() {
        let all = audit();
        let names: Vec<_> = all.pods.iter().map(|pod| (pod.node.as_str(), pod.pod.pod.as_str())).collect();
        assert_eq!(names, [("n2", "api-1"), ("n2", "early\u{1b}[2J"), ("n2", "api-0"), ("n1", "web-0")]);
        assert_eq!(all.errors.iter().map(|error| error.node.as_str()).collect::<Vec<_>>(), ["n3", "n4"]);
        assert!(all.errors[0].error.contains("unrecognized subcommand"));
        let text = render(&all, Format::Table, Screen::plain()).expect("text");
        assert!(text.as_str().contains("\nPod shop/early\\u{1b}[2J on node n2\n  no rules\n"), "{text}");
        assert!(text.as_str().contains("missing: x\n") && text.as_str().contains("3 more"), "{text}");
        assert!(text.as_str().contains("can't be read") && text.as_str().contains("Not audited\n"), "{text}");
        assert!(text.as_str().contains(" @excluded-dns "), "{text}");
        let json = serde_json::to_value(&all).expect("JSON");
        assert_eq!(json["pods"][2]["bypasses"][0]["bytes"], 900);
        assert_eq!((&json["pods"][2]["node"], &json["pods"][2]["namespace"]), (&"n2".into(), &"bank".into()));
    }

    #[test]
    fn hints_contain_the_node_and_the_arguments() {
        let pod = Pod { namespace: "shop".into(), name: "web-0".into(), ..Pod::default() };
        let there = Pod { node_name: Some("worker-1".into()), ..pod.clone() };
        let text = node_hint(&there, "doctor --probe");
        assert!(text.starts_with("the pod is on node worker-1; "), "{text}");
        assert!(text.contains("; run kubectl detour doctor --probe -n shop web-0, "), "{text}");
        assert!(
            text.ends_with("oc debug node/worker-1 -- chroot /host DIR/detour doctor --probe -n shop web-0"),
            "{text}"
        );
        assert!(node_hint(&pod, "rules").contains("not scheduled"));
    }
}
