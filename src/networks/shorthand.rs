//! The shorthand of a networks annotation: `[NAMESPACE/]NAME[@INTERFACE]`, separated by commas.

use super::selection::{NetworksAnnotation, Selection, Selections};
use crate::cni::{Code, Error, check_interface_name, excerpt, is_dns_label, is_dns_subdomain};

const ACCEPTED: &str = "[NAMESPACE/]NAME[@INTERFACE], separated by commas";
/// The names that [`is_dns_subdomain`] accepts.
pub(super) const ACCEPTED_NAME: &str = "lower-case letters, digits, - and ., at most 253 (an RFC 1123 subdomain)";
/// The names that [`is_dns_label`] accepts.
pub(super) const ACCEPTED_NAMESPACE: &str = "lower-case letters, digits and -, at most 63 (an RFC 1123 label)";

/// Parses the annotation.
pub(super) fn parse(annotation: &NetworksAnnotation<'_>) -> Result<Selections, Error> {
    let mut selections = Selections::default();
    annotation.check_count(annotation.text.split(',').count())?;
    let mut start = 0;
    for (index, item) in annotation.text.split(',').enumerate() {
        let item = ShorthandItem { annotation, number: index + 1, start, text: item };
        start += item.text.len() + 1;
        selections.elements.push(item.selection(&mut selections.warnings)?);
    }
    Ok(selections)
}

/// The text between two commas.
#[derive(Clone, Copy)]
struct ShorthandItem<'a> {
    annotation: &'a NetworksAnnotation<'a>,
    /// The number of the item, counted from 1.
    number: usize,
    /// The byte of the annotation at which it starts.
    start: usize,
    text: &'a str,
}

impl<'a> ShorthandItem<'a> {
    fn selection(self, warnings: &mut Vec<String>) -> Result<Selection, Error> {
        let Self { annotation, text, .. } = self;
        let whole = self.part(0, text);
        if whole.text.is_empty() {
            return Err(whole.reject(&format!("empty element; expected {ACCEPTED}")));
        }
        let slash = text.find('/');
        let rest = slash.map_or(0, |slash| slash + 1);
        let at = text[rest..].find('@').map(|at| rest + at);
        let namespace = slash.map(|slash| self.part(0, &text[..slash]));
        let name = self.part(rest, &text[rest..at.unwrap_or(text.len())]);
        let interface = at.map(|at| self.part(at + 1, &text[at + 1..]));

        for (part, separator) in [(Some(name), '/'), (interface, '/'), (interface, '@')] {
            if part.is_some_and(|part| part.text.contains(separator)) {
                return Err(whole
                    .reject(&format!("{:?} has more than one {separator}; expected {ACCEPTED}", excerpt(whole.text))));
            }
        }
        if name.text.is_empty() {
            return Err(name.reject(&format!("{:?} has no name; expected {ACCEPTED}", excerpt(whole.text))));
        }
        if !is_dns_subdomain(name.text) {
            return Err(name.reject(&format!("invalid name {:?}; expected {ACCEPTED_NAME}", excerpt(name.text))));
        }
        let mut selection = Selection {
            place: whole.place(),
            namespace: annotation.namespace.to_owned(),
            name: name.text.to_owned(),
            ..Selection::default()
        };
        match namespace {
            None => {}
            Some(part) if part.text.is_empty() => {
                warnings.push(format!("{}: no namespace before /, {} is used", part.place(), annotation.namespace));
            }
            Some(part) if is_dns_label(part.text) => part.text.clone_into(&mut selection.namespace),
            Some(part) => {
                return Err(
                    part.reject(&format!("invalid namespace {:?}; expected {ACCEPTED_NAMESPACE}", excerpt(part.text)))
                );
            }
        }
        match interface {
            None => {}
            Some(part) if part.text.is_empty() => {
                warnings.push(format!("{}: no name after @, the interface is named by its position", part.place()));
            }
            Some(part) => {
                check_interface_name(part.text)
                    .map_err(|error| part.reject(&format!("invalid interface {:?}: {error}", excerpt(part.text))))?;
                selection.interface = Some(part.text.to_owned());
            }
        }
        Ok(selection)
    }

    /// Returns the part `text` of the item, which starts at its byte `at`, without surrounding blanks.
    fn part(self, at: usize, text: &'a str) -> ShorthandPart<'a> {
        let blanks = text.len() - text.trim_start().len();
        ShorthandPart {
            annotation: self.annotation,
            number: self.number,
            at: self.start + at + blanks,
            text: text.trim(),
        }
    }
}

/// A part of an item.
#[derive(Clone, Copy)]
struct ShorthandPart<'a> {
    annotation: &'a NetworksAnnotation<'a>,
    number: usize,
    /// The byte of the annotation at which it starts.
    at: usize,
    text: &'a str,
}

impl ShorthandPart<'_> {
    fn place(self) -> String {
        self.annotation.place(self.number, self.at)
    }

    fn reject(self, why: &str) -> Error {
        Error::new(Code::InvalidConfig, format!("{}: {why}", self.place()))
    }
}

#[cfg(test)]
mod tests {
    use crate::networks::annotations::tests::{assert_rejected, parsed};

    /// Namespace, name and interface of each element.
    fn elements(text: &str) -> Vec<(String, String, String)> {
        let selections = parsed(text).unwrap_or_else(|error| panic!("{error}"));
        assert!(selections.warnings.is_empty(), "{:?}", selections.warnings);
        let named = |s: crate::networks::Selection| (s.namespace, s.name, s.interface.unwrap_or_default());
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
            ("ä, B", "element 1 at character 1: ", "invalid name \"ä\"; expected lower-case"),
            ("a, nB", "element 2 at character 4: ", "invalid name \"nB\""),
            ("a, n / B", "element 2 at character 8: ", "invalid name \"B\""),
            ("ns/", "element 1 at character 4: ", "\"ns/\" has no name"),
            ("@eth1", "element 1 at character 1: ", "\"@eth1\" has no name"),
            ("a/b/c", "element 1 at character 1: ", "\"a/b/c\" has more than one /"),
            ("a@b/c", "element 1 at character 1: ", "invalid namespace \"a@b\""),
            ("a@b@c", "element 1 at character 1: ", "\"a@b@c\" has more than one @"),
            ("n/a@b/c", "element 1 at character 1: ", "\"n/a@b/c\" has more than one /"),
            ("n.s/a", "element 1 at character 1: ", "invalid namespace \"n.s\"; expected lower-case"),
            ("a..b", "element 1 at character 1: ", "invalid name \"a..b\""),
            ("../x", "element 1 at character 1: ", "invalid namespace \"..\""),
            ("a%2fb", "element 1 at character 1: ", "invalid name \"a%2fb\""),
            (
                "a@0123456789abcdef",
                "element 1 at character 3: ",
                "invalid interface \"0123456789abcdef\": interface name is too long",
            ),
            ("a@x y", "element 1 at character 3: ", "invalid interface \"x y\": interface name contains"),
            ("a@..", "element 1 at character 3: ", "invalid interface \"..\": interface name is . or .."),
            ("*", "element 1 at character 1: ", "invalid name \"*\""),
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
        for (text, character) in [("a, /b", 4), ("a,b@", 5)] {
            let selections = parsed(text).expect("accepted");
            assert_eq!((&*selections.elements[1].namespace, &*selections.elements[1].name), ("shop", "b"));
            assert_eq!(selections.elements[1].interface, None);
            let place = format!("element 2 at character {character}: no name");
            assert!(selections.warnings[0].contains(&place), "{:?}", selections.warnings);
        }
    }
}
