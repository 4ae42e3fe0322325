//! What a pod's annotations select: the elements, in either form, understood and checked before
//! anything runs.

use super::{json_form, shorthand};
use crate::cni::{Code, Error, at_most};
use crate::pod::Pod;
use serde_json::{Map, Value, json};
use std::net::IpAddr;

/// The annotation that selects a pod's further networks (Network Plumbing Working Group, "Network
/// Custom Resource Definition De-facto Standard", §4.1).
pub const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";

/// The annotation that selects another default network (multus-cni, `docs/configuration.md`).
const DEFAULT_NETWORK: &str = "v1.multus-cni.io/default-network";

/// The most elements of an annotation.
const MOST_ELEMENTS: usize = 100;
/// The longest annotation, in bytes: what Kubernetes allows all annotations of an object together.
const MOST_BYTES: usize = 256 * 1024;

/// One network that an annotation selects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Where it is selected, for messages: annotation, pod, which element, at which character.
    pub place: String,
    /// `namespace` of the definition.
    pub namespace: String,
    /// `name` of the definition.
    pub name: String,
    /// `interface`: how the interface is to be called.
    pub interface: Option<String>,
    /// `ips`: addresses, each with or without a prefix length.
    pub ips: Vec<String>,
    /// `mac`.
    pub mac: Option<String>,
    /// `infiniband-guid`.
    pub infiniband_guid: Option<String>,
    /// `portMappings`, objects as CNI's convention has them.
    pub port_mappings: Vec<Value>,
    /// `bandwidth`, an object as CNI's convention has it.
    pub bandwidth: Option<Value>,
    /// `deviceID`.
    pub device_id: Option<String>,
    /// `cni-args`: what goes into `args.cni` of every plugin of the network.
    pub cni_args: Map<String, Value>,
    /// `default-route`: the gateways of the pod's default route, which moves to this network. If it is set, also to an
    /// empty list, all networks lose their own default routes.
    pub default_route: Option<Vec<IpAddr>>,
}

impl Selection {
    /// What it asks of the network's plugins, by capability (CONVENTIONS.md, "Dynamic Plugin
    /// specific fields"). Only those that a plugin's configuration declares may reach it.
    #[must_use]
    pub fn runtime_config(&self) -> Map<String, Value> {
        let asked = [
            ("portMappings", (!self.port_mappings.is_empty()).then(|| json!(self.port_mappings))),
            ("bandwidth", self.bandwidth.clone()),
            ("ips", (!self.ips.is_empty()).then(|| json!(self.ips))),
            ("mac", self.mac.as_ref().map(|mac| json!(mac))),
            ("infinibandGUID", self.infiniband_guid.as_ref().map(|guid| json!(guid))),
            ("deviceID", self.device_id.as_ref().map(|id| json!(id))),
        ];
        asked.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
    }

    /// What it adds to `CNI_ARGS`, which is how plugins were asked before there were capabilities.
    #[must_use]
    pub fn args(&self) -> Vec<(&'static str, String)> {
        let ips = (!self.ips.is_empty()).then(|| ("IP", self.ips.join(",")));
        self.mac.iter().map(|mac| ("MAC", mac.clone())).chain(ips).collect()
    }
}

/// The networks that an annotation selects, in its order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selections {
    /// The elements.
    pub elements: Vec<Selection>,
    /// What was ignored and should be looked at, one line each.
    pub warnings: Vec<String>,
}

/// The networks that the pod selects besides the default one. Without a namespace, the pod's own is
/// meant.
///
/// # Errors
/// [`Code::InvalidConfig`] with annotation, pod, element, character and what is accepted.
pub fn networks(pod: &Pod) -> Result<Selections, Error> {
    let Some(text) = pod.annotations.get(NETWORKS) else { return Ok(Selections::default()) };
    NetworksAnnotation { key: NETWORKS, pod, namespace: &pod.namespace, text }.selections()
}

/// The default network that the pod selects instead of the configuration's: none or one. Without a
/// namespace, `namespace` is meant (Multus's `multusNamespace`).
///
/// # Errors
/// As [`networks`]; the annotation selects none, or more than one.
pub fn default_network(pod: &Pod, namespace: &str) -> Result<Selections, Error> {
    let Some(text) = pod.annotations.get(DEFAULT_NETWORK) else { return Ok(Selections::default()) };
    let annotation = NetworksAnnotation { key: DEFAULT_NETWORK, pod, namespace, text };
    let selections = annotation.selections()?;
    match selections.elements.len() {
        1 => Ok(selections),
        count => Err(annotation.refuse(&format!("it selects {count} networks; accepted: exactly one"))),
    }
}

/// An annotation that is there.
#[derive(Debug, Clone, Copy)]
pub(super) struct NetworksAnnotation<'a> {
    pub(super) key: &'static str,
    pub(super) pod: &'a Pod,
    /// What is meant where an element names no namespace.
    pub(super) namespace: &'a str,
    pub(super) text: &'a str,
}

impl NetworksAnnotation<'_> {
    fn selections(&self) -> Result<Selections, Error> {
        at_most(MOST_BYTES, "bytes", &self.to_string(), self.text.len())?;
        if self.text.trim().is_empty() {
            Ok(Selections::default())
        } else if self.text.contains(['[', '{', '"']) {
            json_form::parse(self)
        } else {
            shorthand::parse(self)
        }
    }

    /// For messages: where element `number`, counted from 1, is told at byte `at`.
    pub(super) fn place(&self, number: usize, at: usize) -> String {
        format!("{self}: element {number} at character {}", self.character(at))
    }

    /// Which character, counted from 1, stands at byte `at`.
    pub(super) fn character(&self, at: usize) -> usize {
        self.text[..self.text.ceil_char_boundary(at)].chars().count() + 1
    }

    /// Refuses more elements than a pod may select.
    pub(super) fn check_count(&self, elements: usize) -> Result<(), Error> {
        at_most(MOST_ELEMENTS, "elements", &self.to_string(), elements)
    }

    pub(super) fn refuse(&self, why: &str) -> Error {
        Error::new(Code::InvalidConfig, format!("{self}: {why}"))
    }
}

impl std::fmt::Display for NetworksAnnotation<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "annotation {:?} of pod {}/{}", self.key, self.pod.namespace, self.pod.name)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pod(key: &str, text: &str) -> Pod {
        let annotations = [(key.to_owned(), text.to_owned())].into();
        Pod { namespace: "shop".into(), name: "web-0".into(), annotations, ..Pod::default() }
    }

    /// What the pod's networks come to with this text.
    pub(in crate::networks) fn parse(text: &str) -> Result<Selections, Error> {
        networks(&pod(NETWORKS, text))
    }

    /// The text is an error that names annotation and pod, then the place, then what is wrong.
    pub(in crate::networks) fn refused(text: &str, place: &str, what: &str) {
        let error = parse(text).expect_err(text);
        let wanted = format!("annotation {NETWORKS:?} of pod shop/web-0: {place}{what}");
        assert!(error.code == Code::InvalidConfig && error.to_string().starts_with(&wanted), "{text}: {error}");
        assert!(
            ["expected ", "accepted: "].iter().any(|word| error.msg.contains(word))
                || error.msg.contains("interface name"),
            "{error}"
        );
    }

    #[test]
    fn no_annotation_and_an_empty_one_select_nothing() {
        assert_eq!(networks(&Pod::default()), Ok(Selections::default()));
        assert_eq!(parse(""), Ok(Selections::default()));
        assert_eq!(parse(" \n"), Ok(Selections::default()));
        assert_eq!(parse("[]"), Ok(Selections::default()));
    }

    #[test]
    fn the_default_network_is_one_and_in_a_namespace_of_its_own() {
        let default = |text: &str| default_network(&pod(DEFAULT_NETWORK, text), "kube-system");
        assert_eq!(default_network(&Pod::default(), "x"), Ok(Selections::default()));
        for text in ["ovn", "[{\"name\": \"ovn\"}]"] {
            let elements = default(text).expect("accepted").elements;
            assert_eq!((&*elements[0].namespace, &*elements[0].name), ("kube-system", "ovn"));
        }
        assert_eq!(default("other/ovn@eth9").expect("accepted").elements[0].namespace, "other");
        for (text, count) in [("a,b", 2), ("", 0), ("[]", 0)] {
            let error = default(text).expect_err("not one");
            let wanted = format!(
                "annotation {DEFAULT_NETWORK:?} of pod shop/web-0: it selects {count} networks; accepted: exactly one"
            );
            assert_eq!(error, Error::new(Code::InvalidConfig, wanted));
        }
    }

    #[test]
    fn what_is_asked_of_plugins() {
        let selection = Selection {
            ips: vec!["10.0.0.9/24".into(), "fd::9".into()],
            mac: Some("02:00:00:00:00:01".into()),
            infiniband_guid: Some("11:22:33:44:55:66:77:88".into()),
            device_id: Some("0000:00:01.0".into()),
            bandwidth: Some(json!({"ingressRate": 1})),
            port_mappings: vec![json!({"hostPort": 1})],
            ..Selection::default()
        };
        let wanted = json!({
            "portMappings": [{"hostPort": 1}], "bandwidth": {"ingressRate": 1}, "ips": ["10.0.0.9/24", "fd::9"],
            "mac": "02:00:00:00:00:01", "infinibandGUID": "11:22:33:44:55:66:77:88", "deviceID": "0000:00:01.0",
        });
        assert_eq!(Value::Object(selection.runtime_config()), wanted);
        assert_eq!(selection.args(), [("MAC", "02:00:00:00:00:01".into()), ("IP", "10.0.0.9/24,fd::9".into())]);
        assert!(Selection::default().runtime_config().is_empty() && Selection::default().args().is_empty());
    }

    fn selections() -> impl Strategy<Value = Vec<(Option<String>, String, Option<String>)>> {
        let element = (
            prop::option::of("[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?"),
            "[a-z0-9]([a-z0-9-]{0,5}[a-z0-9])?(\\.[a-z0-9]{1,4}){0,2}",
            prop::option::of("[a-zA-Z0-9][a-zA-Z0-9_.-]{0,14}"),
        );
        prop::collection::vec(element, 1..6)
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "\\PC{0,40}", near in "[a-b/@, \\[\\]{}\":ä]{0,24}") {
            let _ = (parse(&text), parse(&near));
        }

        #[test]
        fn what_is_written_is_read(elements in selections(), blank in "[ \t\n]{0,2}") {
            let comma: Vec<String> = elements.iter().map(|(namespace, name, interface)| {
                let namespace = namespace.as_ref().map(|n| format!("{n}{blank}/")).unwrap_or_default();
                let interface = interface.as_ref().map(|i| format!("{blank}@{i}")).unwrap_or_default();
                format!("{blank}{namespace}{name}{interface}{blank}")
            }).collect();
            let json: Vec<Value> = elements.iter().map(|(namespace, name, interface)| {
                json!({"namespace": namespace, "name": name, "interface": interface})
            }).collect();
            let wanted: Vec<_> = elements.iter().map(|(namespace, name, interface)| {
                (namespace.clone().unwrap_or("shop".into()), name.clone(), interface.clone())
            }).collect();
            for text in [comma.join(","), Value::Array(json).to_string()] {
                let read = parse(&text).map_err(|error| TestCaseError::fail(error.to_string()))?;
                let read: Vec<_> = read.elements.into_iter().map(|s| (s.namespace, s.name, s.interface)).collect();
                prop_assert_eq!(&read, &wanted, "{}", text);
            }
        }
    }
}
