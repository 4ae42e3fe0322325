//! Where the members of a JSON text stand, so that one can be changed and all else kept byte for
//! byte. Only for text that a JSON parser has accepted.

use std::ops::Range;

/// A member of an object.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct JsonMember {
    /// What the text between its quotes means: `"pl\u0075gins"` is `plugins`.
    pub(super) key: String,
    /// From the key's quote to the end of the value.
    pub(super) whole: Range<usize>,
    pub(super) value: Range<usize>,
}

/// The members of the object that starts at or after `at`; none where no object does.
pub(super) fn members(text: &str, at: usize) -> Vec<JsonMember> {
    let mut found = Vec::new();
    let Some(mut at) = opened(text, at, b'{') else { return found };
    while text.as_bytes().get(at) == Some(&b'"') {
        let key = at..value_end(text, at);
        let value = skip(text, key.end);
        let value = value..value_end(text, value);
        at = skip(text, value.end);
        let whole = key.start..value.end;
        // A key that no parser accepts is none of those that are looked for.
        let key = serde_json::from_str(&text[key]).unwrap_or_default();
        found.push(JsonMember { key, whole, value });
    }
    found
}

/// The elements of the array that starts at or after `at`; none where no array does.
pub(super) fn elements(text: &str, at: usize) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let Some(mut at) = opened(text, at, b'[') else { return found };
    while text.as_bytes().get(at).is_some_and(|byte| *byte != b']') {
        let element = at..value_end(text, at);
        at = skip(text, element.end);
        found.push(element);
    }
    found
}

/// The first place inside, where `bracket` is what comes at `at`.
fn opened(text: &str, at: usize, bracket: u8) -> Option<usize> {
    let at = skip(text, at);
    (text.as_bytes().get(at) == Some(&bracket)).then(|| skip(text, at + 1))
}

/// The next place that holds no blank, comma or colon.
fn skip(text: &str, at: usize) -> usize {
    let passed = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | b',' | b':');
    at + text.as_bytes()[at..].iter().take_while(|byte| passed(byte)).count()
}

/// Where the value that starts at `at` ends.
fn value_end(text: &str, at: usize) -> usize {
    let bytes = text.as_bytes();
    let (mut end, mut depth, mut in_string) = (at, 0_usize, false);
    while let Some(byte) = bytes.get(end) {
        match (byte, in_string) {
            (b'\\', true) => end += 1,
            (b'"', _) => in_string = !in_string,
            (b'{' | b'[', false) => depth += 1,
            (b'}' | b']', false) if depth == 0 => return end,
            (b'}' | b']', false) => depth -= 1,
            (b' ' | b'\t' | b'\r' | b'\n' | b',' | b':', false) if depth == 0 => return end,
            _ => {}
        }
        end += 1;
        let closed = matches!(byte, b'"' | b'}' | b']') && depth == 0 && !in_string;
        if closed {
            return end;
        }
    }
    end.min(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#" { "a\"}" : [ 1,"],[" , {"b":[]},null ],"c":{},"\u0064": -1e5 } "#;

    #[test]
    fn members_and_elements_are_found_where_they_stand() {
        let members = members(TEXT, 0);
        let shown: Vec<_> = members.iter().map(|m| (m.key.as_str(), &TEXT[m.value.clone()])).collect();
        let list = r#"[ 1,"],[" , {"b":[]},null ]"#;
        assert_eq!(shown, [("a\"}", list), ("c", "{}"), ("d", "-1e5")]);
        assert_eq!(&TEXT[members[1].whole.clone()], r#""c":{}"#);
        let elements: Vec<_> = elements(TEXT, members[0].value.start).into_iter().map(|e| &TEXT[e]).collect();
        assert_eq!(elements, ["1", r#""],[""#, r#"{"b":[]}"#, "null"]);
    }

    #[test]
    fn what_is_no_object_or_array_has_no_parts() {
        for text in ["", "7", "[]", "{}", "\"x\""] {
            assert!(members(text, 0).is_empty() && elements(text, 0).is_empty(), "{text}");
        }
        assert!(members("[1]", 0).is_empty() && elements("{\"a\":1}", 0).is_empty());
    }

    proptest::proptest! {
        #[test]
        fn elements_are_what_a_parser_reads(items in proptest::collection::vec("[ -~\\n\\\\\"]{0,8}", 0..6), pretty: bool) {
            let value = serde_json::json!({ "k": items });
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) };
            let text = text.expect("JSON");
            let at = members(&text, 0)[0].value.start;
            let read: Vec<String> =
                elements(&text, at).into_iter().map(|e| serde_json::from_str(&text[e]).expect("one value")).collect();
            proptest::prop_assert_eq!(read, items);
        }
    }
}
