//! Which pods the report is about: those with a sidecar or in the ambient mesh, and those without one although the mesh requests it.

use crate::cluster::ScheduledPod;
use crate::pod::well_known::INJECT;
use crate::pod::{Namespace, Pod};
use crate::sub_plugins::{EnrolledBy, SkipReason, enrolled_by, pod_skip_reason, requested_injection};

/// The labels with which Istio's injector selects namespaces and pods (istio.io, "Installing the Sidecar").
const INJECTION: &str = "istio-injection";
const REVISION: &str = "istio.io/rev";

/// Why the report is about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Candidate {
    /// It has a sidecar.
    WithSidecar,
    /// A label enrolls it in the ambient mesh.
    Ambient(EnrolledBy),
    /// It has no sidecar although the mesh requests one; the text is the reason.
    WithoutSidecar(String),
}

/// Returns why the report is about a pod; `None` if the pod has ended, is a gateway or is not part of the mesh.
pub(super) fn candidate(scheduled: &ScheduledPod, namespace: Option<&Namespace>) -> Option<Candidate> {
    let pod = &scheduled.pod;
    if scheduled.is_ending {
        return None;
    }
    if let Some(enrolled_by) = enrolled_by(pod, namespace) {
        return Some(Candidate::Ambient(enrolled_by));
    }
    if pod.proxy().is_some() {
        return (!is_gateway(pod)).then_some(Candidate::WithSidecar);
    }
    missing_sidecar(pod, namespace).map(Candidate::WithoutSidecar)
}

/// Returns whether the proxy is a gateway, which receives its traffic without redirection.
fn is_gateway(pod: &Pod) -> bool {
    let pod = Pod { host_network: false, ..pod.clone() };
    matches!(pod_skip_reason(&pod), Some(SkipReason::NotASidecar(_)))
}

/// Returns why a pod has no sidecar although its namespace or the pod itself requests one.
fn missing_sidecar(pod: &Pod, namespace: Option<&Namespace>) -> Option<String> {
    let label = |key: &str| namespace.and_then(|namespace| namespace.labels.get(key)).map(String::as_str);
    let injection = label(INJECTION);
    let requested_by = match (injection, label(REVISION)) {
        (Some("disabled"), _) => return None,
        (Some("enabled"), _) => Some(format!("namespace {} has label {INJECTION}=enabled", pod.namespace)),
        (_, Some(revision)) if !revision.is_empty() => {
            Some(format!("namespace {} has label {REVISION}={revision}", pod.namespace))
        }
        _ => None,
    };
    let own_revision = || pod.labels.get(REVISION).map(|revision| format!("the pod has label {REVISION}={revision}"));
    match requested_injection(pod) {
        Some(false) => requested_by.map(|by| format!("no sidecar: {INJECT} is false; {by}")),
        Some(true) => {
            Some(format!("no sidecar: {INJECT} is true, but Istio's injector did not add one; delete the pod"))
        }
        None => requested_by.or_else(own_revision).map(|by| match pod.host_network {
            true => format!("no sidecar: Istio does not inject one into pods with hostNetwork; {by}"),
            false => format!("no sidecar: {by}, but Istio's injector did not add one; delete the pod"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::Container;

    /// A row: labels of the namespace, labels of the pod, whether it has hostNetwork, and a part of the reason.
    type Row<'a> = (&'a [(&'a str, &'a str)], &'a [(&'a str, &'a str)], bool, Option<&'a str>);

    fn labels(pairs: &[(&str, &str)]) -> std::collections::BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn pod(own: &[(&str, &str)], change: impl Fn(&mut Pod)) -> ScheduledPod {
        let mut pod = Pod { namespace: "shop".into(), name: "web".into(), labels: labels(own), ..Pod::default() };
        change(&mut pod);
        ScheduledPod { pod, ..ScheduledPod::default() }
    }

    fn proxy(args: &[&str]) -> Container {
        let args = args.iter().map(|&arg| arg.into()).collect();
        Container { name: "istio-proxy".into(), args, ..Container::default() }
    }

    #[test]
    fn pods_with_a_sidecar_are_examined_unless_they_ended_or_are_gateways() {
        let of = |scheduled: &ScheduledPod| candidate(scheduled, None);
        let meshed = pod(&[], |pod| pod.containers.push(proxy(&["proxy", "sidecar"])));
        assert_eq!(of(&meshed), Some(Candidate::WithSidecar));
        let native = pod(&[], |pod| pod.init_containers.push(proxy(&[])));
        assert_eq!(of(&native), Some(Candidate::WithSidecar));
        assert_eq!(of(&ScheduledPod { is_ending: true, ..meshed.clone() }), None);
        for host_network in [false, true] {
            let gateway = pod(&[], |pod| {
                pod.containers.push(proxy(&["proxy", "router"]));
                pod.host_network = host_network;
            });
            assert_eq!(of(&gateway), None);
        }
        assert_eq!(of(&pod(&[], |_| ())), None, "it is not part of the mesh");
    }

    #[test]
    fn an_enrolled_pod_without_a_sidecar_is_examined_whatever_the_injector_should_do() {
        let ambient = [("istio.io/dataplane-mode", "ambient")];
        let namespace = |dataplane_mode: Option<&str>| Namespace {
            dataplane_mode: dataplane_mode.map(str::to_owned),
            labels: labels(&[("istio.io/rev", "v1")]),
            ..Namespace::default()
        };
        let of = |own: &[(&str, &str)], mode| candidate(&pod(own, |_| ()), Some(&namespace(mode)));
        assert_eq!(of(&ambient, None), Some(Candidate::Ambient(EnrolledBy::Pod)));
        assert_eq!(of(&[], Some("ambient")), Some(Candidate::Ambient(EnrolledBy::Namespace)));
        assert!(matches!(of(&[], None), Some(Candidate::WithoutSidecar(_))));
        let gone = ScheduledPod { is_ending: true, ..pod(&ambient, |_| ()) };
        assert_eq!(candidate(&gone, None), None);
    }

    #[test]
    fn a_missing_sidecar_is_reported_if_the_mesh_requests_it() {
        let enabled: &[(&str, &str)] = &[("istio-injection", "enabled")];
        let table: &[Row] = &[
            (enabled, &[], false, Some("namespace shop has label istio-injection=enabled, but ")),
            (enabled, &[(INJECT, "false")], false, Some("sidecar.istio.io/inject is false; namespace shop ")),
            (enabled, &[], true, Some("hostNetwork")),
            (&[("istio.io/rev", "v1")], &[], false, Some("istio.io/rev=v1")),
            (&[("istio-injection", "disabled"), ("istio.io/rev", "v1")], &[(INJECT, "true")], false, None),
            (&[], &[(INJECT, "true")], false, Some("sidecar.istio.io/inject is true, but ")),
            (&[], &[("istio.io/rev", "v1")], false, Some("the pod has label istio.io/rev=v1, but ")),
            (&[], &[(INJECT, "false")], false, None),
            (&[("istio.io/rev", "")], &[], false, None),
        ];
        for (namespace, own, host_network, expected) in table {
            let namespace = Namespace { labels: labels(namespace), ..Namespace::default() };
            let found = candidate(&pod(own, |pod| pod.host_network = *host_network), Some(&namespace));
            match (expected, found) {
                (None, None) => {}
                (Some(expected), Some(Candidate::WithoutSidecar(reason))) => {
                    assert!(reason.starts_with("no sidecar: ") && reason.contains(expected), "{reason}");
                }
                (_, found) => panic!("{namespace:?} {own:?}: {found:?}"),
            }
        }
    }
}
