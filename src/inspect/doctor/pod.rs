//! Checks of a pod: its networks annotation, the definitions that it names, the configurations that these lead to, and
//! the decision about the pod, as in `explain`.

use super::checks::{self, Check};
use super::report::{CheckTarget, CheckVerdict, Results};
use crate::cluster::{Cluster, Definitions, Lookup, ObjectRef};
use crate::cni::OWN_TYPES;
use crate::inspect::explain::{Explained, explain};
use crate::inspect::selected::{NetworkLead, SelectedNetwork, selected_definitions};
use crate::inspect::subject::{AppliedConf, Subject};
use crate::inspect::terminal::{counted, joined};
use crate::networks;
use crate::pod::well_known::INIT_CONTAINER;
use crate::pod::{Facts, PodRef};
use std::path::{Path, PathBuf};

/// The network name for the next step if no configuration has one.
const USUAL: &str = "istio-cni";

/// Reads the pod's facts.
pub(super) fn known(source: Result<&dyn Cluster, String>, pod: &PodRef, results: &mut Results) -> Option<Facts> {
    let facts = source.map_err(CheckVerdict::not_checked).and_then(|source| {
        source.facts(pod, true).map_err(|error| {
            let next = format!("compare with kubectl get pod -n {} {}", pod.namespace, pod.name);
            CheckVerdict::fail(error.to_string(), next)
        })
    });
    let uid = |facts: &Facts| format!("UID {}", facts.pod.uid.as_deref().unwrap_or("unknown"));
    results.add(checks::POD_KNOWN, facts.as_ref().map_or_else(Clone::clone, |facts| CheckVerdict::pass(uid(facts))));
    facts.ok()
}

/// Checks each network that the pod's annotation names.
pub(super) fn examine_networks(
    target: &CheckTarget,
    source: Option<&dyn Definitions>,
    subject: Option<&Subject>,
    results: &mut Results,
) {
    let selected = subject.map(|subject| networks::networks(&subject.facts.pod));
    results.run(checks::ANNOTATION_VALID, || match &selected {
        Some(Ok(selections)) if selections.elements.is_empty() => CheckVerdict::pass("the annotation names no network"),
        Some(Ok(_)) => CheckVerdict::pass(joined(subject.iter().flat_map(|one| &one.selected).map(|one| &one.name))),
        Some(Err(error)) => {
            CheckVerdict::fail(error.to_string(), "correct the annotation in the pod template, and delete the pod")
        }
        None => CheckVerdict::not_checked("the pod is not known"),
    });
    let (Some(subject), Some(Ok(selections))) = (subject, selected) else { return };
    let definitions = source.map(|source| selected_definitions(&subject.facts.pod, source)).unwrap_or_default();
    for (one, SelectedNetwork { name, leads_to }) in selections.elements.into_iter().zip(&subject.selected) {
        let (namespace, definition) = (one.namespace.clone(), one.name.clone());
        let found = definitions.get(&ObjectRef { namespace: one.namespace, name: one.name });
        let verdict = match found {
            Some(Lookup::Found(_)) => CheckVerdict::pass(name),
            Some(Lookup::Missing(_)) => CheckVerdict::fail(
                format!("NetworkAttachmentDefinition {name} not found"),
                "create it (manifests/samples has an example), or correct the annotation: NAMESPACE/NAME names one of another \
                 namespace",
            ),
            None => CheckVerdict::to_do(
                format!("{name} can't be read"),
                format!("run kubectl get network-attachment-definitions -n {namespace} {definition}"),
            ),
        };
        results.add(checks::DEFINITION_FOUND, verdict);
        let verdict = match (found, leads_to) {
            (Some(Lookup::Found(definition)), NetworkLead::OnNode) => {
                match results.obstacle(checks::CONFIGURATION_PICKED.needs) {
                    Some(why) => CheckVerdict::not_checked(why),
                    None => match networks::configuration(definition, &directory(target, subject), &mut Vec::new()) {
                        Ok(found) => CheckVerdict::pass(format!("{name}: {}", joined(found.types()))),
                        Err(error) => CheckVerdict::fail(
                            error.to_string(),
                            "give the configuration on the node the name of the definition (key name in the file of detour install \
                         --config), or add spec.config to the definition",
                        ),
                    },
                }
            }
            (Some(Lookup::Found(_)), lead) => CheckVerdict::pass(format!("{name}: {}", lead.text())),
            _ => CheckVerdict::not_checked("the definition is not known"),
        };
        results.add(checks::DEFINITION_LEADS, verdict);
    }
}

/// Returns the directory in which configurations are found by name: the primary plugin's `confDir`, or else the
/// directory of the plugin's own configuration.
fn directory(target: &CheckTarget, subject: &Subject) -> PathBuf {
    let named = subject.conf.primary.as_ref().and_then(|primary| target.reach_named(&primary.conf_dir).ok());
    let own = || target.reach(&target.conf).unwrap_or_default();
    let reached = named.unwrap_or_else(own);
    if reached.is_file() { reached.parent().map(Path::to_owned).unwrap_or_default() } else { reached }
}

/// Returns why the plugin runs for a pod on a node with the configurations `all`.
///
/// # Errors
/// It does not run: what to do about it.
fn attached(all: &[AppliedConf], subject: &Subject) -> Result<String, String> {
    if let Some(one) = all.iter().find(|applied| !applied.as_attachment) {
        return Ok(format!("for every pod ({})", one.origin.places.join(", ")));
    }
    let is_own = |one: &&SelectedNetwork| match &one.leads_to {
        NetworkLead::File(_) => true,
        NetworkLead::Definition(types) => types.iter().any(|kind| OWN_TYPES.contains(&kind.as_str())),
        _ => false,
    };
    let own = joined(subject.selected.iter().filter(is_own).map(|one| &one.name));
    let network = all.first().map_or(USUAL, |applied| applied.conf.name.as_str());
    match own.is_empty() {
        false => Ok(own),
        true => Err(format!(
            "add the annotation k8s.v1.cni.cncf.io/networks: default/{network} to the pod template, or to the sidecar \
             injector's template for all pods (manifests/samples); without Multus, run detour install --chained=true"
        )),
    }
}

/// Checks whether the plugin runs for the pod, and the decision that an ADD would make. Returns the explanation.
pub(super) fn examine(all: &[AppliedConf], subject: Option<&Subject>, results: &mut Results) -> Option<Explained> {
    let explained = subject.map(explain);
    let failed = |results: &Results, checks: &[&'static Check]| {
        checks.iter().find(|check| results.has_failed(check)).map(|check| format!("because {} failed", check.id))
    };
    let unknown = failed(results, &[checks::ANNOTATION_VALID, checks::DEFINITION_FOUND, checks::DEFINITION_LEADS]);
    results.run(checks::PLUGIN_ATTACHED, || {
        match (&unknown, subject.map(|subject| (attached(all, subject), subject))) {
            (Some(why), _) => CheckVerdict::not_checked(why),
            (None, Some((Ok(found), _))) => CheckVerdict::pass(found),
            (None, Some((Err(next), subject))) if subject.facts.pod.proxy().is_some() => {
                CheckVerdict::fail("the pod's annotation names no network of this plugin", next)
            }
            (None, _) => CheckVerdict::not_checked("the pod has no sidecar"),
        }
    });
    let unknown = unknown.or_else(|| failed(results, &[checks::PLUGIN_ATTACHED]));
    results.run(checks::REDIRECTED, || match (unknown, subject.zip(explained.as_ref())) {
        (Some(why), _) => CheckVerdict::not_checked(why),
        (None, Some((subject, Ok(explained)))) => decision(subject, explained),
        (None, Some((_, Err(error)))) => {
            CheckVerdict::fail(error.to_string(), "correct it; until then, the ADD of this pod fails")
        }
        (None, None) => CheckVerdict::not_checked("no configuration is known"),
    });
    explained.and_then(Result::ok)
}

fn decision(Subject { conf, facts, .. }: &Subject, Explained { explanation, policy }: &Explained) -> CheckVerdict {
    let pod = &facts.pod;
    let decision = &explanation.decision;
    let by_others = pod.all_containers().any(|container| container.name == INIT_CONTAINER);
    let warnings = match explanation.warnings.len() {
        0 => String::new(),
        count => format!("; {}, see detour explain", counted(count, "warning")),
    };
    if explanation.redirected || by_others || policy.ambient || (pod.proxy().is_some() && !policy.is_empty()) {
        return CheckVerdict::pass(format!("{decision}{warnings}"));
    }
    let next = if conf.kubernetes.excludes(&pod.namespace) {
        format!("remove {} from kubernetes.exclude_namespaces, or move the pod to another namespace", pod.namespace)
    } else if pod.proxy().is_none() {
        format!(
            "to add the pod to the mesh, label its namespace (kubectl label namespace {} istio-injection=enabled) and delete \
             the pod; otherwise nothing is wrong",
            pod.namespace
        )
    } else {
        "see detour explain for the rule that decided; if the pod is not meant to be redirected, nothing is wrong"
            .to_owned()
    };
    CheckVerdict::fail(decision.clone(), next)
}
