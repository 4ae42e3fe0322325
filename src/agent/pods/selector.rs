//! Label selectors.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// A label selector in the syntax of `kubectl -l` (apimachinery, `pkg/labels/selector.go`). An empty one selects all pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    /// `None` for any value.
    values: Option<BTreeSet<String>>,
    /// Whether the label must match, or must not.
    must_match: bool,
}

const SYNTAX: &str = "KEY=VALUE, KEY!=VALUE, KEY in (A,B), KEY notin (A,B), KEY, !KEY, separated by commas";

impl Selector {
    /// Whether the selector selects every pod.
    #[must_use]
    pub const fn selects_all(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the selector selects a pod with these labels.
    #[must_use]
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|requirement| requirement.is_met_by(labels))
    }
}

impl Requirement {
    fn is_met_by(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        self.must_match == value.is_some_and(|value| self.values.as_ref().is_none_or(|values| values.contains(value)))
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = split(text).into_iter().map(str::trim).filter(|part| !part.is_empty());
        parts.map(parse_requirement).collect::<Result<_, _>>().map(Self)
    }
}

/// Splits the text at commas that are not in parentheses.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0_i32);
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn parse_requirement(part: &str) -> Result<Requirement, String> {
    let invalid = || format!("invalid value {part:?}; expected {SYNTAX}");
    let words = |text: &str| text.split(',').map(|word| word.trim().to_owned()).collect();
    let (key, values, must_match) = if let Some((key, value)) = part.split_once("!=") {
        (key, Some(BTreeSet::from([value.trim().to_owned()])), false)
    } else if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        (key, Some(BTreeSet::from([value.trim().to_owned()])), true)
    } else if let Some((head, values)) = part.strip_suffix(')').and_then(|part| part.split_once('(')) {
        match head.trim().rsplit_once(char::is_whitespace).ok_or_else(invalid)? {
            (key, "in") => (key, Some(words(values)), true),
            (key, "notin") => (key, Some(words(values)), false),
            _ => return Err(invalid()),
        }
    } else {
        (part.trim_start_matches('!'), None, !part.starts_with('!'))
    };
    let key = key.trim();
    let is_valid = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
    if key.is_empty() || !is_valid(key) || !values.iter().flatten().all(|value| is_valid(value)) {
        return Err(invalid());
    }
    Ok(Requirement { key: key.to_owned(), values, must_match })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selects(text: &str) -> bool {
        let labels = [("app", "web"), ("tier", "front")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        text.parse::<Selector>().expect("accepted").selects(&labels.into())
    }

    #[test]
    fn every_form_of_kubectl_is_supported() {
        for text in ["", "app=web", "app == web,tier", "app!=db", "other!=x", "!other", "app in (db, web),tier=front"] {
            assert!(selects(text), "{text}");
        }
        for text in ["app=db", "other=web", "other", "!app", "app!=web", "app notin (web)", "app=web,tier=back"] {
            assert!(!selects(text), "{text}");
        }
    }

    #[test]
    fn invalid_selectors_are_refused_with_the_syntax() {
        for text in ["app in web", "=x", "app>1", "a b", "app like (x)", "app=(x"] {
            let error = text.parse::<Selector>().expect_err(text);
            assert!(error.contains("expected KEY=VALUE"), "{error}");
        }
    }
}
