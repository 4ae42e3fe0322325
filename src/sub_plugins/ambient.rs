//! Enrollment of pods in the ambient mesh, where istio-cni redirects traffic to ztunnel and pods have no sidecar.
//!
//! The rules are those of Istio (istio/istio, `cni/pkg/util/enablement_selector.go`) with the selectors that its chart
//! configures (`manifests/charts/istio-cni/values.yaml`, `ambient.enablementSelectors`).

use super::values::parse_bool;
use crate::pod::well_known::{
    AMBIENT, AMBIENT_BYPASS_INBOUND, AMBIENT_DNS_CAPTURE, DATAPLANE_MODE, INJECTION_STATUS, NOT_IN_MESH,
};
use crate::pod::{Namespace, Pod};
use std::fmt;

/// The object whose label enrolls a pod in the ambient mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnrolledBy {
    /// The pod.
    Pod,
    /// Its namespace.
    Namespace,
}

impl fmt::Display for EnrolledBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let object = match self {
            Self::Pod => "pod",
            Self::Namespace => "namespace",
        };
        write!(f, "label {DATAPLANE_MODE} of the {object} is {AMBIENT}")
    }
}

/// Returns which label enrolls the pod in the ambient mesh; `None` if it is not enrolled. Istio enrolls neither pods of
/// the host network nor pods with a sidecar.
#[must_use]
pub fn enrolled_by(pod: &Pod, namespace: Option<&Namespace>) -> Option<EnrolledBy> {
    if pod.host_network || pod.annotations.contains_key(INJECTION_STATUS) {
        return None;
    }
    labeled_by(pod, namespace)
}

/// Returns which label asks for the ambient mesh, whether or not Istio enrolls the pod.
#[must_use]
pub fn labeled_by(pod: &Pod, namespace: Option<&Namespace>) -> Option<EnrolledBy> {
    let of_namespace = namespace.and_then(|namespace| namespace.dataplane_mode.as_deref());
    match pod.labels.get(DATAPLANE_MODE).map(String::as_str) {
        Some(AMBIENT) => Some(EnrolledBy::Pod),
        Some(NOT_IN_MESH) => None,
        _ => (of_namespace == Some(AMBIENT)).then_some(EnrolledBy::Namespace),
    }
}

/// Returns whether exclusions apply to the pod: it has a network of its own, and a sidecar or ztunnel captures its
/// traffic.
#[must_use]
pub fn is_meshed(pod: &Pod, namespace: Option<&Namespace>) -> bool {
    !pod.host_network && (pod.proxy().is_some() || enrolled_by(pod, namespace).is_some())
}

/// Returns whether the pod's annotation `ambient.istio.io/bypass-inbound-capture` keeps its inbound connections from
/// ztunnel.
#[must_use]
pub fn bypasses_inbound(pod: &Pod) -> bool {
    pod.annotations.get(AMBIENT_BYPASS_INBOUND).and_then(|value| parse_bool(value)) == Some(true)
}

/// Returns whether ztunnel resolves the pod's DNS; `None` if the pod does not set it, so that istio-cni's own setting
/// decides.
pub(super) fn captures_dns(pod: &Pod) -> Option<bool> {
    pod.annotations.get(AMBIENT_DNS_CAPTURE).and_then(|value| parse_bool(value))
}

#[cfg(test)]
mod tests {
    use super::super::tests::scenario::{container, meshed_pod};
    use super::*;

    /// Returns the facts of a pod without a sidecar, with these labels of the pod and its namespace.
    fn labeled(of_pod: Option<&str>, of_namespace: Option<&str>) -> (Pod, Namespace) {
        let mut pod = meshed_pod();
        pod.containers.truncate(1);
        pod.annotations.clear();
        pod.labels.extend(of_pod.map(|value| (DATAPLANE_MODE.to_owned(), value.to_owned())));
        let dataplane_mode = of_namespace.map(str::to_owned);
        (pod, Namespace { dataplane_mode, ..Namespace::default() })
    }

    /// The selectors of Istio's chart: the pod's label is `ambient`, or it is not `none` and the namespace's is `ambient`.
    #[test]
    fn the_label_of_the_pod_takes_precedence_over_that_of_its_namespace() {
        for (of_pod, of_namespace, expected) in [
            (None, None, None),
            (Some("ambient"), None, Some(EnrolledBy::Pod)),
            (Some("ambient"), Some("none"), Some(EnrolledBy::Pod)),
            (None, Some("ambient"), Some(EnrolledBy::Namespace)),
            (Some("none"), Some("ambient"), None),
            (Some(""), Some("ambient"), Some(EnrolledBy::Namespace)),
            (Some("Ambient"), Some("Ambient"), None),
            (None, Some("none"), None),
        ] {
            let (pod, namespace) = labeled(of_pod, of_namespace);
            assert_eq!(enrolled_by(&pod, Some(&namespace)), expected, "{of_pod:?} {of_namespace:?}");
            assert_eq!(is_meshed(&pod, Some(&namespace)), expected.is_some(), "{of_pod:?} {of_namespace:?}");
        }
        assert_eq!(enrolled_by(&labeled(None, Some("ambient")).0, None), None);
    }

    #[test]
    fn a_sidecar_and_the_host_network_take_precedence_over_the_labels() {
        let changed = |change: fn(&mut Pod)| {
            let (mut pod, namespace) = labeled(Some("ambient"), Some("ambient"));
            change(&mut pod);
            (enrolled_by(&pod, Some(&namespace)), is_meshed(&pod, Some(&namespace)))
        };
        assert_eq!(changed(|pod| pod.host_network = true), (None, false));
        let injected = |pod: &mut Pod| drop(pod.annotations.insert(INJECTION_STATUS.into(), "{}".into()));
        assert_eq!(changed(injected), (None, false), "the sidecar has another name");
        // Istio looks for the annotation, not for the container.
        let proxy = |pod: &mut Pod| pod.containers.push(container("istio-proxy", None));
        assert_eq!(changed(proxy), (Some(EnrolledBy::Pod), true));
    }
}
