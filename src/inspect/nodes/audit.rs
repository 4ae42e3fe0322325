//! `kubectl detour audit`: the pods of all nodes that bypass the mesh.

use super::{MAX_ITEMS, parse, short};
use crate::inspect::terminal::{Cell, Screen, TextReport, Tone};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;

/// The report about the pods of all nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NodesAudit {
    /// The pods that bypass the mesh, in whole or in part, by bytes.
    pub pods: Vec<AuditedPod>,
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
pub struct AuditedPod {
    /// The name of its node.
    pub node: String,
    /// The pod.
    #[serde(flatten)]
    pub pod: ReportedPod,
}

/// A pod in the report of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedPod {
    /// Its namespace.
    #[serde(deserialize_with = "short")]
    pub namespace: String,
    /// Its name.
    #[serde(deserialize_with = "short")]
    pub pod: String,
    /// Whether its traffic is redirected to the sidecar.
    pub redirected: bool,
    /// Why it is redirected or not.
    #[serde(default, deserialize_with = "short")]
    pub reason: String,
    /// The traffic that bypasses the sidecar.
    #[serde(default)]
    pub bypasses: Vec<Bypass>,
    /// Why the pod could not be audited; empty if it was.
    #[serde(default, deserialize_with = "short")]
    pub error: String,
}

/// Traffic of a pod that bypasses the sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bypass {
    /// The traffic.
    #[serde(deserialize_with = "short")]
    pub traffic: String,
    /// Why it bypasses the sidecar: the annotation, the configuration key, or the rule.
    #[serde(default, deserialize_with = "short")]
    pub source: String,
    /// The number of packets; `None` if nothing counts them.
    #[serde(default)]
    pub packets: Option<u64>,
    /// The number of bytes; `None` if nothing counts them.
    #[serde(default)]
    pub bytes: Option<u64>,
}

#[derive(Deserialize)]
struct Report {
    pods: Vec<ReportedPod>,
}

impl NodesAudit {
    /// Adds the output of `detour audit -o json` of an agent on a node, limited to the pods of `namespace` if that is
    /// set. Several agents of a node report the same pods: the first report counts.
    pub fn add(&mut self, node: &str, namespace: Option<&str>, output: Result<(&[u8], &[u8]), String>) {
        match output.and_then(|(stdout, stderr)| parse::<Report>(stdout, stderr)) {
            Ok(Report { pods }) => {
                let is_wanted = |pod: &ReportedPod| namespace.is_none_or(|namespace| pod.namespace == namespace);
                let bypasses = |pod: &ReportedPod| !pod.redirected || !pod.bypasses.is_empty() || !pod.error.is_empty();
                for pod in pods.into_iter().take(MAX_ITEMS).filter(|pod| is_wanted(pod) && bypasses(pod)) {
                    self.pods.push(AuditedPod { node: node.to_owned(), pod });
                }
            }
            Err(error) => self.errors.push(NodeError { node: node.to_owned(), error }),
        }
    }

    /// Sorts the pods by bytes, those that are not redirected first.
    #[must_use]
    pub fn sorted(mut self) -> Self {
        self.pods.sort_by_cached_key(|AuditedPod { node, pod }| {
            let name = (pod.namespace.clone(), pod.pod.clone(), node.clone());
            (pod.redirected, Reverse(pod.bytes()), name)
        });
        self
    }
}

impl ReportedPod {
    fn bytes(&self) -> u64 {
        self.bypasses.iter().filter_map(|bypass| bypass.bytes).fold(0, u64::saturating_add)
    }

    fn rows<'a>(&'a self, node: &'a str) -> impl Iterator<Item = Vec<Cell>> + 'a {
        let start = move || {
            let redirected = if self.redirected { Cell::of("yes") } else { Cell::of("NO").tone(Tone::Bad) };
            vec![Cell::of(format!("{}/{}", self.namespace, self.pod)).tone(Tone::Strong), Cell::of(node), redirected]
        };
        let own = (self.bypasses.is_empty() || !self.error.is_empty()).then(move || {
            let why = if self.error.is_empty() { &self.reason } else { &self.error };
            [start(), vec![Cell::of("-"), Cell::of("-"), Cell::of("all traffic"), Cell::of(why).tone(Tone::Faint)]]
                .concat()
        });
        let count = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
        own.into_iter().chain(self.bypasses.iter().map(move |Bypass { traffic, source, packets, bytes }| {
            let counts = vec![Cell::of(count(*packets)), Cell::of(count(*bytes))];
            [start(), counts, vec![Cell::of(traffic), Cell::of(source).tone(Tone::Faint)]].concat()
        }))
    }
}

impl TextReport for NodesAudit {
    fn write(&self, screen: &mut Screen) {
        if self.pods.is_empty() {
            screen.line(&[Cell::of("No pod bypasses the mesh.")]);
        } else {
            let head = ["POD", "NODE", "REDIRECTED", "PACKETS", "BYTES", "BYPASSES", "BECAUSE OF"];
            let head = head.map(|title| Cell::of(title).tone(Tone::Faint)).to_vec();
            let rows = self.pods.iter().flat_map(|AuditedPod { node, pod }| pod.rows(node));
            screen.table(&[head].into_iter().chain(rows).collect::<Vec<_>>());
        }
        if !self.errors.is_empty() {
            screen.heading("Not audited");
            let row = |NodeError { node, error }: &NodeError| vec![Cell::of(node).tone(Tone::Strong), Cell::of(error)];
            screen.table(&self.errors.iter().map(row).collect::<Vec<_>>());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::{Format, render};

    const FIRST: &str = r#"{"node": "x", "pods": [
        {"namespace": "shop", "pod": "web-0", "redirected": true, "reason": "has a sidecar", "error": null, "bypasses": [
            {"traffic": "UID 1337", "source": "pod, detour.io/exclude-uids", "packets": 1, "bytes": 60},
            {"traffic": "DNS", "source": "configuration", "packets": 3, "bytes": 240}]},
        {"namespace": "shop", "pod": "clean-0", "redirected": true, "reason": "has a sidecar", "bypasses": [], "error": null}]}"#;
    const SECOND: &str = r#"{"node": "y", "pods": [
        {"namespace": "shop", "pod": "early\u001b[2J", "redirected": false, "reason": "no rules", "bypasses": []},
        {"namespace": "bank", "pod": "api-0", "redirected": true, "bypasses": [{"traffic": "a", "source": "b", "packets": 9, "bytes": 900}]},
        {"namespace": "bank", "pod": "api-1", "redirected": true, "bypasses": [], "error": "can't be read"}]}"#;

    fn audit(namespace: Option<&str>) -> NodesAudit {
        let mut audit = NodesAudit::default();
        audit.add("n1", namespace, Ok((FIRST.as_bytes(), b"")));
        audit.add("n2", namespace, Ok((SECOND.as_bytes(), b"")));
        audit.add("n3", namespace, Ok((b"", b"error: unrecognized subcommand")));
        audit.add("n4", namespace, Err("no answer".to_owned()));
        audit.sorted()
    }

    #[test]
    fn pods_that_bypass_the_mesh_are_sorted_by_bytes() {
        let all = audit(None);
        let names: Vec<_> = all.pods.iter().map(|pod| (pod.node.as_str(), pod.pod.pod.as_str())).collect();
        assert_eq!(names, [("n2", "early\u{1b}[2J"), ("n2", "api-0"), ("n1", "web-0"), ("n2", "api-1")]);
        assert_eq!(all.errors.iter().map(|error| error.node.as_str()).collect::<Vec<_>>(), ["n3", "n4"]);
        assert!(all.errors[0].error.contains("unrecognized subcommand"));
        assert_eq!(audit(Some("bank")).pods.len(), 2);
        let text = render(&all, Format::Table { color: false }).expect("text");
        let lines: Vec<&str> = text.as_str().lines().collect();
        assert!(
            lines[1].contains("shop/early\\u{1b}[2J") && lines[1].contains("NO") && lines[1].ends_with("no rules"),
            "{text}"
        );
        assert!(text.as_str().contains("can't be read") && text.as_str().contains("Not audited\n"), "{text}");
        let json = serde_json::to_value(&all).expect("JSON");
        assert_eq!(json["pods"][1]["bypasses"][0]["bytes"], 900);
        assert_eq!((&json["pods"][1]["node"], &json["pods"][1]["namespace"]), (&"n2".into(), &"bank".into()));
    }
}
