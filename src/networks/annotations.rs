//! The annotations of a pod that select networks, in the JSON form or the shorthand. They are parsed and checked before
//! any network is added.

use super::selection::{NetworksAnnotation, Selections};
use super::{json_form, shorthand};
use crate::cni::Error;
use crate::pod::Pod;
use crate::pod::well_known::{DEFAULT_NETWORK, NETWORKS};

/// Returns the networks that the pod selects in addition to the default network. The default namespace is the pod's.
///
/// # Errors
/// [`Code::InvalidConfig`](crate::cni::Code::InvalidConfig) with annotation, pod, element, character and the expected
/// value.
pub fn networks(pod: &Pod) -> Result<Selections, Error> {
    let Some(text) = pod.annotations.get(NETWORKS) else { return Ok(Selections::default()) };
    parse(&NetworksAnnotation { key: NETWORKS, pod, namespace: &pod.namespace, text })
}

/// Returns the default network that the pod selects instead of the configured one: none or one. The default namespace is
/// `namespace` (Multus's `multusNamespace`).
///
/// # Errors
/// As [`networks`]; the annotation does not select exactly one network.
pub fn default_network(pod: &Pod, namespace: &str) -> Result<Selections, Error> {
    let Some(text) = pod.annotations.get(DEFAULT_NETWORK) else { return Ok(Selections::default()) };
    let annotation = NetworksAnnotation { key: DEFAULT_NETWORK, pod, namespace, text };
    let selections = parse(&annotation)?;
    match selections.elements.len() {
        1 => Ok(selections),
        count => Err(annotation.reject(&format!("expected exactly one network, got {count}"))),
    }
}

fn parse(annotation: &NetworksAnnotation<'_>) -> Result<Selections, Error> {
    annotation.check_length()?;
    if annotation.text.trim().is_empty() {
        Ok(Selections::default())
    } else if annotation.text.contains(['[', '{', '"']) {
        json_form::parse(annotation)
    } else {
        shorthand::parse(annotation)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cni::Code;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn pod(key: &str, text: &str) -> Pod {
        let annotations = [(key.to_owned(), text.to_owned())].into();
        Pod { namespace: "shop".into(), name: "web-0".into(), annotations, ..Pod::default() }
    }

    /// Returns the networks of a pod with this annotation.
    pub(in crate::networks) fn parsed(text: &str) -> Result<Selections, Error> {
        networks(&pod(NETWORKS, text))
    }

    /// Asserts that the text is rejected with annotation and pod, then the place, then the cause.
    pub(in crate::networks) fn assert_rejected(text: &str, place: &str, what: &str) {
        let error = parsed(text).expect_err(text);
        let wanted = format!("annotation {NETWORKS:?} of pod shop/web-0: {place}{what}");
        assert!(error.code == Code::InvalidConfig && error.to_string().starts_with(&wanted), "{text}: {error}");
    }

    #[test]
    fn a_missing_or_empty_annotation_selects_nothing() {
        assert_eq!(networks(&Pod::default()), Ok(Selections::default()));
        assert_eq!(parsed(""), Ok(Selections::default()));
        assert_eq!(parsed(" \n"), Ok(Selections::default()));
        assert_eq!(parsed("[]"), Ok(Selections::default()));
    }

    #[test]
    fn the_default_network_is_a_single_one_with_its_own_default_namespace() {
        let default = |text: &str| default_network(&pod(DEFAULT_NETWORK, text), "kube-system");
        assert_eq!(default_network(&Pod::default(), "x"), Ok(Selections::default()));
        for text in ["ovn", "[{\"name\": \"ovn\"}]"] {
            let elements = default(text).expect("accepted").elements;
            assert_eq!((&*elements[0].namespace, &*elements[0].name), ("kube-system", "ovn"));
        }
        assert_eq!(default("other/ovn@eth9").expect("accepted").elements[0].namespace, "other");
        for (text, count) in [("a,b", 2), ("", 0), ("[]", 0)] {
            let error = default(text).expect_err("not one");
            let wanted =
                format!("annotation {DEFAULT_NETWORK:?} of pod shop/web-0: expected exactly one network, got {count}");
            assert_eq!(error, Error::new(Code::InvalidConfig, wanted));
        }
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
        fn no_text_causes_a_panic(text in "\\PC{0,40}", near in "[a-b/@, \\[\\]{}\":ä]{0,24}") {
            let _ = (parsed(&text), parsed(&near));
        }

        #[test]
        fn both_forms_select_the_same_networks(elements in selections(), blank in "[ \t\n]{0,2}") {
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
                let read = parsed(&text).map_err(|error| TestCaseError::fail(error.to_string()))?;
                let read: Vec<_> = read.elements.into_iter().map(|s| (s.namespace, s.name, s.interface)).collect();
                prop_assert_eq!(&read, &wanted, "{}", text);
            }
        }
    }
}
