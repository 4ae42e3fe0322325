//! The format of saved state: JSON objects with a version number.
//!
//! A field that an older version did not write gets its default. [`VERSION`] increases when a new field, or a
//! new value of a field, must not be ignored by older versions. An older version then refuses the record, except
//! to remove what the record describes.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::io;

/// The version of the records that this program writes. The first records had no version.
pub const VERSION: u32 = 1;

#[derive(Deserialize)]
struct FormatVersion {
    #[serde(default)]
    version: u32,
}

#[derive(Serialize)]
struct Versioned<'a, T> {
    version: u32,
    #[serde(flatten)]
    record: &'a T,
}

/// Serializes a record with its version.
///
/// # Errors
/// The record is not a JSON object.
pub fn print<T: Serialize>(record: &T) -> io::Result<Vec<u8>> {
    Ok(serde_json::to_vec(&Versioned { version: VERSION, record })?)
}

/// Parses a record of this version or an older one.
///
/// # Errors
/// The record is damaged or of a newer version.
pub fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    match serde_json::from_slice::<FormatVersion>(text) {
        Ok(FormatVersion { version }) if version > VERSION => {
            Err(format!("expected format {VERSION} or older, got {version}, written by a newer version of detour"))
        }
        _ => parse_part(text),
    }
}

/// Parses the part of a record that every version has.
///
/// # Errors
/// The record is damaged.
pub fn parse_part<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    serde_json::from_slice(text).map_err(|error| error.to_string())
}

/// Returns the fields that this version can parse; the others have their defaults.
#[must_use]
pub fn parse_known_fields<T: Default + Serialize + DeserializeOwned>(fields: &Map<String, Value>) -> T {
    let Ok(Value::Object(mut all)) = serde_json::to_value(T::default()) else { return T::default() };
    for (key, value) in fields {
        let default = all.insert(key.clone(), value.clone());
        if T::deserialize(&Value::Object(all.clone())).is_err() {
            match default {
                Some(default) => drop(all.insert(key.clone(), default)),
                None => drop(all.remove(key)),
            }
        }
    }
    T::deserialize(&Value::Object(all)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    struct Two {
        a: u32,
        b: String,
    }

    #[test]
    fn records_of_older_versions_are_read_and_of_newer_ones_refused() {
        let two = Two { a: 1, b: "x".to_owned() };
        let text = print(&two).expect("printed");
        assert_eq!(text, br#"{"version":1,"a":1,"b":"x"}"#);
        assert_eq!(parse::<Two>(&text).expect("this version"), two);
        assert_eq!(parse::<Two>(br#"{"a":1,"b":"x"}"#).expect("no version"), two);
        let newer = br#"{"version":2,"a":"y","b":"x"}"#;
        let error = parse::<Two>(newer).expect_err("newer");
        assert_eq!(error, "expected format 1 or older, got 2, written by a newer version of detour");
        let Ok(Value::Object(fields)) = serde_json::from_slice(newer) else { panic!("an object") };
        assert_eq!(parse_known_fields::<Two>(&fields), Two { a: 0, b: "x".to_owned() });
    }
}
