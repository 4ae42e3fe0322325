//! What the pod asks for: its annotation, the definitions that it refers to, and where they lead.
//!
//! What the configuration makes of the pod.
//!
//! Users as a pod counts them, and as this process does: a pod may have a user namespace of its own.

use super::configuration;
use super::configuration::Configured;
use super::listeners::ProbeUser;
use super::report::CheckGroup;
use super::report::CheckTarget;
use super::report::{Check, CheckVerdict, Results};
use crate::cluster::{Cluster, Definition, DefinitionQuery, Lookup, ObjectRef};
use crate::cni::{Code, Error, NetConf, OWN_TYPES};
use crate::inspect::explain::{Explained, explain};
use crate::inspect::subject::Subject;
use crate::networks::Selection;
use crate::pod::well_known::INIT_CONTAINER;
use crate::pod::{Facts, PodRef};
use crate::policy::IdRange;
use crate::{networks, sub_plugins};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

pub(super) const KNOWN: Check = Check::of(CheckGroup::Pod, "pod-known", "the cluster knows the pod");
pub(super) const ANNOTATION: Check =
    Check::of(CheckGroup::Pod, "annotation-valid", "its networks annotation can be read");
pub(super) const DEFINITION: Check =
    Check::of(CheckGroup::Pod, "definition-found", "the definition that it refers to is there");
pub(super) const LEADS: Check =
    Check::of(CheckGroup::Pod, "definition-leads", "the definition leads to a configuration");
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
        Some(Ok(selections)) => {
            CheckVerdict::pass(selections.elements.iter().map(named).collect::<Vec<_>>().join(", "))
        }
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
            let parsed = is_ours.then(|| configuration::effective(case, Path::new(&place), &found.text));
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
pub(super) fn attached(
    case: &CheckTarget,
    ours: &[NetConf],
    all: &[Configured],
    needed: &[&Check],
    checkup: &mut Results,
) {
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

pub(super) const DECISION: Check = Check::of(CheckGroup::Pod, "redirected", "its traffic goes to its sidecar");
const PROXY_UID: Check = Check::of(CheckGroup::Pod, "proxy-uid", "the proxy's UID is of the namespace's range");

/// Decides as an ADD would.
pub(super) fn examine(
    facts: Option<&Facts>,
    conf: Option<&NetConf>,
    cluster: Option<&dyn Cluster>,
    needed: &[&Check],
    checkup: &mut Results,
) -> Option<Explained> {
    let subject = facts.zip(conf).map(|(facts, conf)| Subject::of(conf.clone(), facts.clone(), cluster));
    let explained = subject.as_ref().map(|subject| explain(subject.as_ref().map_err(Error::clone)?));
    let subject = subject.and_then(Result::ok);
    checkup.after(needed, &DECISION, || match (&subject, &explained) {
        (Some(subject), Some(Ok(explained))) => decision(subject, explained),
        (_, Some(Err(error))) => {
            CheckVerdict::fail(error.to_string(), "correct what is named; an ADD of the pod fails until then")
        }
        _ => CheckVerdict::not_checked("there is no configuration to go by"),
    });
    let explained = explained.and_then(Result::ok);
    checkup.after(&[&DECISION], &PROXY_UID, || match (&subject, &explained) {
        (Some(subject), Some(explained)) => proxy_uid(subject, explained),
        _ => CheckVerdict::not_checked("the pod is not known"),
    });
    explained
}

fn decision(Subject { conf, facts, .. }: &Subject, Explained { explanation, policy }: &Explained) -> CheckVerdict {
    let pod = &facts.pod;
    let decision = &explanation.decision;
    let by_others = pod.all_containers().any(|container| container.name == INIT_CONTAINER);
    let surprises = explanation.warnings.len();
    let surprises = match surprises {
        0 => String::new(),
        1 => "; one thing may surprise, see detour explain".to_owned(),
        count => format!("; {count} things may surprise, see detour explain"),
    };
    if explanation.redirected || by_others || (pod.proxy().is_some() && !policy.is_empty()) {
        return CheckVerdict::pass(format!("{decision}{surprises}"));
    }
    let next = if conf.kubernetes.excludes(&pod.namespace) {
        format!("take {} out of kubernetes.exclude_namespaces, or move the pod", pod.namespace)
    } else if pod.proxy().is_none() {
        format!(
            "label the namespace (kubectl label namespace {} istio-injection=enabled) and delete the pod; one that is \
             not to be in the mesh is as it should be",
            pod.namespace
        )
    } else {
        "detour explain shows which rule decided; one that is not to be redirected is as it should be".to_owned()
    };
    CheckVerdict::fail(decision.clone(), next)
}

fn proxy_uid(Subject { facts, .. }: &Subject, Explained { policy, .. }: &Explained) -> CheckVerdict {
    let Some(redirect) = policy.redirect() else { return CheckVerdict::not_checked("somebody else redirects it") };
    let shown = redirect.proxy_uid.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let Some(ranges) = facts.namespace.as_ref().and_then(sub_plugins::namespace_uids) else {
        return CheckVerdict::pass(format!("{shown}; the namespace has no range"));
    };
    let within = |uid: &u32| ranges.iter().any(|range| range.covers(IdRange::one(*uid)));
    let range = ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if redirect.proxy_uid.iter().all(within) {
        return CheckVerdict::pass(format!("{shown} is in {range}"));
    }
    CheckVerdict::fail(
        format!("{shown} is not in {range}, the range of namespace {}", facts.pod.namespace),
        "let the injector choose it: no runAsUser of istio-proxy in the template (istiod takes the range's last), or \
         give the pod's service account an SCC that allows it",
    )
}

/// A file that belongs to who is root where the reading thread's network namespace is from
/// (`net_ctl_set_ownership`, net/sysctl_net.c).
const OF_ROOT: &str = "/proc/sys/net/ipv4/ip_forward";
/// How many users a pod with `hostUsers: false` has, from 0 on (KEP-127).
const OWN: u32 = 65536;

/// The users of a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Users {
    /// Whom this process knows as its root.
    root: ProbeUser,
}

impl Users {
    /// Those of the thread's network namespace.
    ///
    /// # Errors
    /// /proc/sys can't be read.
    pub(super) fn here() -> Result<Self, Error> {
        let root = fs::metadata(OF_ROOT).map(|of| ProbeUser { uid: of.uid(), gid: of.gid() });
        let root = root.map_err(|error| Error::new(Code::Io, format!("{OF_ROOT} can't be looked at: {error}")))?;
        Ok(Self { root })
    }

    /// As whom this process knows the pod's `user`; `None` where the pod has none such.
    pub(super) fn outside(self, user: ProbeUser) -> Option<ProbeUser> {
        let ProbeUser { uid, gid } = self.root;
        let is_own = |id: u32, root: u32| root == 0 || id < OWN;
        let is_there = is_own(user.uid, uid) && is_own(user.gid, gid);
        is_there.then(|| ProbeUser { uid: uid.saturating_add(user.uid), gid: gid.saturating_add(user.gid) })
    }

    /// As whom the pod knows this process's `uid`; who is none of its users stays.
    pub(super) fn inside(self, uid: u32) -> u32 {
        match uid.checked_sub(self.root.uid) {
            Some(own) if self.root.uid == 0 || own < OWN => own,
            _ => uid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_with_its_own_users_counts_them_from_its_root() {
        let of = |root| Users { root: ProbeUser { uid: root, gid: root } };
        let both = |id| ProbeUser { uid: id, gid: id };
        assert_eq!(of(200_000).outside(both(1337)), Some(both(201_337)));
        assert_eq!(of(200_000).outside(both(OWN)), None);
        assert_eq!((of(200_000).inside(201_337), of(200_000).inside(7)), (1337, 7));
        assert_eq!(of(0).outside(both(1_000_650_000)), Some(both(1_000_650_000)));
        assert_eq!(of(0).inside(1_000_650_000), 1_000_650_000);
    }
}
