//! Objects that are too large for the cache, reduced to what decides about a pod's traffic. Without room for that, an
//! object is incomplete: no author of a pod can make it so large that the agent neither repairs it nor ends its bypasses.

use crate::pod::well_known as known;
use crate::pod::{CONFIG_HASH, CONFIG_MIRROR, Container, Namespace, Pod};
use std::collections::BTreeMap;

/// The annotations that decide about a pod's traffic.
const ANNOTATIONS: [&str; 30] = [
    known::INJECT,
    known::INJECTION_STATUS,
    known::INTERCEPTION_MODE,
    known::INCLUDE_INBOUND_PORTS,
    known::EXCLUDE_INBOUND_PORTS,
    known::INCLUDE_OUTBOUND_PORTS,
    known::EXCLUDE_OUTBOUND_PORTS,
    known::INCLUDE_OUTBOUND_RANGES,
    known::EXCLUDE_OUTBOUND_RANGES,
    known::EXCLUDE_INTERFACES,
    known::REROUTE_INTERFACES,
    known::KUBEVIRT_INTERFACES,
    known::EXCLUDE_UIDS,
    known::EXCLUDE_GIDS,
    known::EXCLUDE_PORTS_FOR_UIDS,
    known::EXCLUDE_DNS,
    known::EXCLUDE_CONTAINERS,
    known::EXCLUDE_DESTINATION_PORTS,
    known::EXCLUDE_DESTINATION_RANGES,
    known::REJECTED_INBOUND_PORTS,
    known::AMBIENT_REDIRECTION,
    known::AMBIENT_DNS_CAPTURE,
    known::AMBIENT_BYPASS_INBOUND,
    known::OPENSHIFT_UID_RANGE,
    known::OPENSHIFT_GROUP_RANGE,
    known::NETWORKS,
    known::NETWORK_STATUS,
    known::DEFAULT_NETWORK,
    CONFIG_HASH,
    CONFIG_MIRROR,
];
/// The variables of `istio-proxy` that decide about a pod's traffic.
const VARIABLES: [&str; 3] = [known::DISABLE_ENVOY, known::DNS_CAPTURE, known::INVALID_DROP];
/// The maximum length of a value, in bytes.
const MAX_VALUE: usize = 512;
/// The number of arguments of `istio-proxy` that decide: the command and the type of the proxy.
const ARGUMENTS: usize = 2;
/// Stands for a value that is too long. It is invalid for each of the annotations.
const TOO_LONG: &str = "(too long for the agent)";

/// Removes the annotations, variables and arguments of a pod that decide nothing.
pub(super) fn reduce_pod(pod: &mut Pod) {
    reduce_annotations(&mut pod.annotations);
    pod.containers.iter_mut().chain(&mut pod.init_containers).for_each(reduce_container);
}

/// Leaves of a pod what has a small limit: its names and its proxy, short annotations, and the labels that Istio's injector
/// and istio-cni read.
pub(super) fn minimize_pod(pod: &mut Pod) {
    reduce_pod(pod);
    pod.annotations.values_mut().for_each(cut);
    pod.labels.retain(|key, _| [known::INJECT, known::DATAPLANE_MODE].contains(&key.as_str()));
    pod.labels.values_mut().for_each(cut);
    pod.dns_nameservers.clear();
    pod.containers.retain(|container| container.name == known::PROXY_CONTAINER);
    pod.init_containers.retain(|container| container.name == known::PROXY_CONTAINER);
}

/// Removes the annotations of a namespace that decide nothing.
pub(super) fn reduce_namespace(namespace: &mut Namespace) {
    reduce_annotations(&mut namespace.annotations);
}

fn reduce_annotations(annotations: &mut BTreeMap<String, String>) {
    annotations.retain(|key, _| ANNOTATIONS.contains(&key.as_str()));
}

fn reduce_container(container: &mut Container) {
    let variable = |name: &&str| Some(((*name).to_owned(), container.env(name)?.to_owned()));
    container.env = VARIABLES.iter().filter_map(variable).collect();
    container.env.iter_mut().for_each(|(_, value)| cut(value));
    container.args = container.args.iter().take(ARGUMENTS).cloned().collect();
    container.args.iter_mut().for_each(cut);
}

/// Replaces a value that is too long.
pub(super) fn cut(value: &mut String) {
    if value.len() > MAX_VALUE {
        *value = TOO_LONG.to_owned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each annotation in the list of names is kept, or no decision about a running pod reads it.
    #[test]
    fn no_annotation_that_decides_is_missing() {
        let others = [known::DATAPLANE_MODE, known::RESOURCE_NAME];
        let names = include_str!("../../pod/well_known.rs").lines().filter_map(|line| {
            let (_, value) = line.strip_prefix("pub const ")?.split_once(": &str = \"")?;
            value.strip_suffix("\";").filter(|value| value.contains('/'))
        });
        let missing: Vec<_> = names.filter(|name| !ANNOTATIONS.contains(name) && !others.contains(name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn what_decides_about_traffic_remains() {
        let env = [("A", "1"), (known::DNS_CAPTURE, "false"), (known::DNS_CAPTURE, "true")];
        let container = |env: &[(&str, &str)], args: &[&str]| Container {
            name: "istio-proxy".into(),
            env: env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            args: args.iter().map(ToString::to_string).collect(),
            ..Container::default()
        };
        let long = "x".repeat(MAX_VALUE + 1);
        let annotations = [(known::EXCLUDE_UIDS, "7"), (known::EXCLUDE_DNS, &long), ("detour.io/other", "1")];
        let mut pod = Pod {
            annotations: annotations.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            labels: [(known::INJECT.to_owned(), "true".to_owned()), ("app".to_owned(), "web".to_owned())].into(),
            containers: vec![container(&env, &["proxy", "sidecar", "--x"])],
            ..Pod::default()
        };
        pod.containers.push(Container { name: "app".into(), ..Container::default() });
        let annotations = |expected: [(&str, &str); 2]| -> BTreeMap<String, String> {
            expected.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
        };
        let proxy = container(&[(known::DNS_CAPTURE, "true")], &["proxy", "sidecar"]);
        reduce_pod(&mut pod);
        assert_eq!(pod.annotations, annotations([(known::EXCLUDE_UIDS, "7"), (known::EXCLUDE_DNS, &long)]));
        assert_eq!((pod.labels.len(), pod.containers.len(), &pod.containers[0]), (2, 2, &proxy));
        minimize_pod(&mut pod);
        assert_eq!(pod.annotations, annotations([(known::EXCLUDE_UIDS, "7"), (known::EXCLUDE_DNS, TOO_LONG)]));
        assert_eq!((pod.labels.len(), pod.containers), (1, vec![proxy]));
    }
}
