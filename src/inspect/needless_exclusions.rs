//! The exclusions of workloads that they no longer need, because a native sidecar serves their init containers.

use super::explain::{InitContainer, application_containers, explain};
use super::subject::{AppliedConf, Subject};
use super::terminal::{Cell, Tone, counted};
use crate::cluster::{Api, ScheduledPod, Workload};
use crate::pod::{Facts, Namespace};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

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
    pub exclusions: BTreeSet<String>,
    /// The number of the workload's pods with these exclusions.
    pub pods: u32,
}

impl NeedlessExclusion {
    /// Returns its line in the table.
    pub(super) fn row(&self) -> Vec<Cell> {
        let Self { namespace, kind, name, container, exclusions, pods } = self;
        vec![
            Cell::of(format!("{kind} {namespace}/{name}")).tone(Tone::Strong),
            Cell::of(counted(*pods, "pod")),
            Cell::of(format!("init container {container}")),
            Cell::of(exclusions.iter().cloned().collect::<Vec<_>>().join("; ")).tone(Tone::Faint),
        ]
    }
}

/// Returns one entry for each init container of a workload, sorted, with all of its exclusions and pods.
pub(super) fn merged(all: impl Iterator<Item = NeedlessExclusion>) -> Vec<NeedlessExclusion> {
    let mut merged: BTreeMap<[String; 4], NeedlessExclusion> = BTreeMap::new();
    for one in all {
        let key = [&one.namespace, &one.kind, &one.name, &one.container].map(Clone::clone);
        let known = merged.entry(key).or_insert_with(|| NeedlessExclusion { pods: 0, ..one.clone() });
        known.pods = known.pods.saturating_add(one.pods);
        known.exclusions.extend(one.exclusions);
    }
    merged.into_values().collect()
}

/// Returns the exclusions of a node's pods that are not needed; `None` if the pods can't be listed.
pub(super) fn find(node: &str, api: &Api, configurations: &[AppliedConf]) -> Option<Vec<NeedlessExclusion>> {
    let mut pods = api.pods_of_node(node, None).ok()?;
    pods.retain(|scheduled| {
        let has_served = application_containers(&scheduled.pod).iter().any(|container| container.runs_after_proxy());
        has_served && !scheduled.is_ending
    });
    if pods.is_empty() {
        return Some(Vec::new());
    }
    let namespaces = api.namespaces(None).ok()?.into_iter();
    let namespaces: BTreeMap<String, Namespace> = namespaces.map(|one| (one.name.clone(), one)).collect();
    let of_pod = |scheduled: &ScheduledPod| {
        let facts = Facts { pod: scheduled.pod.clone(), namespace: namespaces.get(&scheduled.pod.namespace).cloned() };
        let of_itself = || Workload { kind: "Pod".to_owned(), name: facts.pod.name.clone() };
        let Workload { kind, name } = scheduled.workload.clone().unwrap_or_else(of_itself);
        // If an ADD of the pod fails, it has no exclusions.
        let explained = Subject::given(configurations, facts.clone(), Some(api)).and_then(|subject| explain(&subject));
        let containers = explained.map(|explanation| explanation.init_containers).unwrap_or_default();
        let namespace = facts.pod.namespace;
        let of_container = move |container: InitContainer| NeedlessExclusion {
            namespace: namespace.clone(),
            kind: kind.clone(),
            name: name.clone(),
            container: container.name,
            exclusions: container.needless_exclusions,
            pods: 1,
        };
        let needless = containers.into_iter().filter(|container| !container.needless_exclusions.is_empty());
        needless.map(of_container)
    };
    Some(merged(pods.iter().flat_map(of_pod)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_init_container_of_a_workload_has_one_entry() {
        let one = |name: &str, exclusion: &str, pods| NeedlessExclusion {
            name: name.into(),
            exclusions: [exclusion.into()].into(),
            pods,
            ..NeedlessExclusion::default()
        };
        let all = [one("b", "y", 1), one("b", "x", u32::MAX), one("a", "x", 1), one("b", "y", 1)];
        let both = NeedlessExclusion { exclusions: ["x".into(), "y".into()].into(), ..one("b", "", u32::MAX) };
        assert_eq!(merged(all.into_iter()), [one("a", "x", 1), both]);
    }
}
