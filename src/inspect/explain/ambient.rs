//! What `explain` says about a pod in the ambient mesh: what excluded traffic lacks there, and what ztunnel captures.

use crate::pod::well_known::{
    AMBIENT, AMBIENT_BYPASS_INBOUND, AMBIENT_REDIRECTION, DATAPLANE_MODE, INJECTION_STATUS, NOT_IN_MESH,
};
use crate::pod::{Facts, Namespace, Pod};
use crate::policy::{DnsCapture, IdRange, InterceptionMode, Policy, PortRange, Ports, Redirect, TrafficOwner};
use crate::sub_plugins::{bypasses_inbound, labeled_by};

/// Returns notes about a pod that is enrolled, and about one that is not although a label or istio-cni suggests it.
pub(super) fn notes(facts: &Facts, policy: &Policy) -> Vec<String> {
    let pod = &facts.pod;
    if !policy.ambient {
        return not_enrolled(pod, facts.namespace.as_ref()).into_iter().collect();
    }
    let mut notes = vec![match pod.annotations.get(AMBIENT_REDIRECTION) {
        Some(state) => format!("annotation {AMBIENT_REDIRECTION} is {state:?}: istio-cni has set it"),
        None => format!("annotation {AMBIENT_REDIRECTION} is missing: istio-cni has not redirected the pod yet"),
    }];
    if bypasses_inbound(pod) {
        notes.push(format!("annotation {AMBIENT_BYPASS_INBOUND} is true: inbound connections bypass ztunnel"));
    }
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

fn not_enrolled(pod: &Pod, namespace: Option<&Namespace>) -> Option<String> {
    if pod.host_network {
        return None;
    }
    let in_namespace = namespace.and_then(|namespace| namespace.dataplane_mode.as_deref()) == Some(AMBIENT);
    match labeled_by(pod, namespace) {
        Some(label) => {
            let has_sidecar = pod.annotations.contains_key(INJECTION_STATUS);
            has_sidecar.then(|| format!("{label}, but the pod has a sidecar, which takes precedence"))
        }
        None if in_namespace => {
            Some(format!("label {DATAPLANE_MODE} of the pod is {NOT_IN_MESH}, which overrides that of the namespace"))
        }
        None => {
            let state = pod.annotations.get(AMBIENT_REDIRECTION).filter(|_| pod.proxy().is_none())?;
            Some(format!(
                "annotation {AMBIENT_REDIRECTION} is {state:?}, but no label {DATAPLANE_MODE} enrolls the pod in the ambient \
                 mesh: exclusions do not apply"
            ))
        }
    }
}

/// Returns what ztunnel captures, in the form of a redirection to a sidecar.
pub(super) fn captured_by_ztunnel(pod: &Pod, policy: &Policy) -> Redirect {
    let captures_dns = policy.dns_captured_elsewhere.unwrap_or(true);
    Redirect {
        inbound_interception_mode: InterceptionMode::Redirect,
        inbound_ports_include: if bypasses_inbound(pod) { Ports::List(Vec::new()) } else { Ports::All },
        inbound_ports_exclude: Ports::List(vec![PortRange::one(15008)]),
        outbound_ports_exclude: Ports::List(Vec::new()),
        dns: if captures_dns { DnsCapture::All } else { DnsCapture::Off },
        ..Redirect::default()
    }
}
