//! The Events of a pod.

use super::suspicion::Cause;
use crate::cluster::Event;
use crate::cni::Error;
use crate::firewall::Rejected;
use crate::pod::Pod;
use crate::printable::{cut, line};
use crate::sub_plugins::UNGUARDED;

/// The maximum length of a message in bytes.
const MAX_MESSAGE: usize = 1024;

fn warning(reason: &'static str, message: String) -> Event {
    Event { warning: true, reason: reason.into(), message }
}

/// Returns the Event for a pod whose rules can't be checked or changed.
pub(super) fn failed(error: &Error) -> Event {
    warning("DetourRulesUnreadable", format!("the pod's rules are neither checked nor changed: {error}"))
}

/// Returns the Event for a pod whose rules were created or restored, with the number of older connections that bypass the
/// sidecar.
pub(super) fn repaired(cause: Cause, older: usize) -> Event {
    if older == 0 {
        let message = format!("traffic is redirected to the sidecar again: {cause}");
        return Event { warning: false, reason: "DetourRepaired".into(), message };
    }
    let (connections, bypass, they) =
        if older == 1 { ("connection", "bypasses", "it closes") } else { ("connections", "bypass", "they close") };
    let message = format!(
        "new connections are captured again: {cause}; {older} TCP {connections} that existed before still {bypass} the \
         sidecar until {they}; recreate the pod to capture them"
    );
    warning("DetourRepaired", message)
}

/// Returns the Event for a pod that was deleted.
pub(super) fn deleted(cause: Cause) -> Event {
    warning("DetourDeleted", format!("deleted, so that a new pod is redirected: {cause}"))
}

/// Returns the Event for a repair that failed.
pub(super) fn repair_failed(cause: Cause, why: &str) -> Event {
    warning("DetourRepairFailed", format!("repair failed: {cause}; {why}"))
}

/// Returns the Event for a pod that has no guard because of istio-init.
pub(super) fn unguarded() -> Event {
    warning("DetourNotGuarded", UNGUARDED.to_owned())
}

/// Returns the Event for packets that a pod's guard has rejected.
pub(super) fn rejected(rejected: Rejected, pod: &Pod) -> Event {
    let message = format!(
        "the guard rejected {rejected} that would have bypassed the mesh: the pod's redirection was missing or lost; \
         detour doctor -n {} {} tells whether it is in place now",
        pod.namespace, pod.name
    );
    warning("DetourGuardRejected", message)
}

/// Returns the Event for a pod that is enrolled in the ambient mesh and outside of it.
pub(super) fn outside_mesh(lacking: &str) -> Event {
    let message = format!(
        "enrolled in the ambient mesh, but outside of it for a minute: its network namespace lacks {lacking}; see the \
         istio-cni and ztunnel pods of its node, or recreate the pod"
    );
    warning("DetourOutsideMesh", message)
}

/// Returns the Event for a change of the policy.
pub(super) fn changed(words: &str) -> Event {
    Event { warning: false, reason: "DetourPolicyChanged".into(), message: format!("the pod's rules changed: {words}") }
}

/// Returns why requests of a running pod are without effect; empty if all have one. `unknown` is the object of
/// which only a part is known.
pub(super) fn absent(errors: &[Error], unknown: Option<&str>) -> String {
    let mut reasons: Vec<String> = errors.iter().map(ToString::to_string).collect();
    reasons.extend(unknown.map(|name| {
        format!("{name}: some labels, annotations or containers are unknown, so no grant that needs them applies")
    }));
    if reasons.is_empty() {
        return String::new();
    }
    let message = format!("without effect for the running pod, and an error for a new one: {}", reasons.join("; "));
    cut(&line(&message), MAX_MESSAGE).into_owned()
}
