//! Reports about all nodes, merged from the reports of their agents. Also hints to run detour on a pod's node.

mod agents;
mod check;

pub use agents::{AgentPod, has_sidecar, missing_agent};
pub use check::{NodeCheck, NodeResult, NodesCheck};

use super::audit::{AuditReport, AuditedPod, verdict};
use super::child::ProgramOutput;
use super::terminal::{Cell, Screen, TextReport, Tone, counted};
use crate::pod::Pod;
use crate::printable;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;

/// The start of an output that is not a report, in a message.
const MAX_SHOWN: usize = 300;

/// Parses the report that a command in an agent's container printed. It is input of another machine.
fn report_of<T: DeserializeOwned>(ProgramOutput { stdout, stderr, .. }: ProgramOutput) -> Result<T, String> {
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
    pub fn add(&mut self, node: &str, output: Result<ProgramOutput, String>) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::{Format, render};
    use std::process::ExitStatus;

    const FIRST: &str = r#"{"node": "x", "pods": [
        {"namespace": "shop", "pod": "web-0", "redirected": true, "reason": "has a sidecar", "error": null, "bypasses": [
            {"traffic": "UID 1337", "source": "pod, detour.io/exclude-uids", "packets": 1, "bytes": 60},
            {"traffic": "DNS of container vault", "source": "configuration", "packets": 3, "bytes": 240,
             "container": "vault", "note": "now"}]},
        {"namespace": "shop", "pod": "clean-0", "redirected": true, "reason": "has a sidecar", "bypasses": [], "error": null}]}"#;
    const SECOND: &str = r#"{"node": "y", "pods": [
        {"namespace": "shop", "pod": "early\u001b[2J", "redirected": false, "reason": "no rules", "bypasses": []},
        {"namespace": "bank", "pod": "api-0", "redirected": true, "reason": "r", "drift": ["missing: x"], "left_out": 3, "bypasses": [{"traffic": "a", "source": "b", "packets": 9, "bytes": 900}]},
        {"namespace": "bank", "pod": "api-1", "redirected": false, "reason": "", "bypasses": [], "error": "can't be read"}]}"#;

    fn audit() -> NodesAudit {
        let mut audit = NodesAudit::default();
        let output = |stdout: &str, stderr: &str| ProgramOutput {
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
        assert!(text.as_str().contains(" DNS of container vault (now) "), "{text}");
        let json = serde_json::to_value(&all).expect("JSON");
        assert_eq!(json["pods"][3]["bypasses"][1]["container"], "vault");
        assert_eq!(json["pods"][3]["bypasses"][0]["container"], serde_json::Value::Null);
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
