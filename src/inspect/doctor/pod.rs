//! What the pod asks for: its annotation, the definitions that it refers to, and where they lead.

use super::target::CheckTarget;
use super::check::{Check, Results, CheckVerdict};
use super::configuration::{self, Configured};
use super::node_configuration;
use super::report::CheckGroup;
use crate::cluster::{Cluster, Definition, Lookup, ObjectRef, DefinitionQuery};
use crate::cni::{Error, NetConf, OWN_TYPES};
use crate::networks::{self, Selection};
use crate::pod::{Facts, PodRef};
use std::path::{Path, PathBuf};

pub(super) const KNOWN: Check = Check::of(CheckGroup::Pod, "pod-known", "the cluster knows the pod");
pub(super) const ANNOTATION: Check = Check::of(CheckGroup::Pod, "annotation-valid", "its networks annotation can be read");
pub(super) const DEFINITION: Check =
    Check::of(CheckGroup::Pod, "definition-found", "the definition that it refers to is there");
pub(super) const LEADS: Check = Check::of(CheckGroup::Pod, "definition-leads", "the definition leads to a configuration");
pub(super) const ATTACHED: Check = Check::of(CheckGroup::Pod, "plugin-attached", "the plugin is called for it");

/// The network's name in what to do next, where nothing says another.
const USUAL: &str = "istio-cni";

/// The pod's facts.
pub(super) fn known(source: Result<&dyn Cluster, String>, pod: &PodRef, checkup: &mut Results) -> Option<Facts> {
    let facts = source.map_err(CheckVerdict::not_checked).and_then(|source| {
        source.facts(pod, true).map_err(|error| {
            let next = format!("see kubectl get pod -n {} {}", pod.namespace, pod.name);
            CheckVerdict::fail(error.to_string(), next)
        })
    });
    match facts {
        Ok(facts) => {
            let uid = facts.pod.uid.as_deref().unwrap_or("unknown");
            checkup.add(&KNOWN, CheckVerdict::pass(format!("UID {uid}")));
            Some(facts)
        }
        Err(verdict) => {
            checkup.add(&KNOWN, verdict);
            None
        }
    }
}

/// Follows its references. The configurations of this plugin that they lead to, each with the network's
/// name.
pub(super) fn references(
    case: &CheckTarget,
    source: Option<&dyn Cluster>,
    facts: Option<&Facts>,
    conf: Option<&NetConf>,
    checkup: &mut Results,
) -> Vec<NetConf> {
    let selected = facts.map(|facts| networks::networks(&facts.pod));
    checkup.after(&[&KNOWN], &ANNOTATION, || match &selected {
        Some(Ok(selections)) if selections.elements.is_empty() => CheckVerdict::pass("it refers to nothing"),
        Some(Ok(selections)) => CheckVerdict::pass(selections.elements.iter().map(named).collect::<Vec<_>>().join(", ")),
        Some(Err(error)) => {
            CheckVerdict::fail(error.to_string(), "correct the annotation where the pod is made, and delete the pod")
        }
        None => CheckVerdict::not_checked("the pod is not known"),
    });
    let mut ours = Vec::new();
    for selection in selected.and_then(Result::ok).map(|selections| selections.elements).unwrap_or_default() {
        let definition = definition(source, &selection, checkup);
        ours.extend(leads(case, conf, &selection, definition, checkup));
    }
    ours
}

fn named(selection: &Selection) -> String {
    format!("{}/{}", selection.namespace, selection.name)
}

fn definition(source: Option<&dyn Cluster>, selection: &Selection, checkup: &mut Results) -> Option<Definition> {
    let object = ObjectRef { namespace: selection.namespace.clone(), name: selection.name.clone() };
    let by_hand =
        format!("look by hand: kubectl get network-attachment-definitions -n {} {}", object.namespace, object.name);
    let Some(source) = source else {
        checkup.add(&DEFINITION, CheckVerdict::NotChecked(format!("{object}: there is no API to ask"), Some(by_hand)));
        return None;
    };
    let (verdict, found) = match source.definitions(&[DefinitionQuery { object: object.clone(), awaited: false }]) {
        Err(error) => (CheckVerdict::NotChecked(error.to_string(), Some(by_hand)), None),
        Ok(mut lookups) => match lookups.pop() {
            Some(Lookup::Found(definition)) => (CheckVerdict::pass(object.to_string()), Some(definition)),
            _ => (missing(source, selection, &object), None),
        },
    };
    checkup.add(&DEFINITION, verdict);
    found
}

fn missing(source: &dyn Cluster, selection: &Selection, ObjectRef { namespace, name }: &ObjectRef) -> CheckVerdict {
    let found =
        format!("{}: there is no NetworkAttachmentDefinition {name:?} in namespace {namespace:?}", selection.place);
    let elsewhere = source.namespaces_with_definition(name).unwrap_or_default();
    match elsewhere.first() {
        Some(other) => CheckVerdict::fail(
            format!("{found}; there is one in {}", elsewhere.join(", ")),
            format!("write {other}/{name} in the annotation, or make one in {namespace}"),
        ),
        None => CheckVerdict::fail(
            format!("{found}, nor in any other"),
            format!(
                "make it: kubectl apply -n {namespace} -f, as in manifests/samples, or take it out of the annotation"
            ),
        ),
    }
}

/// Where one leads to; a configuration of this plugin's.
fn leads(
    case: &CheckTarget,
    conf: Option<&NetConf>,
    selection: &Selection,
    definition: Option<Definition>,
    checkup: &mut Results,
) -> Option<NetConf> {
    let Some(definition) = definition else {
        checkup.after(&[&DEFINITION], &LEADS, || CheckVerdict::not_checked("the definition is not known"));
        return None;
    };
    let by_file = definition.config.trim().is_empty();
    if let (true, Some(why)) = (by_file, checkup.obstacle(&[&configuration::PRESENT, &configuration::VALID])) {
        checkup.add(&LEADS, CheckVerdict::not_checked(why));
        return None;
    }
    let directory = match directory(case, conf) {
        Ok(directory) => directory,
        Err(why) => {
            checkup.add(&LEADS, CheckVerdict::not_checked(why));
            return None;
        }
    };
    let found = networks::configuration(&definition, &directory, &mut Vec::new());
    let (verdict, ours) = match found {
        Ok(found) => {
            let types = found.types().collect::<Vec<_>>().join(", ");
            let place =
                if by_file { format!("its name, in {}", directory.display()) } else { "its spec.config".to_owned() };
            let is_ours = found.types().any(|kind| OWN_TYPES.contains(&kind));
            let parsed = is_ours.then(|| node_configuration::effective(case, Path::new(&place), &found.text));
            match parsed.transpose() {
                Ok(ours) => (CheckVerdict::pass(format!("{}: {types}, by {place}", named(selection))), ours),
                Err(error) => (wrong(&error, &definition), None),
            }
        }
        Err(error) => (wrong(&error, &definition), None),
    };
    checkup.add(&LEADS, verdict);
    ours
}

fn wrong(error: &Error, definition: &Definition) -> CheckVerdict {
    let name = &definition.object.name;
    CheckVerdict::fail(
        error.to_string(),
        format!(
            "give the file on the node this name ({name}): detour install --network {name}; or the definition a spec.config"
        ),
    )
}

/// Where configurations are found by name: the primary plugin says, else it is where the plugin's own is.
fn directory(case: &CheckTarget, conf: Option<&NetConf>) -> Result<PathBuf, String> {
    let named = conf.and_then(|conf| conf.primary.as_ref()).map(|primary| &primary.conf_dir);
    let reached = match named {
        Some(dir) => case.reach_named(dir),
        None => case.reach(&case.conf),
    };
    let reached = reached.map_err(|why| why.to_string())?;
    Ok(if reached.is_file() { reached.parent().map(Path::to_owned).unwrap_or_default() } else { reached })
}

/// Whether the plugin runs for the pod at all.
pub(super) fn attached(case: &CheckTarget, ours: &[NetConf], all: &[Configured], needed: &[&Check], checkup: &mut Results) {
    checkup.after(needed, &ATTACHED, || {
        let primary = all.iter().find(|configured| configured.conf.primary.is_some());
        if let Some(primary) = primary {
            return CheckVerdict::pass(format!("as the primary plugin, for every pod ({})", primary.path.name()));
        }
        if case.chained {
            return CheckVerdict::pass("as a member of the cluster network's list, for every pod");
        }
        if !ours.is_empty() {
            return CheckVerdict::pass(ours.iter().map(|conf| conf.name.as_str()).collect::<Vec<_>>().join(", "));
        }
        let network = all.first().map_or(USUAL, |configured| configured.conf.name.as_str());
        CheckVerdict::fail(
            "no reference of the pod leads to it",
            format!(
                "annotate the pod with k8s.v1.cni.cncf.io/networks: default/{network} where it is made; the sidecar \
                 injector's template does so for all (manifests/samples)"
            ),
        )
    });
}
