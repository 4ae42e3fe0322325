//! The exclusions of workloads whose pods have a native sidecar, which serves their init containers.

use super::MAX_TEXT;
use crate::inspect::terminal::{Cell, Tone, counted};
use crate::printable;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The limit for the exclusions of one container.
const MAX_EXCLUSIONS: usize = 20;

/// The exclusions that an init container of a workload does not need.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeedlessExclusion {
    /// The namespace of the workload.
    pub namespace: String,
    /// The kind of the workload: that of the pods' controller, `Deployment` for its ReplicaSets, or `Pod`.
    pub kind: String,
    /// The name of the workload.
    pub name: String,
    /// The init container.
    pub container: String,
    /// The exclusions, each with its source.
    pub exclusions: Vec<String>,
    /// The number of the workload's pods with these exclusions.
    pub pods: u32,
}

impl NeedlessExclusion {
    /// Returns it with limited texts.
    pub(super) fn limited(self) -> Self {
        let short = |text: String| printable::cut(&text, MAX_TEXT).into_owned();
        Self {
            namespace: short(self.namespace),
            kind: short(self.kind),
            name: short(self.name),
            container: short(self.container),
            exclusions: self.exclusions.into_iter().take(MAX_EXCLUSIONS).map(short).collect(),
            pods: self.pods,
        }
    }

    /// Returns its line in the table.
    pub(super) fn row(&self) -> Vec<Cell> {
        let Self { namespace, kind, name, container, exclusions, pods } = self;
        vec![
            Cell::of(format!("{kind} {namespace}/{name}")).tone(Tone::Strong),
            Cell::of(counted(*pods, "pod")),
            Cell::of(format!("init container {container}")),
            Cell::of(exclusions.join("; ")).tone(Tone::Faint),
        ]
    }
}

/// Returns one entry for each init container of a workload, sorted, with all of its exclusions and pods.
pub(in crate::inspect) fn merged(all: impl Iterator<Item = NeedlessExclusion>) -> Vec<NeedlessExclusion> {
    let mut merged: BTreeMap<[String; 4], NeedlessExclusion> = BTreeMap::new();
    for one in all {
        let key = [&one.namespace, &one.kind, &one.name, &one.container].map(Clone::clone);
        match merged.get_mut(&key) {
            Some(known) => {
                known.pods = known.pods.saturating_add(one.pods);
                known.exclusions.extend(one.exclusions);
                known.exclusions.sort_unstable();
                known.exclusions.dedup();
            }
            None => {
                merged.insert(key, one);
            }
        }
    }
    merged.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_init_container_of_a_workload_has_one_entry_with_limited_texts() {
        let one = |name: &str, exclusion: &str, pods| NeedlessExclusion {
            name: name.into(),
            exclusions: vec![exclusion.into()],
            pods,
            ..NeedlessExclusion::default()
        };
        let all = [one("b", "y", 1), one("b", "x", u32::MAX), one("a", "x", 1), one("b", "y", 1)];
        let both = NeedlessExclusion { exclusions: vec!["x".into(), "y".into()], ..one("b", "", u32::MAX) };
        assert_eq!(merged(all.into_iter()), [one("a", "x", 1), both]);
        let long = "x".repeat(MAX_TEXT + 1);
        let limited = NeedlessExclusion { exclusions: vec![long.clone(); 100], ..one(&long, "", 1) }.limited();
        assert_eq!(limited.exclusions.len(), MAX_EXCLUSIONS);
        assert!(limited.name != long && limited.exclusions.iter().all(|text| *text != long));
    }
}
