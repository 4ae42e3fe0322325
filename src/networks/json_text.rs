//! Where in JSON text each element of an array and each member of an object stands.

use serde::de::IgnoredAny;
use serde_json::Deserializer;
use std::ops::Range;

/// The spans of an array's elements, in `text`, which must be JSON; empty where it is no array.
pub(super) fn elements(text: &str) -> Vec<Range<usize>> {
    let mut rest = JsonCursor { text, at: 0 };
    let mut found = Vec::new();
    if rest.take('[') {
        while let Some(element) = rest.value() {
            found.push(element);
            if !rest.take(',') {
                break;
            }
        }
    }
    found
}

/// The names of an object's members and the spans of their values, in `text`, which must be JSON;
/// empty where it is no object.
pub(super) fn members(text: &str) -> Vec<(String, Range<usize>)> {
    let mut rest = JsonCursor { text, at: 0 };
    let mut found = Vec::new();
    if rest.take('{') {
        while let Some(member) = rest.member() {
            found.push(member);
            if !rest.take(',') {
                break;
            }
        }
    }
    found
}

/// What is not read yet.
struct JsonCursor<'a> {
    text: &'a str,
    at: usize,
}

impl JsonCursor<'_> {
    fn skip_blanks(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start_matches([' ', '\t', '\r', '\n']).len();
    }

    fn take(&mut self, wanted: char) -> bool {
        self.skip_blanks();
        let found = self.text[self.at..].starts_with(wanted);
        self.at += if found { wanted.len_utf8() } else { 0 };
        found
    }

    fn value(&mut self) -> Option<Range<usize>> {
        self.skip_blanks();
        let start = self.at;
        let mut values = Deserializer::from_str(&self.text[start..]).into_iter::<IgnoredAny>();
        values.next()?.ok()?;
        self.at = start + values.byte_offset();
        Some(start..self.at)
    }

    fn member(&mut self) -> Option<(String, Range<usize>)> {
        let name = self.value()?;
        let name = serde_json::from_str(&self.text[name]).ok()?;
        if self.take(':') { Some((name, self.value()?)) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    #[test]
    fn spans_hold_exactly_the_values() {
        let text = " [ {\"a\":[1,2]} ,\t\"ä]\",-1.5e3,null , [] ]\n";
        let found: Vec<_> = elements(text).into_iter().map(|span| &text[span]).collect();
        assert_eq!(found, ["{\"a\":[1,2]}", "\"ä]\"", "-1.5e3", "null", "[]"]);
        let text = "{ \"a\" : {\"b\":1} , \"\\u0062\":2,\"a\":true}";
        let found: Vec<_> = members(text).into_iter().map(|(name, span)| (name, &text[span])).collect();
        assert_eq!(found, [("a".into(), "{\"b\":1}"), ("b".into(), "2"), ("a".into(), "true")]);
    }

    #[test]
    fn what_is_neither_has_none() {
        for text in ["", "7", "\"[1]\"", "[]", "{}"] {
            assert!(elements(text).is_empty() && members(text).is_empty(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_survived(text in "[\\[\\]{}\":, a1\\\\ä]{0,24}") {
            let spans = elements(&text).len() + members(&text).len();
            prop_assert!(spans <= text.len());
            if let Ok(Value::Array(items)) = serde_json::from_str(&text) {
                prop_assert_eq!(elements(&text).len(), items.len());
            }
        }
    }
}
