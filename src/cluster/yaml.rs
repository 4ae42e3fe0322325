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

<<<<<<< HEAD
/// Returns the path of the smallest part that makes `value` invalid.
fn invalid_part(mut value: Value, is_valid: &dyn Fn(&Value) -> bool) -> String {
    let (mut path, mut pointer, mut attempts) = (String::new(), String::new(), 0);
    loop {
        // The name of the part in the path, and its key or index in `value`.
        let part = match value.pointer(&pointer) {
            Some(Value::Object(keys)) => {
                let keys: Vec<String> = keys.keys().take(MAX_ATTEMPTS).cloned().collect();
                keys.into_iter().find_map(|key| {
                    let removed = value.pointer_mut(&pointer)?.as_object_mut()?.remove(&key)?;
                    attempts += 1;
                    let mut is_cause = attempts <= MAX_ATTEMPTS && is_valid(&value);
                    // The object may require this part, of which only a part is invalid.
                    let parts = removed.as_object().filter(|_| !is_cause).cloned().unwrap_or_default();
                    for part in parts.keys() {
                        let mut others = parts.clone();
                        others.remove(part);
                        value.pointer_mut(&pointer)?.as_object_mut()?.insert(key.clone(), others.into());
                        attempts += 1;
                        is_cause |= attempts <= MAX_ATTEMPTS && is_valid(&value);
                        if is_cause || attempts > MAX_ATTEMPTS {
                            break;
                        }
                    }
                    value.pointer_mut(&pointer)?.as_object_mut()?.insert(key.clone(), removed);
                    let dot = if path.is_empty() { "" } else { "." };
                    let inner = format!("{pointer}/{}", key.replace('~', "~0").replace('/', "~1"));
                    is_cause.then(|| (format!("{dot}{key}"), inner))
                })
            }
            Some(Value::Array(_)) => {
                let elements = value.pointer_mut(&pointer).map(Value::take);
                *value.pointer_mut(&pointer).unwrap_or(&mut Value::Null) = json!([]);
                // Otherwise the list itself is invalid.
                let elements = elements.as_ref().filter(|_| is_valid(&value)).and_then(Value::as_array);
                elements.into_iter().flatten().take(MAX_ATTEMPTS).enumerate().find_map(|(index, element)| {
                    *value.pointer_mut(&pointer)? = json!([element]);
                    attempts += 1;
                    let is_cause = attempts <= MAX_ATTEMPTS && !is_valid(&value);
                    is_cause.then(|| (format!("[{index}]"), format!("{pointer}/0")))
                })
            }
            _ => None,
        };
        let Some((name, inner)) = part else { return path };
        path.push_str(&name);
        pointer = inner;
    }
}

=======
>>>>>>> w6-c
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

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only deserialized")]
    struct Whole {
        part: Object,
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
<<<<<<< HEAD
    fn an_error_names_a_part_of_a_required_part() {
        let document = json!({"part": {"name": "b", "labels": {"x": true}}});
        let found = typed::<Whole>(&document).expect_err("a boolean");
        assert_eq!(found, "part.labels.x: invalid type: boolean, expected a string; write the value in quotes");
    }

    #[test]
    fn the_search_for_the_invalid_part_is_limited() {
        let parts: Vec<Value> = (0..2 * MAX_ATTEMPTS).map(|_| json!({"name": "a"})).chain([json!(1)]).collect();
        let found = typed::<Object>(&json!({"name": "a", "parts": parts})).expect_err("a number");
        assert!(found.starts_with("parts: invalid type: integer, expected"), "{found}");
    }

    #[test]
=======
>>>>>>> w6-c
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
