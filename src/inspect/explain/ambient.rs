//! What `explain` says about a pod in the ambient mesh: why it is enrolled, and what excluded traffic lacks there.

use super::report::ExplainedRule;
use super::warnings::Warning;
use crate::pod::Pod;
use crate::pod::well_known::{
    AMBIENT, AMBIENT_REDIRECTION, DATAPLANE_MODE, EXCLUDE_DESTINATION_PORTS, EXCLUDE_DESTINATION_RANGES,
    EXCLUDE_OUTBOUND_PORTS, EXCLUDE_OUTBOUND_RANGES, INJECTION_STATUS,
};
use crate::policy::{DnsCapture, IdRange, InterceptionMode, Policy, PortRange, Ports, Redirect, TrafficOwner};
use crate::sub_plugins::EnrolledBy;

/// Returns the conditions of the decision: the last one, which does not hold, decides that istio-cni redirects the pod.
pub(super) fn conditions(enrolled_by: EnrolledBy) -> Vec<ExplainedRule> {
    let rule = |wanted: &str, found: String, holds| ExplainedRule { wanted: wanted.to_owned(), found, holds };
    vec![
        rule("the pod has its own network", "hostNetwork is false".to_owned(), true),
        rule("the pod is not in the ambient mesh", enrolled_by.to_string(), false),
    ]
}

/// Returns notes about a pod that is enrolled, and about one whose sidecar takes precedence over the label.
pub(super) fn notes(pod: &Pod, enrolled: bool, policy: &Policy) -> Vec<String> {
    if !enrolled {
        let has_label = pod.labels.get(DATAPLANE_MODE).is_some_and(|mode| mode == AMBIENT);
        let has_sidecar = has_label && pod.annotations.contains_key(INJECTION_STATUS);
        let note = format!("label {DATAPLANE_MODE} is {AMBIENT}, but the pod has a sidecar, which takes precedence");
        return if has_sidecar { vec![note] } else { Vec::new() };
    }
    let mut notes = vec![match pod.annotations.get(AMBIENT_REDIRECTION) {
        Some(state) => format!("annotation {AMBIENT_REDIRECTION} is {state:?}: istio-cni has set it"),
        None => format!("annotation {AMBIENT_REDIRECTION} is missing: istio-cni has not redirected the pod yet"),
    }];
    if !policy.is_empty() {
        notes.push(
            "excluded traffic has no mTLS: a peer whose policy is STRICT rejects it, and authorization policies and \
             telemetry do not see it"
                .to_owned(),
        );
    }
    let root = TrafficOwner::Uid(IdRange::one(0));
    if policy.exclusions_in_effect().iter().any(|exclusion| exclusion.owner.covers(root)) {
        notes.push("ztunnel runs as UID 0; its own packets, with mark 0x539, are never excluded".to_owned());
    }
    notes
}

/// Warns about Istio's annotations for sidecars.
pub(super) fn annotations_without_effect(pod: &Pod) -> impl Iterator<Item = Warning> {
    let replaced =
        [(EXCLUDE_OUTBOUND_PORTS, EXCLUDE_DESTINATION_PORTS), (EXCLUDE_OUTBOUND_RANGES, EXCLUDE_DESTINATION_RANGES)];
    let present = replaced.into_iter().filter(|(key, _)| pod.annotations.contains_key(*key));
    present.map(|(key, other)| Warning {
        code: "annotation-for-sidecars",
        what: format!("annotation {key} has no effect in the ambient mesh"),
        next: format!("use {other}, with destination-exclude in the sub-plugin chain"),
    })
}

/// Returns what ztunnel captures, in the form of a redirection to a sidecar.
pub(super) fn captured_by_ztunnel(policy: &Policy) -> Redirect {
    let captures_dns = policy.dns_captured_elsewhere.unwrap_or(true);
    Redirect {
        inbound_interception_mode: InterceptionMode::Redirect,
        inbound_ports_exclude: Ports::List(vec![PortRange::one(15008)]),
        outbound_ports_exclude: Ports::List(Vec::new()),
        dns: if captures_dns { DnsCapture::All } else { DnsCapture::Off },
        ..Redirect::default()
    }
}
