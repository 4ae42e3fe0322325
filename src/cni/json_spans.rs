//! Spans of values in JSON text, so that a part of the text can be quoted or changed while the rest stays byte for byte.
//! The text must be valid JSON; for other text the result is incomplete, but no function panics.

use serde::de::IgnoredAny;
use serde_json::Deserializer;
use std::ops::Range;

/// A member of a JSON object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The unescaped key: `"pl\u0075gins"` is `plugins`.
    pub key: String,
    /// The span of the value.
    pub value: Range<usize>,
}

/// Returns the members of the object that starts at byte `at` or after blanks; empty if the value is not an object.
#[must_use]
pub fn members(text: &str, at: usize) -> Vec<Member> {
    let mut cursor = Cursor { text, at };
    let mut found = Vec::new();
    if cursor.take('{') {
        while let Some(member) = cursor.member() {
            found.push(member);
            if !cursor.take(',') {
                break;
            }
        }
    }
    found
}

/// Returns the spans of the elements of the array that starts at byte `at` or after blanks; empty if the value is not an
/// array.
#[must_use]
pub fn elements(text: &str, at: usize) -> Vec<Range<usize>> {
    let mut cursor = Cursor { text, at };
    let mut found = Vec::new();
    if cursor.take('[') {
        while let Some(element) = cursor.value() {
            found.push(element);
            if !cursor.take(',') {
                break;
            }
        }
    }
    found
}

struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl Cursor<'_> {
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

    fn member(&mut self) -> Option<Member> {
        let key = self.value()?;
        let key = serde_json::from_str(&self.text[key]).ok()?;
        if self.take(':') { Some(Member { key, value: self.value()? }) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    #[test]
    fn spans_cover_exactly_the_values() {
        let text = " [ {\"a\":[1,2]} ,\t\"ä]\",-1.5e3,null , [] ]\n";
        let found: Vec<_> = elements(text, 0).into_iter().map(|span| &text[span]).collect();
        assert_eq!(found, ["{\"a\":[1,2]}", "\"ä]\"", "-1.5e3", "null", "[]"]);
        let text = r#" { "a\"}" : [ 1,"],[" , {"b":[]},null ],"c":{},"\u0064": -1e5, "c":true } "#;
        let members = members(text, 0);
        let found: Vec<_> = members.iter().map(|member| (&*member.key, &text[member.value.clone()])).collect();
        let list = r#"[ 1,"],[" , {"b":[]},null ]"#;
        assert_eq!(found, [("a\"}", list), ("c", "{}"), ("d", "-1e5"), ("c", "true")]);
        let elements: Vec<_> = elements(text, members[0].value.start).into_iter().map(|span| &text[span]).collect();
        assert_eq!(elements, ["1", r#""],[""#, r#"{"b":[]}"#, "null"]);
    }

    #[test]
    fn other_values_have_neither_members_nor_elements() {
        for text in ["", "7", "\"[1]\"", "[]", "{}"] {
            assert!(elements(text, 0).is_empty() && members(text, 0).is_empty(), "{text}");
        }
        assert!(members("[1]", 0).is_empty() && elements("{\"a\":1}", 0).is_empty());
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text in "[\\[\\]{}\":, a1\\\\ä]{0,24}") {
            let spans = elements(&text, 0).len() + members(&text, 0).len();
            prop_assert!(spans <= text.len());
            if let Ok(Value::Array(items)) = serde_json::from_str(&text) {
                prop_assert_eq!(elements(&text, 0).len(), items.len());
            }
        }

        #[test]
        fn elements_are_those_of_a_parser(items in prop::collection::vec("[ -~\\n\\\\\"]{0,8}", 0..6), pretty: bool) {
            let value = serde_json::json!({ "k": items });
            let text = if pretty { format!("{value:#}") } else { value.to_string() };
            let at = members(&text, 0)[0].value.start;
            let spans = elements(&text, at).into_iter();
            let parsed: Vec<String> = spans.map(|span| serde_json::from_str(&text[span]).expect("one value")).collect();
            prop_assert_eq!(parsed, items);
        }
    }
}
