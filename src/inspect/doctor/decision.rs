//! What the configuration makes of the pod.

use super::check::{Check, Results, CheckVerdict};
use super::report::CheckGroup;
use crate::sub_plugins;
use crate::cluster::Cluster;
use crate::cni::{Error, NetConf};
use crate::inspect::explain::{Explained, explain};
use crate::inspect::subject::Subject;
use crate::pod::Facts;
use crate::policy::IdRange;

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
    let by_others = pod.all_containers().any(|container| container.name == "istio-init");
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
