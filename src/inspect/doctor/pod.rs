//! Checks of a pod: its networks annotation, the definitions that it names, the configurations that these lead to, and
//! the decision about the pod.

use super::checks::{self, Check};
use super::configuration;
use super::configuration::Configured;
use super::report::{CheckOutcome, CheckTarget, CheckVerdict, Results};
use crate::cluster::{Cluster, Definition, DefinitionQuery, Definitions, Lookup, ObjectRef};
use crate::cni::{Error, NetConf, OWN_TYPES};
use crate::inspect::explain::{Explained, explain};
use crate::inspect::subject::Subject;
use crate::inspect::terminal::{counted, joined};
use crate::networks;
use crate::networks::Selection;
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

/// Checks each network that the pod's annotation names. Returns the configurations of this plugin among them.
pub(super) fn references(
    target: &CheckTarget,
    source: Option<&dyn Cluster>,
    facts: Option<&Facts>,
    conf: Option<&NetConf>,
    results: &mut Results,
) -> Vec<NetConf> {
    let selected = facts.map(|facts| networks::networks(&facts.pod));
    results.run(checks::ANNOTATION_VALID, || match &selected {
        Some(Ok(selections)) if selections.elements.is_empty() => CheckVerdict::pass("the annotation names no network"),
        Some(Ok(selections)) => CheckVerdict::pass(joined(selections.elements.iter().map(named))),
        Some(Err(error)) => {
            CheckVerdict::fail(error.to_string(), "correct the annotation in the pod template, and delete the pod")
        }
        None => CheckVerdict::not_checked("the pod is not known"),
    });
    let mut ours = Vec::new();
    for selection in selected.and_then(Result::ok).map(|selections| selections.elements).unwrap_or_default() {
        let definition = definition(source, &selection);
        let found = |definition: &Definition| CheckVerdict::pass(definition.object.to_string());
        results.add(checks::DEFINITION_FOUND, definition.as_ref().map_or_else(Clone::clone, found));
        let Ok(definition) = definition else {
            results.run(checks::DEFINITION_LEADS, || CheckVerdict::not_checked("the definition is not known"));
            continue;
        };
        match led_to(target, conf, &definition, results) {
            Ok((found, own)) => {
                results.add(checks::DEFINITION_LEADS, CheckVerdict::pass(format!("{}: {found}", named(&selection))));
                ours.extend(own);
            }
            Err(verdict) => results.add(checks::DEFINITION_LEADS, verdict),
        }
    }
    ours
}

fn named(selection: &Selection) -> String {
    format!("{}/{}", selection.namespace, selection.name)
}

fn definition(source: Option<&dyn Cluster>, selection: &Selection) -> Result<Definition, CheckVerdict> {
    let object = ObjectRef { namespace: selection.namespace.clone(), name: selection.name.clone() };
    let by_hand = format!("run kubectl get network-attachment-definitions -n {} {}", object.namespace, object.name);
    let Some(source) = source else {
        return Err(CheckVerdict::to_do(format!("{object}: no API server is known"), by_hand));
    };
    let found = source.definitions(&[DefinitionQuery { object: object.clone(), awaited: false }]);
    match found.map_err(|error| CheckVerdict::to_do(error.to_string(), by_hand))?.pop() {
        Some(Lookup::Found(definition)) => Ok(definition),
        _ => Err(missing(selection, &object)),
    }
}

fn missing(selection: &Selection, ObjectRef { namespace, name }: &ObjectRef) -> CheckVerdict {
    CheckVerdict::fail(
        format!("{}: NetworkAttachmentDefinition {name:?} not found in namespace {namespace:?}", selection.place),
        format!(
            "create it (manifests/samples has an example): kubectl apply -n {namespace} -f FILE; or write NAMESPACE/{name} \
             in the annotation for one of another namespace, or remove it"
        ),
    )
}

/// Returns the configuration to which a definition leads: in words and, if it is one of this plugin, as a value.
fn led_to(
    target: &CheckTarget,
    conf: Option<&NetConf>,
    definition: &Definition,
    results: &Results,
) -> Result<(String, Option<NetConf>), CheckVerdict> {
    let by_file = definition.config.trim().is_empty();
    if let (true, Some(why)) = (by_file, results.obstacle(checks::CONFIGURATION_PICKED.needs)) {
        return Err(CheckVerdict::not_checked(why));
    }
    let directory = directory(target, conf).map_err(CheckVerdict::not_checked)?;
    let wrong = |error: Error| wrong(&error, definition);
    let found = networks::configuration(definition, &directory, &mut Vec::new()).map_err(wrong)?;
    let place = match by_file {
        true => format!("found by its name in {}", directory.display()),
        false => "from its spec.config".to_owned(),
    };
    let is_ours = found.types().any(|kind| OWN_TYPES.contains(&kind));
    let ours = is_ours.then(|| configuration::effective(target, Path::new(&place), &found.text));
    Ok((format!("{}, {place}", joined(found.types())), ours.transpose().map_err(wrong)?))
}

fn wrong(error: &Error, definition: &Definition) -> CheckVerdict {
    let name = &definition.object.name;
    CheckVerdict::fail(
        error.to_string(),
        format!(
            "set the name of the configuration on the node to {name:?} (key name in the file of detour install --config), or add spec.config to the definition"
        ),
    )
}

/// Returns the directory in which configurations are found by name: the primary plugin's `confDir`, or else the
/// directory of the plugin's own configuration.
fn directory(target: &CheckTarget, conf: Option<&NetConf>) -> Result<PathBuf, String> {
    let named = conf.and_then(|conf| conf.primary.as_ref()).map(|primary| &primary.conf_dir);
    let reached = match named {
        Some(dir) => target.reach_named(dir),
        None => target.reach(&target.conf),
    };
    let reached = reached.map_err(|why| why.to_string())?;
    Ok(if reached.is_file() { reached.parent().map(Path::to_owned).unwrap_or_default() } else { reached })
}

/// Why the plugin runs for a pod; if it does not, what to do about it.
pub(super) struct Attachment(Result<String, String>);

impl Attachment {
    /// Finds out whether the plugin runs for the pod. `ours` are the plugin's configurations that the pod selects, and
    /// `all` are those on the node.
    pub(super) fn of(target: &CheckTarget, ours: &[NetConf], all: &[Configured]) -> Self {
        if let Some(primary) = all.iter().find(|configured| configured.applied.conf.primary.is_some()) {
            return Self(Ok(format!("as the primary plugin, for every pod ({})", primary.path.name())));
        }
        if let Some(chained) = all.iter().find(|configured| target.is_in_multus_chain(&configured.path)) {
            return Self(Ok(format!("in Multus's auxiliary chain, for every pod ({})", chained.path)));
        }
        // Multus can find a configuration list by its name, too.
        let is_listed = |configured: &Configured| configured.is_listed && configured.is_in(&target.conf);
        if target.chained && all.iter().any(is_listed) {
            return Self(Ok("as part of the cluster network's configuration list, for every pod".to_owned()));
        }
        if !ours.is_empty() {
            return Self(Ok(joined(ours.iter().map(|conf| &conf.name))));
        }
        let network = all.first().map_or(USUAL, |configured| configured.applied.conf.name.as_str());
        let mut next = format!(
            "add the annotation k8s.v1.cni.cncf.io/networks: default/{network} to the pod template, or to the sidecar \
             injector's template for all pods (manifests/samples)"
        );
        if target.chained {
            next += "; without Multus, run detour install --chained=true";
        }
        Self(Err(next))
    }

    /// Adds the result. A pod that is not redirected anyway needs no plugin.
    pub(super) fn add(self, results: &mut Results) {
        let failed =
            || results.has_failed(checks::REDIRECTED).then(|| format!("because {} failed", checks::REDIRECTED.id));
        let verdict = match (results.obstacle(checks::PLUGIN_ATTACHED.needs).or_else(failed), self.0) {
            (Some(why), _) => CheckVerdict::not_checked(why),
            (None, Ok(found)) => CheckVerdict::pass(found),
            (None, Err(next)) => CheckVerdict::fail("the pod's annotation names no network of this plugin", next),
        };
        results.add(checks::PLUGIN_ATTACHED, verdict);
    }

    /// Returns why no ADD decides about the pod; `None` if one may.
    fn obstacle(&self, results: &Results) -> Option<String> {
        if self.0.is_ok() {
            return None;
        }
        let needed = [checks::ANNOTATION_VALID, checks::DEFINITION_FOUND, checks::DEFINITION_LEADS];
        let failed = match needed.into_iter().find(|check| results.has_failed(check)) {
            None if results.obstacle(&needed).is_some() => return None,
            failed => failed.unwrap_or(checks::PLUGIN_ATTACHED),
        };
        Some(format!("because {} failed", failed.id))
    }
}

/// Checks the decision that an ADD would make, if the plugin runs for the pod. Returns the explanation.
pub(super) fn examine(
    facts: Option<&Facts>,
    conf: Option<&NetConf>,
    cluster: Option<&dyn Cluster>,
    (attachment, needed): (&Attachment, &[&Check]),
    results: &mut Results,
) -> Option<Explained> {
    let cluster = cluster.map(|cluster| cluster as &dyn Definitions);
    let subject = facts.zip(conf).map(|(facts, conf)| Subject::of(conf.clone(), facts.clone(), cluster));
    let explained = subject.as_ref().map(|subject| explain(subject.as_ref().map_err(Error::clone)?));
    let subject = subject.and_then(Result::ok);
    let obstacle = attachment.obstacle(results);
    results.after(needed, checks::REDIRECTED, || match (&subject, &explained) {
        (Some(subject), Some(Ok(explained))) => match (decision(subject, explained), obstacle) {
            (CheckVerdict { outcome: CheckOutcome::Pass, .. }, Some(why)) => CheckVerdict::not_checked(why),
            (verdict, _) => verdict,
        },
        (_, Some(Err(error))) => {
            CheckVerdict::fail(error.to_string(), "correct it; until then, the ADD of this pod fails")
        }
        _ => CheckVerdict::not_checked("no configuration is known"),
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
