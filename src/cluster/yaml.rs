//! Objects in YAML or JSON text. YAML is parsed to values only: a parser of YAML for each type would be several percent
//! of the program.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Parses YAML with any number of documents, or one JSON document. Empty documents are skipped. Errors contain no
/// snippet, because a kubeconfig has secrets.
///
/// # Errors
/// The text is neither; the error has the line.
pub(crate) fn documents(text: &str) -> Result<Vec<Value>, String> {
    // JSON is YAML too, but the JSON parser saves a tenth of a millisecond per call.
    if let Some(object) = text.starts_with('{').then(|| serde_json::from_str(text).ok()).flatten() {
        return Ok(vec![object]);
    }
    let options = serde_saphyr::options! { with_snippet: false };
    serde_saphyr::from_multiple_with_options(text, options).map_err(|error| {
        // The advice of the library is for programmers.
        error.to_string().replace(", set DuplicateKeyPolicy in Options if acceptable", "")
    })
}

/// Deserializes a value.
///
/// # Errors
/// The value does not have this type; the error names the invalid part, such as `spec.containers[0].name`, but shows no
/// value, because a kubeconfig has secrets.
pub(crate) fn typed<T: DeserializeOwned>(value: &Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let (path, cause) = (error.path().to_string(), without_value(&error.inner().to_string()));
        // The path of the value itself.
        if path == "." { cause } else { format!("{path}: {cause}") }
    })
}

/// Removes the value from an error such as `invalid type: string "a", expected u16`, and the names of Rust types.
fn without_value(error: &str) -> String {
    match error.rsplit_once(", expected ") {
        Some((found, expected)) => {
            let kind = found.split(['"', '`']).next().unwrap_or_default().trim_end();
            let expected = match expected {
                "a string" if !["map", "sequence", "null"].iter().any(|other| kind.ends_with(other)) => {
                    "a string; write the value in quotes"
                }
                object if object.starts_with("struct ") => "an object",
                expected => expected,
            };
            format!("{kind}, expected {expected}")
        }
        None => error.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only deserialized")]
    struct Object {
        name: String,
        labels: Option<BTreeMap<String, String>>,
        parts: Option<Vec<Object>>,
    }

    #[test]
    fn an_error_names_the_invalid_part() {
        for (text, error) in [
            (
                "{name: a, parts: [{name: b}, {name: c, labels: {x/y: [1]}}]}",
                "parts[1].labels.x/y: invalid type: sequence",
            ),
            ("{name: a, parts: [{name: b, parts: {}}]}", "parts[0].parts: invalid type: map"),
            ("{name: a, parts: [{}]}", "parts[0]: missing field `name`"),
            ("{labels: {}}", "missing field `name`"),
            ("hello", "invalid type: string, expected an object"),
            ("{name: a, parts: [{name: b, labels: [x]}]}", "parts[0].labels: invalid type: sequence, expected a map"),
            (
                "{name: a, labels: {x/y: 7}}",
                "labels.x/y: invalid type: integer, expected a string; write the value in quotes",
            ),
        ] {
            let document = documents(text).expect("YAML").remove(0);
            let found = typed::<Object>(&document).expect_err(text);
            assert!(found.starts_with(error), "{text}: {found}");
        }
    }

    #[test]
    fn a_text_has_any_number_of_documents() {
        for (text, count) in [("", 0), ("---\n", 0), ("a: 1\n---\nb: 1\n", 2), ("{\"a\": 1}", 1), ("{a: 1}", 1)] {
            assert_eq!(documents(text).expect(text).len(), count, "{text}");
        }
        let error = documents("a: 1\na: 2\n").expect_err("invalid");
        assert!(error.starts_with("duplicate mapping key: a at line 2") && !error.contains("Options"), "{error}");
        let error = documents("a: 1\n---\nb: c: d\n").expect_err("invalid");
        assert!(error.contains("line 3") && !error.contains("b: c"), "{error}");
    }
}
