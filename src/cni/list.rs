//! Lists in configurations and annotations, and the errors for invalid values.

use super::error::{Code, Error};
use serde_json::Value;
use std::collections::HashSet;
use std::fmt::Display;
use std::hash::Hash;

/// The maximum number of items of a list: of an annotation, of `args.cni`, or of a key of the configuration.
pub const LIST_ITEMS: usize = 2000;
/// The maximum length of the text of a list, in bytes.
const MAX_LIST_BYTES: usize = 64 * 1024;
/// The maximum length of a value in an error message, in characters.
const MAX_QUOTED_CHARACTERS: usize = 80;
/// The accepted JSON forms of a list, for error messages.
const LIST_FORMS: &str = "an array of strings or numbers, or a comma-separated string";

/// The items of a list, and where the list is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ItemList {
    /// The key or annotation, for messages: `chain[0].uids`, `annotation "x" of pod a/b`.
    pub place: String,
    /// The items without surrounding blanks; none is empty.
    pub items: Vec<String>,
}

impl ItemList {
    /// Parses a comma-separated list.
    ///
    /// # Errors
    /// The text is too long or has too many items.
    pub fn from_text(place: impl Into<String>, text: &str) -> Result<Self, Error> {
        Self::split(place, text, ',')
    }

    /// Parses a list with another separator.
    ///
    /// # Errors
    /// As [`Self::from_text`].
    pub fn split(place: impl Into<String>, text: &str, separator: char) -> Result<Self, Error> {
        let place = place.into();
        at_most(MAX_LIST_BYTES, "bytes", &place, text.len())?;
        let items = || text.split(separator).map(str::trim).filter(|item| !item.is_empty());
        at_most(LIST_ITEMS, "items", &place, items().count())?;
        Ok(Self { place, items: items().map(Into::into).collect() })
    }

    /// Parses a JSON array of strings and numbers, a comma-separated string, or a number.
    ///
    /// # Errors
    /// The value is of another type or has too many items.
    pub fn from_json(place: impl Into<String>, value: &Value) -> Result<Self, Error> {
        let place = place.into();
        let item = |v: &Value| match v {
            Value::String(s) => Some(s.trim().to_owned()),
            Value::Number(n) => Some(n.to_string()),
            _ => None,
        };
        match value {
            Value::String(text) => Self::from_text(place, text),
            Value::Number(number) => Ok(Self { place, items: vec![number.to_string()] }),
            Value::Array(array) => {
                at_most(LIST_ITEMS, "items", &place, array.len())?;
                let items: Option<Vec<String>> = array.iter().map(item).collect();
                let items = items.ok_or_else(|| wrong_type(&place, value, LIST_FORMS))?;
                Ok(Self { place, items: items.into_iter().filter(|item| !item.is_empty()).collect() })
            }
            _ => Err(wrong_type(&place, value, LIST_FORMS)),
        }
    }

    /// Parses each item with `parse` and returns the values in order, without duplicates.
    ///
    /// # Errors
    /// `parse` returns `None` for an item; `expected` describes valid items.
    pub fn distinct<T: Clone + Eq + Hash>(
        &self,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let mut seen = HashSet::with_capacity(self.items.len());
        Ok(self.all(expected, parse)?.into_iter().filter(|value| seen.insert(value.clone())).collect())
    }

    /// Parses each item with `parse` and returns the values in order, with duplicates.
    ///
    /// # Errors
    /// As [`Self::distinct`].
    pub fn all<T>(&self, expected: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, Error> {
        self.items.iter().map(|item| parse(item).ok_or_else(|| self.reject(item, expected))).collect()
    }

    /// Returns the error for an invalid item.
    #[must_use]
    pub fn reject(&self, item: &str, expected: &str) -> Error {
        let msg = format!("{}: invalid value {:?}; expected {expected}", self.place, excerpt(item));
        Error::new(Code::InvalidConfig, msg)
    }
}

/// Returns the error for a value of the wrong type or out of bounds.
#[must_use]
pub fn wrong_type(place: &str, value: &Value, expected: &str) -> Error {
    Error::new(Code::InvalidConfig, format!("{place}: invalid value {}; expected {expected}", quoted(value)))
}

/// Checks that the value at `place` has at most `limit` items of the kind `what`.
///
/// # Errors
/// [`Code::InvalidConfig`] with the place, the limit and the number.
pub fn at_most(limit: usize, what: &str, place: impl Display, got: usize) -> Result<(), Error> {
    if got <= limit {
        return Ok(());
    }
    Err(Error::new(Code::InvalidConfig, format!("{place}: expected at most {limit} {what}, got {got}")))
}

/// Returns a JSON parser's error in the words of a user.
#[must_use]
pub fn json_error(error: &serde_json::Error) -> String {
    error.to_string().replace("key must be a string", "expected a key in double quotes")
}

/// Returns the start of `text` that error messages quote.
#[must_use]
pub fn excerpt(text: &str) -> String {
    match text.char_indices().nth(MAX_QUOTED_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Returns a value as error messages quote it: the start of its JSON text.
pub(super) fn quoted(value: &Value) -> String {
    excerpt(&value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn all_forms_of_a_list_give_the_same_items() {
        for value in [json!("1, 2,,"), json!(["1", " 2 ", ""]), json!([1, 2]), json!([1, "2"])] {
            assert_eq!(ItemList::from_json("k", &value).expect("a list").items, ["1", "2"], "{value}");
        }
        assert_eq!(ItemList::from_json("k", &json!(7)).expect("a list").items, ["7"]);
        assert!(ItemList::from_json("k", &json!("")).expect("a list").items.is_empty());
    }

    #[test]
    fn the_error_for_a_list_that_is_too_long_has_its_place_and_the_limit() {
        let items = |n: usize| vec!["1"; n];
        for value in [json!(items(LIST_ITEMS)), json!(items(LIST_ITEMS).join(","))] {
            assert_eq!(ItemList::from_json("k", &value).expect("a list").items.len(), LIST_ITEMS);
        }
        for value in [json!(items(LIST_ITEMS + 1)), json!(items(LIST_ITEMS + 1).join(","))] {
            let wanted = format!("k: expected at most {LIST_ITEMS} items, got {}", LIST_ITEMS + 1);
            assert_eq!(
                ItemList::from_json("k", &value).expect_err("too long"),
                Error::new(Code::InvalidConfig, wanted)
            );
        }
        let error = ItemList::from_text("k", &",".repeat(MAX_LIST_BYTES + 1)).expect_err("too long");
        assert_eq!(error.msg, "k: expected at most 65536 bytes, got 65537");
    }

    #[test]
    fn a_long_invalid_item_is_quoted_in_part() {
        let list = ItemList::from_text("k", &"x".repeat(MAX_LIST_BYTES)).expect("one item");
        let error = list.distinct("numbers", |_| None::<u32>).expect_err("no number");
        assert!(error.msg.len() < 200 && error.msg.contains("xxx…\"; expected numbers"), "{error}");
    }

    #[test]
    fn the_error_for_a_value_that_is_not_a_list_has_its_place_and_value() {
        let error = ItemList::from_json("chain[0].uids", &json!({"a": 1})).expect_err("an error");
        assert_eq!(error.code, Code::InvalidConfig);
        assert!(error.msg.starts_with(r#"chain[0].uids: invalid value {"a":1}; expected an array"#), "{error}");
        assert!(ItemList::from_json("k", &json!([["1"]])).is_err());
    }

    #[test]
    fn the_error_for_a_count_over_the_limit_has_both_numbers() {
        assert_eq!(at_most(2, "items", "k", 2), Ok(()));
        let error = at_most(2, "items", "k", 3).expect_err("too many");
        assert_eq!(error, Error::new(Code::InvalidConfig, "k: expected at most 2 items, got 3"));
    }

    #[test]
    fn excerpts_end_between_characters() {
        assert_eq!(excerpt("short"), "short");
        let long = "ä".repeat(100_000);
        assert_eq!(excerpt(&long), "ä".repeat(MAX_QUOTED_CHARACTERS) + "…");
    }
}
