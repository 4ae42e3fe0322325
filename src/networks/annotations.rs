//! The annotations of a pod that select networks, in the JSON form (an array of objects) or the shorthand. They are parsed
//! and checked before any network is added.

use super::element::{ACCEPTED_FIELDS, Element};
use super::selection::Selections;
use crate::cni::{Code, Error, at_most, excerpt, wrong_type};
use crate::pod::Pod;
use crate::pod::well_known::{DEFAULT_NETWORK, NETWORKS};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::fmt;

/// Limit of elements in an annotation.
const MAX_ELEMENTS: usize = 100;
/// Limit of an annotation, in bytes: the limit of Kubernetes for all annotations of an object.
const MAX_BYTES: usize = 256 * 1024;
const ACCEPTED_JSON: &str = r#"an array of objects such as [{"name": "a"}], or the shorthand such as a,ns/b@eth1"#;
const ACCEPTED_SHORTHAND: &str = "[NAMESPACE/]NAME[@INTERFACE], separated by commas";

/// Returns the networks that the pod selects in addition to the default network. The default namespace is the pod's.
///
/// # Errors
/// [`Code::InvalidConfig`] with annotation, pod, element, character and the expected value.
pub fn networks(pod: &Pod) -> Result<Selections, Error> {
    let Some(text) = pod.annotations.get(NETWORKS) else { return Ok(Selections::default()) };
    NetworksAnnotation { key: NETWORKS, pod, text }.selections(&pod.namespace)
}

/// Returns the default network that the pod selects instead of the configured one: none or one. The default namespace is
/// `namespace` (Multus's `multusNamespace`).
///
/// # Errors
/// As [`networks`]; the annotation does not select exactly one network.
pub fn default_network(pod: &Pod, namespace: &str) -> Result<Selections, Error> {
    let Some(text) = pod.annotations.get(DEFAULT_NETWORK) else { return Ok(Selections::default()) };
    let annotation = NetworksAnnotation { key: DEFAULT_NETWORK, pod, text };
    let selections = annotation.selections(namespace)?;
    match selections.elements.len() {
        1 => Ok(selections),
        count => Err(annotation.reject(&format!("expected exactly one network, got {count}"))),
    }
}

/// An annotation of a pod that selects networks.
#[derive(Debug, Clone, Copy)]
struct NetworksAnnotation<'a> {
    key: &'static str,
    pod: &'a Pod,
    text: &'a str,
}

impl NetworksAnnotation<'_> {
    /// Returns the networks; `namespace` is that of an element without one.
    fn selections(&self, namespace: &str) -> Result<Selections, Error> {
        at_most(MAX_BYTES, "bytes", self, self.text.len())?;
        let (elements, warnings) = match self.text {
            empty if empty.trim().is_empty() => return Ok(Selections::default()),
            json if json.contains(['[', '{', '"']) => self.json_elements()?,
            _ => self.shorthand_elements()?,
        };
        let elements = elements.iter().map(|element| element.selection(namespace)).collect::<Result<_, _>>()?;
        Ok(Selections { elements, warnings })
    }

    /// Parses the JSON form. Returns its elements and warnings.
    fn json_elements(&self) -> Result<(Vec<Element>, Vec<String>), Error> {
        let texts: Vec<&RawValue> = match serde_json::from_str(self.text) {
            Ok(texts) => texts,
            Err(error) if error.is_data() => {
                return Err(self.reject(&format!("JSON, but not an array; expected {ACCEPTED_JSON}")));
            }
            Err(error) => return Err(self.not_json(&error)),
        };
        at_most(MAX_ELEMENTS, "elements", self, texts.len())?;
        let (mut elements, mut unknown) = (Vec::new(), Vec::new());
        for (index, text) in texts.into_iter().enumerate() {
            // The element is a part of the annotation's text.
            let place = self.place(index + 1, text.get().as_ptr() as usize - self.text.as_ptr() as usize);
            let value: Value = serde_json::from_str(text.get()).map_err(|error| self.not_json(&error))?;
            let Value::Object(fields) = value else { return Err(wrong_type(&place, &value, ACCEPTED_JSON)) };
            let element = Element { place, fields };
            unknown.extend(element.unknown_fields().map(|field| (element.place.clone(), excerpt(field))));
            elements.push(element);
        }
        let more = match unknown.len() {
            0 | 1 => String::new(),
            count => format!("; and {} more such fields", count - 1),
        };
        let warning = |(place, field): &(String, String)| {
            format!("{place}: {field}: unknown field, ignored; expected one of {ACCEPTED_FIELDS}{more}")
        };
        Ok((elements, unknown.first().map(warning).into_iter().collect()))
    }

    fn not_json(&self, error: &serde_json::Error) -> Error {
        let lines_before = error.line().saturating_sub(1);
        let before: usize = self.text.split_inclusive('\n').take(lines_before).map(str::len).sum();
        let character = self.character(before + error.column().saturating_sub(1));
        let what = error.to_string();
        let what = what.split(" at line ").next().unwrap_or_default();
        self.reject(&format!("invalid JSON at character {character}: {what}; expected {ACCEPTED_JSON}"))
    }

    /// Parses the shorthand: `[NAMESPACE/]NAME[@INTERFACE]`, separated by commas. Returns its elements and warnings.
    fn shorthand_elements(&self) -> Result<(Vec<Element>, Vec<String>), Error> {
        at_most(MAX_ELEMENTS, "elements", self, self.text.split(',').count())?;
        let (mut elements, mut warnings, mut start) = (Vec::new(), Vec::new(), 0);
        for (index, item) in self.text.split(',').enumerate() {
            let blanks = item.len() - item.trim_start().len();
            let place = self.place(index + 1, start + blanks);
            start += item.len() + 1;
            elements.push(shorthand(place, item.trim(), &mut warnings)?);
        }
        Ok((elements, warnings))
    }

    /// Returns the place of element `number`, counted from 1, at byte `at`, for messages.
    fn place(&self, number: usize, at: usize) -> String {
        format!("{self}: element {number} at character {}", self.character(at))
    }

    /// Returns the number of the character at byte `at`, counted from 1.
    fn character(&self, at: usize) -> usize {
        self.text[..self.text.ceil_char_boundary(at)].chars().count() + 1
    }

    fn reject(&self, why: &str) -> Error {
        Error::new(Code::InvalidConfig, format!("{self}: {why}"))
    }
}

/// Parses one item of the shorthand. A blank namespace or interface counts as absent, with a warning.
fn shorthand(place: String, item: &str, warnings: &mut Vec<String>) -> Result<Element, Error> {
    let reject = |why: &str| Error::new(Code::InvalidConfig, format!("{place}: {why}; expected {ACCEPTED_SHORTHAND}"));
    if item.is_empty() {
        return Err(reject("empty element"));
    }
    let (namespace, rest) = item.split_once('/').map_or((None, item), |(namespace, rest)| (Some(namespace), rest));
    let (name, interface) = rest.split_once('@').map_or((rest, None), |(name, interface)| (name, Some(interface)));
    for (part, separator) in [(name, '/'), (interface.unwrap_or_default(), '/'), (interface.unwrap_or_default(), '@')] {
        if part.contains(separator) {
            return Err(reject(&format!("{:?} has more than one {separator}", excerpt(item))));
        }
    }
    if name.trim().is_empty() {
        return Err(reject(&format!("{:?} has no name", excerpt(item))));
    }
    let mut fields = Map::from_iter([("name".to_owned(), name.trim().into())]);
    for (field, part, why) in [
        ("namespace", namespace, "no namespace before /, the default one is used"),
        ("interface", interface, "no name after @, the interface is named by its position"),
    ] {
        match part.map(str::trim) {
            Some("") => warnings.push(format!("{place}: {why}")),
            Some(part) => drop(fields.insert(field.to_owned(), part.into())),
            None => {}
        }
    }
    Ok(Element { place, fields })
}

impl fmt::Display for NetworksAnnotation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "annotation {:?} of pod {}/{}", self.key, self.pod.namespace, self.pod.name)
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

    /// Namespace, name and interface of each element.
    fn elements(text: &str) -> Vec<(String, String, String)> {
        let selections = parsed(text).unwrap_or_else(|error| panic!("{error}"));
        assert!(selections.warnings.is_empty(), "{:?}", selections.warnings);
        let named = |s: super::super::Selection| (s.namespace, s.name, s.interface.unwrap_or_default());
        selections.elements.into_iter().map(named).collect()
    }

    #[test]
    fn every_part_is_parsed_without_surrounding_blanks() {
        type Row<'a> = (&'a str, &'a [(&'a str, &'a str, &'a str)]);
        let rows: [Row<'_>; 7] = [
            ("a", &[("shop", "a", "")]),
            ("a,b", &[("shop", "a", ""), ("shop", "b", "")]),
            ("a,a", &[("shop", "a", ""), ("shop", "a", "")]),
            ("default/istio-cni, excludedns@x0", &[("default", "istio-cni", ""), ("shop", "excludedns", "x0")]),
            (" ns1 / noname @ foo0 ", &[("ns1", "noname", "foo0")]),
            ("v1.2-istio,\n b@eth0.100", &[("shop", "v1.2-istio", ""), ("shop", "b", "eth0.100")]),
            ("null", &[("shop", "null", "")]),
        ];
        for (text, wanted) in rows {
            let wanted: Vec<_> = wanted.iter().map(|(a, b, c)| ((*a).into(), (*b).into(), (*c).into())).collect();
            assert_eq!(elements(text), wanted, "{text}");
        }
    }

    #[test]
    fn errors_contain_the_element_and_the_character() {
        for (text, place, what) in [
            ("a,b,", "element 3 at character 5: ", "empty element; expected [NAMESPACE/]NAME[@INTERFACE]"),
            ("a,,b", "element 2 at character 3: ", "empty element"),
            ("a,  ,b", "element 2 at character 5: ", "empty element"),
            ("ä, B", "element 1 at character 1: ", "name: invalid value "),
            ("a, nB", "element 2 at character 4: ", "name: invalid value "),
            ("a, n / B", "element 2 at character 4: ", "name: invalid value "),
            ("ns/", "element 1 at character 1: ", "\"ns/\" has no name"),
            ("@eth1", "element 1 at character 1: ", "\"@eth1\" has no name"),
            ("a/b/c", "element 1 at character 1: ", "\"a/b/c\" has more than one /"),
            ("a@b/c", "element 1 at character 1: ", "namespace: invalid value "),
            ("a@b@c", "element 1 at character 1: ", "\"a@b@c\" has more than one @"),
            ("n/a@b/c", "element 1 at character 1: ", "\"n/a@b/c\" has more than one /"),
            ("n.s/a", "element 1 at character 1: ", "namespace: invalid value "),
            ("a..b", "element 1 at character 1: ", "name: invalid value "),
            ("../x", "element 1 at character 1: ", "namespace: invalid value "),
            ("a%2fb", "element 1 at character 1: ", "name: invalid value "),
            (
                "a@0123456789abcdef",
                "element 1 at character 1: ",
                "interface: \"0123456789abcdef\": interface name is too long",
            ),
            ("a@x y", "element 1 at character 1: ", "interface: \"x y\": interface name contains"),
            ("a@..", "element 1 at character 1: ", "interface: \"..\": interface name is . or .."),
            ("*", "element 1 at character 1: ", "name: invalid value "),
        ] {
            assert_rejected(text, place, what);
        }
    }

    #[test]
    fn too_many_elements_are_rejected_without_parsing_them() {
        let selected = |count: usize| parsed(&vec!["a"; count].join(","));
        assert_eq!(selected(100).expect("accepted").elements.len(), 100);
        let started = std::time::Instant::now();
        let error = selected(125_000).expect_err("too many");
        let of_pod = r#"annotation "k8s.v1.cni.cncf.io/networks" of pod shop/web-0"#;
        assert_eq!(error.msg, format!("{of_pod}: expected at most 100 elements, got 125000"));
        assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
    }

    #[test]
    fn a_long_invalid_name_is_shortened() {
        let error = parsed(&"A".repeat(200_000)).expect_err("no name");
        assert!(error.msg.len() < 400, "{}", error.msg.len());
    }

    #[test]
    fn an_empty_namespace_or_interface_causes_a_warning() {
        for (text, character) in [("a, /b", 4), ("a,b@", 3)] {
            let selections = parsed(text).expect("accepted");
            assert_eq!((&*selections.elements[1].namespace, &*selections.elements[1].name), ("shop", "b"));
            assert_eq!(selections.elements[1].interface, None);
            let place = format!("element 2 at character {character}: no name");
            assert!(selections.warnings[0].contains(&place), "{:?}", selections.warnings);
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
