//! Typed access to the keys of a JSON object, with errors that have the path of the key, and lists of values.

use super::error::{Code, Error};
use crate::cni::did_you_mean;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt::Display;
use std::hash::Hash;

/// The number of read keys that a reader has room for from the start: those of a block `istio-redirect`.
const READ_KEYS: usize = 32;

/// A JSON object of a configuration, with its path.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct Block {
    /// The path in messages: `chain[0]`, `args.cni.uid-exclude`; empty at the top level.
    pub path: String,
    /// The keys, including `type`.
    pub keys: Map<String, Value>,
}

impl Block {
    /// Returns the object at `path`.
    ///
    /// # Errors
    /// `value` is not an object.
    pub fn new(path: impl Into<String>, value: &Value) -> Result<Self, Error> {
        let path = path.into();
        let keys = object(&path, value)?.clone();
        Ok(Self { path, keys })
    }

    /// Returns the `type`; empty if it is not a string.
    #[must_use]
    pub fn kind(&self) -> &str {
        self.keys.get("type").and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns a reader of the keys.
    #[must_use]
    pub fn reader(&self) -> BlockReader<'_> {
        BlockReader::of_keys(Cow::Borrowed(&self.path), &self.keys)
    }
}

fn object<'a>(path: &str, value: &'a Value) -> Result<&'a Map<String, Value>, Error> {
    value.as_object().ok_or_else(|| wrong_type(path, value, "an object"))
}

/// Reads the keys of a JSON object and records which were read. A key with the JSON value `null` counts as absent.
#[derive(Debug)]
pub struct BlockReader<'a> {
    path: Cow<'a, str>,
    keys: &'a Map<String, Value>,
    read: RefCell<Vec<&'static str>>,
}

impl<'a> BlockReader<'a> {
    /// Returns a reader of the object `value` at `path`.
    ///
    /// # Errors
    /// `value` is not an object.
    pub fn new(path: impl Into<Cow<'a, str>>, value: &'a Value) -> Result<Self, Error> {
        let path = path.into();
        let keys = object(&path, value)?;
        Ok(Self::of_keys(path, keys))
    }

    pub(super) fn of_keys(path: Cow<'a, str>, keys: &'a Map<String, Value>) -> Self {
        Self { path, keys, read: RefCell::new(Vec::with_capacity(READ_KEYS)) }
    }

    /// Returns all keys of the object with their values.
    pub const fn all(&self) -> &'a Map<String, Value> {
        self.keys
    }

    /// Returns the value of a key.
    pub fn value(&self, key: &'static str) -> Option<&'a Value> {
        self.read.borrow_mut().push(key);
        // Blocks have few keys: comparing them takes less time than a hash.
        let (_, value) = self.keys.iter().find(|(name, _)| *name == key)?;
        (!value.is_null()).then_some(value)
    }

    /// Returns the path of a key, for messages.
    #[must_use]
    pub fn place(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn typed<T>(
        &self,
        key: &'static str,
        expected: impl FnOnce() -> String,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.value(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| wrong_type(&self.place(key), value, &expected()))
    }

    /// Reads a string.
    ///
    /// # Errors
    /// The value has another type.
    pub fn string(&self, key: &'static str) -> Result<Option<&'a str>, Error> {
        self.typed(key, || "a string".to_owned(), Value::as_str)
    }

    /// Reads a boolean.
    ///
    /// # Errors
    /// The value has another type.
    pub fn boolean(&self, key: &'static str) -> Result<Option<bool>, Error> {
        self.typed(key, || "true or false".to_owned(), Value::as_bool)
    }

    /// Reads an integer from `min` to `max`; a string of digits is also accepted.
    ///
    /// # Errors
    /// The value has another type or is out of bounds.
    pub fn number(&self, key: &'static str, min: u32, max: u32) -> Result<Option<u32>, Error> {
        self.typed(
            key,
            || format!("a whole number from {min} to {max}"),
            |value| {
                let number = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())?;
                u32::try_from(number).ok().filter(|n| (min..=max).contains(n))
            },
        )
    }

    /// Reads a port, 1 to 65535.
    ///
    /// # Errors
    /// The value has another type or is out of bounds.
    pub fn port(&self, key: &'static str) -> Result<Option<u16>, Error> {
        Ok(self.number(key, 1, u32::from(u16::MAX))?.and_then(|n| u16::try_from(n).ok()))
    }

    /// Reads one of the names in `choices` and returns its value.
    ///
    /// # Errors
    /// The value is not a string or not one of the names.
    pub fn one_of<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Result<Option<T>, Error> {
        let names = || choices.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        self.typed(
            key,
            || format!("one of {}", names()),
            |value| {
                let text = value.as_str()?;
                choices.iter().find(|(name, _)| *name == text).map(|(_, choice)| *choice)
            },
        )
    }

    /// Reads a list; an empty one is `Some`.
    ///
    /// # Errors
    /// The value is neither an array of strings or numbers nor a string.
    pub fn list(&self, key: &'static str) -> Result<Option<ItemList>, Error> {
        self.value(key).map(|value| ItemList::from_json(self.place(key), value)).transpose()
    }

    /// Returns a reader of the object under a key.
    ///
    /// # Errors
    /// The value is not an object.
    pub fn block(&self, key: &'static str) -> Result<Option<Self>, Error> {
        self.value(key).map(|value| Self::new(self.place(key), value)).transpose()
    }

    /// Returns the keys that were not read.
    #[must_use]
    pub fn unknown(&self) -> Vec<&'a str> {
        let read = self.read.borrow();
        self.keys.keys().map(String::as_str).filter(|key| !read.contains(key)).collect()
    }

    /// Returns the keys that were read, sorted, without duplicates.
    #[must_use]
    pub fn known(&self) -> Vec<&'static str> {
        let mut known = self.read.borrow().clone();
        known.sort_unstable();
        known.dedup();
        known
    }

    /// Checks that all keys were read.
    ///
    /// # Errors
    /// A key was not read, so it is unknown.
    pub fn finish(self) -> Result<(), Error> {
        let unknown = self.unknown();
        let Some(first) = unknown.first() else { return Ok(()) };
        let (place, known) = (self.place(&excerpt(first)), self.known());
        let suggestion = did_you_mean(first, known.iter().copied());
        let end = if suggestion.is_empty() { ";" } else { "" };
        let msg = format!("{place}: unknown key{suggestion}{end} expected one of {}", known.join(", "));
        Err(Error::new(Code::InvalidConfig, msg))
    }
}

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

    fn block(value: Value) -> Block {
        Block::new("chain[1]", &value).expect("an object")
    }

    #[test]
    fn keys_are_read_with_their_types() {
        let b = block(json!({"s": "x", "n": 7, "digits": "8", "t": true, "w": "b", "l": [1], "null": null}));
        let r = b.reader();
        assert_eq!(r.string("s").expect("s"), Some("x"));
        assert_eq!(r.number("n", 1, 9).expect("n"), Some(7));
        assert_eq!(r.port("digits").expect("digits"), Some(8));
        assert_eq!(r.boolean("t").expect("t"), Some(true));
        assert_eq!(r.one_of("w", &[("a", 1), ("b", 2)]).expect("w"), Some(2));
        assert_eq!(r.list("l").expect("l").expect("a list").items, ["1"]);
        assert_eq!(r.string("null").expect("null"), None);
        assert_eq!(r.string("absent").expect("absent"), None);
        r.finish().expect("nothing unknown");
    }

    #[test]
    fn errors_have_the_path_and_the_expected_values() {
        let b = block(json!({"n": 70000, "w": "z", "zz": 1}));
        let r = b.reader();
        let error = r.port("n").expect_err("out of bounds");
        assert_eq!(error.msg, "chain[1].n: invalid value 70000; expected a whole number from 1 to 65535");
        let error = r.one_of("w", &[("a", 1), ("b", 2)]).expect_err("no such word");
        assert_eq!(error.msg, r#"chain[1].w: invalid value "z"; expected one of a, b"#);
        let error = r.finish().expect_err("unknown");
        assert_eq!(error.msg, "chain[1].zz: unknown key; expected one of n, w");
        assert_eq!(error.code, Code::InvalidConfig);
        let b = block(json!({"proxy_prot": 1}));
        let r = b.reader();
        r.port("proxy_port").expect("absent");
        let error = r.finish().expect_err("unknown");
        assert_eq!(
            error.msg,
            "chain[1].proxy_prot: unknown key; did you mean \"proxy_port\"? expected one of proxy_port"
        );
    }

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
