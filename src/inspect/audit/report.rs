//! The report of `audit`: the pods of a node whose traffic bypasses the mesh, as values and as text.

use crate::inspect::rules::RuleLine;
use crate::inspect::terminal::{Cell, Screen, TextReport, Tone, counted};
use serde::{Deserialize, Serialize};

/// The report about the pods of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditReport {
    /// The name of the node.
    pub node: String,
    /// The number of pods that have a sidecar or should have one.
    #[serde(default)]
    pub checked: usize,
    /// Those of them whose traffic bypasses the mesh or could not be examined; on request, all.
    pub pods: Vec<AuditedPod>,
}

/// A pod that has a sidecar or should have one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditedPod {
    /// The namespace of the pod.
    pub namespace: String,
    /// The name of the pod.
    pub pod: String,
    /// Whether rules redirect its traffic to a sidecar, except what `bypasses` lists.
    pub redirected: bool,
    /// What redirects it, or why nothing does.
    pub reason: String,
    /// The traffic that bypasses the sidecar although the pod is redirected.
    #[serde(default)]
    pub bypasses: Vec<Bypass>,
    /// The number of further bypasses that are not listed.
    #[serde(default)]
    pub left_out: usize,
    /// The differences between live and desired rules, one line each.
    #[serde(default)]
    pub drift: Vec<String>,
    /// Why the pod could not be examined; `redirected` is `false` then.
    #[serde(default)]
    pub error: Option<String>,
}

/// Traffic of a redirected pod that bypasses the sidecar.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bypass {
    /// The rule as `iptables-save` or `nft` prints it.
    pub traffic: String,
    /// The table and the netfilter chain of the rule; the rule itself if it is another program's.
    pub source: String,
    /// What the rule counted, in the unit of `counts`.
    pub packets: Option<u64>,
    /// The bytes of these packets.
    pub bytes: Option<u64>,
    /// What `packets` and `bytes` count.
    #[serde(default)]
    pub counts: CountedUnit,
    /// Whether it is a rule of another program before the redirection.
    #[serde(default)]
    pub by_other_program: bool,
}

/// What the counter of a rule counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CountedUnit {
    /// The first packet of each connection: the kernel evaluates rules in `nat` for these only.
    #[default]
    Connections,
    /// Every packet.
    Packets,
}

impl AuditReport {
    /// Returns whether all pods are clean.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.pods.iter().all(AuditedPod::is_clean)
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
    pub(in crate::inspect) fn has_bypass_by_other_program(&self) -> bool {
        self.bypasses.iter().any(|bypass| bypass.by_other_program)
    }

    /// Returns whether the report must list the pod: traffic bypasses the mesh, rules differ, or there was an error.
    pub(in crate::inspect) fn is_listed(&self) -> bool {
        !self.is_clean() || !self.bypasses.is_empty()
    }

    /// Writes the pod below a heading, which contains its `place`.
    pub(in crate::inspect) fn write(&self, place: &str, screen: &mut Screen) {
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
            counts: if is_nat { CountedUnit::Connections } else { CountedUnit::Packets },
            ..Self::default()
        }
    }

    fn row(&self) -> Vec<Cell> {
        let unit = match self.counts {
            CountedUnit::Connections => "connection",
            CountedUnit::Packets => "packet",
        };
        let tone = if self.by_other_program { Tone::Bad } else { Tone::Notable };
        vec![
            Cell::of(self.packets.map_or_else(|| "-".to_owned(), |count| counted(count, unit))).tone(Tone::Strong),
            Cell::of(self.bytes.map_or_else(|| "-".to_owned(), |bytes| bytes.to_string())),
            Cell::of(&self.traffic).tone(tone),
            Cell::of(&self.source).tone(Tone::Faint),
        ]
    }
}

/// Returns the verdict about pods.
pub(in crate::inspect) fn verdict(pods: &[&AuditedPod]) -> (String, Tone) {
    let count = |is_meant: fn(&AuditedPod) -> bool| pods.iter().filter(|pod| is_meant(pod)).count();
    let listed = count(AuditedPod::is_listed);
    match (count(|pod| !pod.is_as_desired()), count(AuditedPod::has_bypass_by_other_program)) {
        (0, 0) if listed == 0 => ("no traffic bypasses the mesh".to_owned(), Tone::Good),
        (0, 0) => (format!("{listed} with exclusions, none bypasses the mesh entirely"), Tone::Notable),
        (0, others) => {
            (format!("{others} with a rule of another program that lets traffic bypass the mesh"), Tone::Bad)
        }
        (wrong, _) => {
            (format!("{wrong} bypass the mesh, have other rules than desired, or were not examined"), Tone::Bad)
        }
    }
}

impl TextReport for AuditReport {
    fn write(&self, screen: &mut Screen) {
        let (verdict, tone) = verdict(&self.pods.iter().collect::<Vec<_>>());
        let checked = counted(self.checked, "pod");
        screen.labeled(format!("Node {}: {checked} checked,", self.node), verdict, tone);
        self.pods.iter().for_each(|pod| pod.write("", screen));
    }
}
