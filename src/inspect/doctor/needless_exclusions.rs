//! The exclusions of the node's pods that they no longer need, as `explain` decides.

use super::node_setup;
use super::report::CheckTarget;
use crate::cluster::{Api, ScheduledPod, Workload};
use crate::inspect::explain::{application_containers, explain};
use crate::inspect::nodes::{NeedlessExclusion, merged};
use crate::inspect::subject::{AppliedConf, Subject};
use crate::pod::{Facts, Namespace};
use std::collections::{BTreeMap, BTreeSet};

/// Returns the exclusions of the node's pods that are not needed; `None` if the pods can't be listed.
pub(super) fn find(target: &CheckTarget, api: &Api) -> Option<Vec<NeedlessExclusion>> {
    let mut pods = api.pods_of_node(target.node_name.as_deref()?, None).ok()?;
    pods.retain(|scheduled| {
        let has_served = application_containers(&scheduled.pod).iter().any(|container| container.runs_after_proxy());
        has_served && !scheduled.is_ending
    });
    if pods.is_empty() {
        return Some(Vec::new());
    }
    let namespaces = api.namespaces(None).ok()?.into_iter();
    let namespaces: BTreeMap<String, Namespace> = namespaces.map(|one| (one.name.clone(), one)).collect();
    let configurations = node_setup(target).configurations;
    let of_pod = |scheduled: &ScheduledPod| {
        let namespace = namespaces.get(&scheduled.pod.namespace).cloned();
        of_pod(scheduled, namespace, &configurations, api)
    };
    Some(merged(pods.iter().flat_map(of_pod)))
}

/// Returns the exclusions of one pod. A configuration with which an ADD of the pod fails has none.
fn of_pod(
    scheduled: &ScheduledPod,
    namespace: Option<Namespace>,
    configurations: &[AppliedConf],
    api: &Api,
) -> Vec<NeedlessExclusion> {
    let facts = Facts { pod: scheduled.pod.clone(), namespace };
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for conf in configurations {
        let subject = Subject::of(conf.clone(), facts.clone(), Some(api));
        let Ok(explained) = subject.and_then(|subject| explain(&subject)) else { continue };
        for container in explained.explanation.init_containers {
            found.entry(container.name).or_default().extend(container.needless_exclusions);
        }
    }
    let pod = &scheduled.pod;
    let of_itself = || Workload { kind: "Pod".to_owned(), name: pod.name.clone() };
    let Workload { kind, name } = scheduled.workload.clone().unwrap_or_else(of_itself);
    let entry = |(container, exclusions): (String, BTreeSet<String>)| NeedlessExclusion {
        namespace: pod.namespace.clone(),
        kind: kind.clone(),
        name: name.clone(),
        container,
        exclusions: exclusions.into_iter().collect(),
        pods: 1,
    };
    found.into_iter().filter(|(_, exclusions)| !exclusions.is_empty()).map(entry).collect()
}
