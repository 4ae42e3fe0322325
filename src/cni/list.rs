//! A list that somebody wrote down, and where: what every list-valued key and annotation is
//! before its items are understood.

use super::{Code, Error};
use serde_json::Value;

/// The items of a list and the place they come from, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List {
    /// For example `chain[0].uids` or `annotation "x" of pod a/b`.
    pub place: String,
    /// Trimmed, none empty.
    pub items: Vec<String>,
}

impl List {
    /// A comma list.
    pub fn from_text(place: impl Into<String>, text: &str) -> Self {
        Self::split(place, text, ',')
    }

    /// A list with another separator.
    pub fn split(place: impl Into<String>, text: &str, separator: char) -> Self {
        let items = text.split(separator).map(str::trim).filter(|i| !i.is_empty()).map(Into::into).collect();
        Self { place: place.into(), items }
    }

    /// A JSON array of strings and numbers, or a comma string, or one number.
    ///
    /// # Errors
    /// Any other JSON value.
    pub fn from_json(place: impl Into<String>, value: &Value) -> Result<Self, Error> {
        let place = place.into();
        let item = |v: &Value| match v {
            Value::String(s) => Some(s.trim().to_owned()),
            Value::Number(n) => Some(n.to_string()),
            _ => None,
        };
        match value {
            Value::String(text) => Ok(Self::from_text(place, text)),
            Value::Number(number) => Ok(Self { place, items: vec![number.to_string()] }),
            Value::Array(array) => {
                let items: Option<Vec<String>> = array.iter().map(item).collect();
                let items = items.ok_or_else(|| wrong_type(&place, value, LIST))?;
                Ok(Self { place, items: items.into_iter().filter(|i| !i.is_empty()).collect() })
            }
            _ => Err(wrong_type(&place, value, LIST)),
        }
    }

    /// The error for an item that is not understood.
    #[must_use]
    pub fn reject(&self, item: &str, accepted: &str) -> Error {
        Error::new(Code::InvalidConfig, format!("{}: {item:?} is not accepted; accepted: {accepted}", self.place))
    }
}

const LIST: &str = "an array of strings or numbers, or a comma-separated string";

/// The error for a value of the wrong type or out of bounds.
#[must_use]
pub fn wrong_type(place: &str, value: &Value, accepted: &str) -> Error {
    Error::new(Code::InvalidConfig, format!("{place}: {} is not accepted; accepted: {accepted}", shown(value)))
}

/// A value as messages show it: as JSON, and at most 80 characters of it.
pub(super) fn shown(value: &Value) -> String {
    let mut shown = value.to_string();
    if let Some((end, _)) = shown.char_indices().nth(80) {
        shown.truncate(end);
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_way_to_write_a_list_gives_the_same_items() {
        for value in [json!("1, 2,,"), json!(["1", " 2 ", ""]), json!([1, 2]), json!([1, "2"])] {
            assert_eq!(List::from_json("k", &value).expect("a list").items, ["1", "2"], "{value}");
        }
        assert_eq!(List::from_json("k", &json!(7)).expect("a list").items, ["7"]);
        assert!(List::from_json("k", &json!("")).expect("a list").items.is_empty());
    }

    #[test]
    fn what_is_no_list_is_refused_by_place_and_value() {
        let error = List::from_json("chain[0].uids", &json!({"a": 1})).expect_err("an error");
        assert_eq!(error.code, Code::InvalidConfig);
        assert!(error.msg.starts_with(r#"chain[0].uids: {"a":1} is not accepted; accepted: an array"#), "{error}");
        assert!(List::from_json("k", &json!([["1"]])).is_err());
    }
}
