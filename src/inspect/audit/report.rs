//! The report of `audit`: the pods of a node, or of all nodes, whose traffic bypasses the mesh, as values and as text.

use crate::inspect::rules::RuleLine;
use crate::inspect::terminal::{Cell, Screen, TextReport, Tone, counted};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;

/// The report about the pods of a node, or of all nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditReport {
    /// The name of the node; `None` for all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The number of pods that have a sidecar or should have one.
    #[serde(default)]
    pub checked: usize,
    /// Those of them whose traffic bypasses the mesh or could not be examined; on request, all.
    pub pods: Vec<AuditedPod>,
    /// The nodes that could not be audited, with the reason.
    #[serde(default)]
    pub errors: Vec<NodeError>,
}

/// A node that could not be audited.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeError {
    /// The name of the node.
    pub node: String,
    /// The reason.
    pub error: String,
}

/// A pod that has a sidecar or should have one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AuditedPod {
    /// The name of its node, in a report about all nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The namespace of the pod.
    pub namespace: String,
    /// The name of the pod.
    pub pod: String,
    /// Whether rules redirect its traffic to a sidecar, except what `bypasses` lists.
    pub redirected: bool,
    /// What redirects it, or why nothing does.
    pub reason: String,
    /// The traffic that bypasses the sidecar although the pod is redirected.
    pub bypasses: Vec<Bypass>,
    /// The number of further bypasses that are not listed.
    pub left_out: usize,
    /// The differences between live and desired rules, one line each.
    pub drift: Vec<String>,
    /// Why the pod could not be examined; `redirected` is `false` then.
    pub error: Option<String>,
}

/// Traffic of a redirected pod that bypasses the sidecar.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bypass {
    /// The rule as `iptables-save` or `nft` prints it.
    pub traffic: String,
    /// The table and the netfilter chain of the rule; the rule itself if it is another program's.
    pub source: String,
    /// What the rule counted, in the unit of `counts`.
    pub packets: Option<u64>,
    /// The bytes of these packets.
    pub bytes: Option<u64>,
    /// What `packets` and `bytes` count: `connections`, by their first packet, because the kernel evaluates rules in `nat`
    /// for these only; or `packets`.
    pub counts: String,
    /// Whether it is a rule of another program before the redirection.
    pub by_other_program: bool,
}

impl AuditReport {
    /// Adds the report of an agent on a node, or the reason why it is missing.
    pub fn add(&mut self, node: &str, report: Result<Self, String>) {
        match report {
            Ok(Self { pods, checked, .. }) => {
                self.checked = self.checked.saturating_add(checked);
                let listed = pods.into_iter().filter(AuditedPod::is_listed);
                self.pods.extend(listed.map(|pod| AuditedPod { node: Some(node.to_owned()), ..pod }));
            }
            Err(error) => self.errors.push(NodeError { node: node.to_owned(), error }),
        }
    }

    /// Sorts the pods: those that are not redirected, those with a bypass by another program, the others; each by
    /// bytes. Errors are sorted by node.
    #[must_use]
    pub fn sorted(mut self) -> Self {
        self.errors.sort();
        self.pods.sort_by_cached_key(|pod| {
            let bytes = pod.bypasses.iter().filter_map(|bypass| bypass.bytes).fold(0, u64::saturating_add);
            let names = [&pod.namespace, &pod.pod].map(Clone::clone);
            (pod.redirected, !pod.has_bypass_by_other_program(), Reverse(bytes), names, pod.node.clone())
        });
        self
    }

    /// Returns whether all nodes were audited, and all pods are clean.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.errors.is_empty() && self.pods.iter().all(AuditedPod::is_clean)
    }

    fn verdict(&self) -> (String, Tone) {
        let count = |is_meant: fn(&AuditedPod) -> bool| self.pods.iter().filter(|pod| is_meant(pod)).count();
        let listed = count(AuditedPod::is_listed);
        match (count(|pod| !pod.is_as_desired()), count(AuditedPod::has_bypass_by_other_program)) {
            (0, 0) if listed == 0 => ("no traffic bypasses the mesh".to_owned(), Tone::Good),
            (0, 0) => (format!("{listed} with exclusions, none bypasses the mesh entirely"), Tone::Notable),
            (0, others) => (format!("{others} with a rule of another program before the redirection"), Tone::Bad),
            (wrong, _) => (format!("{wrong} bypass the mesh, have wrong rules, or were not examined"), Tone::Bad),
        }
    }
}

impl AuditedPod {
    /// Returns whether the pod could be examined, is redirected and has the desired rules, and no rule of another
    /// program lets its traffic bypass the sidecar.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.is_as_desired() && !self.has_bypass_by_other_program()
    }

    fn is_as_desired(&self) -> bool {
        self.redirected && self.drift.is_empty() && self.error.is_none()
    }

    /// Returns whether a rule of another program lets traffic bypass the sidecar.
    fn has_bypass_by_other_program(&self) -> bool {
        self.bypasses.iter().any(|bypass| bypass.by_other_program)
    }

    /// Returns whether the report must list the pod: traffic bypasses the mesh, rules differ, or there was an error.
    pub(super) fn is_listed(&self) -> bool {
        !self.is_clean() || !self.bypasses.is_empty()
    }

    fn write(&self, screen: &mut Screen) {
        let place = self.node.as_ref().map_or_else(String::new, |node| format!(" on node {node}"));
        screen.heading(&format!("Pod {}/{}{place}", self.namespace, self.pod));
        if let Some(error) = &self.error {
            screen.text(format!("  not examined: {error}"), Tone::Bad);
            return;
        }
        let tone = if self.redirected { Tone::Plain } else { Tone::Bad };
        screen.text(format!("  {}", self.reason), tone);
        for difference in &self.drift {
            screen.text(format!("  {difference}"), Tone::Bad);
        }
        if !self.bypasses.is_empty() {
            let titles = ["counted", "bytes", "bypasses the sidecar", "rule in"];
            screen.titled_table(titles, self.bypasses.iter().map(Bypass::row));
        }
        if self.left_out > 0 {
            screen.text(format!("  {} more are not listed", self.left_out), Tone::Notable);
        }
    }
}

impl Bypass {
    /// Returns the bypass by a live rule.
    pub(super) fn of(line: &RuleLine) -> Self {
        let is_nat = line.table.ends_with("nat") || line.table.ends_with("exclusions");
        Self {
            traffic: line.rule.clone(),
            source: format!("{} {}", line.table, line.chain),
            packets: line.packets,
            bytes: line.bytes,
            counts: if is_nat { "connections" } else { "packets" }.to_owned(),
            ..Self::default()
        }
    }

    fn row(&self) -> Vec<Cell> {
        let unit = self.counts.trim_end_matches('s');
        let tone = if self.by_other_program { Tone::Bad } else { Tone::Notable };
        vec![
            Cell::of(self.packets.map_or_else(|| "-".to_owned(), |count| counted(count, unit))).tone(Tone::Strong),
            Cell::of(self.bytes.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string())),
            Cell::of(&self.traffic).tone(tone),
            Cell::of(&self.source).tone(Tone::Faint),
        ]
    }
}

impl TextReport for AuditReport {
    fn write(&self, screen: &mut Screen) {
        let (verdict, tone) = self.verdict();
        let checked = counted(self.checked, "pod");
        match &self.node {
            Some(node) => screen.labeled(format!("Node {node}: {checked} checked,"), verdict, tone),
            None if self.pods.is_empty() => {
                let place = if self.errors.is_empty() { "" } else { " on the audited nodes" };
                screen.text(format!("No pod{place} bypasses the mesh; pods checked: {}", self.checked), Tone::Plain);
            }
            None => screen.labeled(format!("{checked} checked,"), verdict, tone),
        }
        self.pods.iter().for_each(|pod| pod.write(screen));
        let row = |NodeError { node, error }: &NodeError| vec![Cell::of(node).tone(Tone::Strong), Cell::of(error)];
        screen.section("Not audited", self.errors.iter().map(row));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::{Format, render};

    const FIRST: &str = r#"{"node": "x", "pods": [
        {"namespace": "shop", "pod": "web-0", "redirected": true, "reason": "has a sidecar", "error": null, "bypasses": [
            {"traffic": "UID 1337", "source": "pod, detour.io/exclude-uids", "packets": 1, "bytes": 60},
            {"traffic": "socket cgroupv2 level 4 @excluded-dns", "source": "b", "packets": 3, "bytes": 240}]},
        {"namespace": "shop", "pod": "clean-0", "redirected": true, "reason": "has a sidecar", "bypasses": [], "error": null}]}"#;
    const SECOND: &str = r#"{"node": "y", "pods": [
        {"namespace": "shop", "pod": "early\u001b[2J", "redirected": false, "reason": "no rules", "bypasses": []},
        {"namespace": "bank", "pod": "api-0", "redirected": true, "reason": "r", "drift": ["missing: x"], "left_out": 3, "bypasses": [{"traffic": "a", "source": "b", "packets": 9, "bytes": 900}]},
        {"namespace": "bank", "pod": "api-1", "redirected": false, "reason": "", "bypasses": [], "error": "can't be read"}]}"#;

    fn audit() -> AuditReport {
        let mut audit = AuditReport::default();
        let report = |text: &str| serde_json::from_str(text).map_err(|error| error.to_string());
        audit.add("n4", Err("no answer".to_owned()));
        audit.add("n3", Err("unknown subcommand".to_owned()));
        audit.add("n2", report(SECOND));
        audit.add("n1", report(FIRST));
        audit.sorted()
    }

    #[test]
    fn pods_that_bypass_the_mesh_are_sorted_by_bytes() {
        let all = audit();
        let names: Vec<_> =
            all.pods.iter().map(|pod| (pod.node.as_deref().expect("a node"), pod.pod.as_str())).collect();
        assert_eq!(names, [("n2", "api-1"), ("n2", "early\u{1b}[2J"), ("n2", "api-0"), ("n1", "web-0")]);
        assert_eq!(all.errors.iter().map(|error| error.node.as_str()).collect::<Vec<_>>(), ["n3", "n4"]);
        let text = render(&all, Format::Table, Screen::plain()).expect("text");
        assert!(text.as_str().contains("\nPod shop/early\\u{1b}[2J on node n2\n  no rules\n"), "{text}");
        assert!(text.as_str().contains("missing: x\n") && text.as_str().contains("3 more"), "{text}");
        assert!(text.as_str().contains("can't be read") && text.as_str().contains("Not audited\n"), "{text}");
        assert!(text.as_str().contains(" @excluded-dns "), "{text}");
        let json = serde_json::to_value(&all).expect("JSON");
        assert_eq!(json["pods"][2]["bypasses"][0]["bytes"], 900);
        assert_eq!((&json["pods"][2]["node"], &json["pods"][2]["namespace"]), (&"n2".into(), &"bank".into()));
    }
}
