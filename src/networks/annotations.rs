//! The annotations of a pod that select networks, in the JSON form (an array of objects) or the shorthand. They are parsed
//! and checked before any network is added.

use super::element::Selections;
use super::element::{ACCEPTED_FIELDS, Element};
use crate::cni::{Code, Error, at_most, excerpt, json_error, wrong_type};
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
        let what = json_error(error);
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
