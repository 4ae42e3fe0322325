//! Typed access to the keys of a JSON object, with errors that have the path of the key.

use super::error::{Code, Error};
use super::list::{ItemList, excerpt, wrong_type};
use crate::suggest::did_you_mean;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::cell::RefCell;

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
}
