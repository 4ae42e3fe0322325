//! What `explain` says about a pod in the ambient mesh: what excluded traffic lacks there, and what ztunnel captures.

use crate::pod::Pod;
use crate::pod::well_known::{AMBIENT, AMBIENT_REDIRECTION, DATAPLANE_MODE, INJECTION_STATUS};
use crate::policy::{DnsCapture, IdRange, InterceptionMode, Policy, PortRange, Ports, Redirect, TrafficOwner};

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
