//! The format of saved state: JSON objects with a version, so that another version of this program reads
//! them or refuses them.
//!
//! A field that an older version did not write has a default. A version that adds a field, or a value of
//! one, which an older version must not ignore increases [`VERSION`]. The older version then refuses the
//! record, except to remove what the record describes.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;

/// The version of the records that this program writes. Records of 0.1.0 have none.
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

/// Why a record can't be used.
#[derive(Debug)]
pub enum Unreadable {
    /// A newer version of this program wrote it.
    Newer(u32),
    /// It is damaged.
    Json(serde_json::Error),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Newer(version) => {
                write!(f, "expected format {VERSION} or older, got {version}, which a newer version of detour wrote")
            }
            Self::Json(error) => error.fmt(f),
        }
    }
}

/// Writes a record with its version.
///
/// # Errors
/// It is no JSON object.
pub fn print<T: Serialize>(record: &T) -> Result<Vec<u8>, serde_json::Error> {
    serde_json::to_vec(&Versioned { version: VERSION, record })
}

/// Reads a record of this version or an older one.
///
/// # Errors
/// It is damaged or of a newer version.
pub fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T, Unreadable> {
    match serde_json::from_slice::<FormatVersion>(text) {
        Ok(FormatVersion { version }) if version > VERSION => Err(Unreadable::Newer(version)),
        _ => parse_part(text),
    }
}

/// Reads a part of a record that every version has.
///
/// # Errors
/// It is damaged.
pub fn parse_part<T: DeserializeOwned>(text: &[u8]) -> Result<T, Unreadable> {
    serde_json::from_slice(text).map_err(Unreadable::Json)
}

/// Reads each field that is understood; the others have their defaults.
#[must_use]
pub fn understood<T: Default + Serialize + DeserializeOwned>(fields: &Map<String, Value>) -> T {
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
    fn a_record_of_another_version_is_read_or_refused_by_its_number() {
        let two = Two { a: 1, b: "x".to_owned() };
        let text = print(&two).expect("printed");
        assert_eq!(text, br#"{"version":1,"a":1,"b":"x"}"#);
        assert_eq!(parse::<Two>(&text).expect("this version"), two);
        assert_eq!(parse::<Two>(br#"{"a":1,"b":"x"}"#).expect("0.1.0"), two);
        let newer = br#"{"version":2,"a":"y","b":"x"}"#;
        let error = parse::<Two>(newer).expect_err("newer").to_string();
        assert_eq!(error, "expected format 1 or older, got 2, which a newer version of detour wrote");
        let Ok(Value::Object(fields)) = serde_json::from_slice(newer) else { panic!("an object") };
        assert_eq!(understood::<Two>(&fields), Two { a: 0, b: "x".to_owned() });
    }
}
