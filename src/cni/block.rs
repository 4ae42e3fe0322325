//! A JSON object of the configuration with its key path: read key by key, each with the type it
//! must have; what nobody asked for is an error that lists what is accepted.

use super::list::wrong_type;
use super::{Code, Error, ItemList, excerpt};
use crate::suggest::did_you_mean;
use serde_json::{Map, Value};
use std::cell::RefCell;

/// A sub-plugin's configuration, not yet understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Where it stands, for messages: `chain[0]`, `args.cni.uid-exclude`; empty at the top level.
    pub path: String,
    /// Its keys, `type` included.
    pub keys: Map<String, Value>,
}

impl Block {
    /// The object at `path`.
    ///
    /// # Errors
    /// `value` is not an object.
    pub fn new(path: impl Into<String>, value: &Value) -> Result<Self, Error> {
        let path = path.into();
        match value {
            Value::Object(keys) => Ok(Self { path, keys: keys.clone() }),
            _ => Err(wrong_type(&path, value, "an object")),
        }
    }

    /// Starts reading.
    #[must_use]
    pub fn reader(&self) -> BlockReader<'_> {
        BlockReader { block: self, asked: RefCell::default() }
    }
}

/// Reads the keys of a [`Block`] and remembers which were asked for. A key whose value is JSON
/// `null` counts as absent.
#[derive(Debug)]
pub struct BlockReader<'a> {
    block: &'a Block,
    asked: RefCell<Vec<&'static str>>,
}

impl<'a> BlockReader<'a> {
    /// The raw value.
    pub fn value(&self, key: &'static str) -> Option<&'a Value> {
        self.asked.borrow_mut().push(key);
        self.block.keys.get(key).filter(|v| !v.is_null())
    }

    /// The key's path, for messages.
    #[must_use]
    pub fn place(&self, key: &str) -> String {
        if self.block.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.block.path) }
    }

    fn typed<T>(
        &self,
        key: &'static str,
        accepted: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.value(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| wrong_type(&self.place(key), value, accepted))
    }

    /// A string.
    ///
    /// # Errors
    /// The value is something else.
    pub fn string(&self, key: &'static str) -> Result<Option<&'a str>, Error> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A boolean.
    ///
    /// # Errors
    /// The value is something else.
    pub fn boolean(&self, key: &'static str) -> Result<Option<bool>, Error> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A whole number between `min` and `max`, both included; a string of digits will do.
    ///
    /// # Errors
    /// The value is something else or out of bounds.
    pub fn number(&self, key: &'static str, min: u32, max: u32) -> Result<Option<u32>, Error> {
        self.typed(key, &format!("a whole number from {min} to {max}"), |value| {
            let number = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())?;
            u32::try_from(number).ok().filter(|n| (min..=max).contains(n))
        })
    }

    /// A port, 1 to 65535.
    ///
    /// # Errors
    /// The value is something else or out of bounds.
    pub fn port(&self, key: &'static str) -> Result<Option<u16>, Error> {
        Ok(self.number(key, 1, u32::from(u16::MAX))?.and_then(|n| u16::try_from(n).ok()))
    }

    /// One of a few words; the first matching pair's value.
    ///
    /// # Errors
    /// The value is no string or none of the words.
    pub fn one_of<T: Copy>(&self, key: &'static str, words: &[(&str, T)]) -> Result<Option<T>, Error> {
        let accepted = words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
        self.typed(key, &accepted, |value| {
            let text = value.as_str()?;
            words.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning)
        })
    }

    /// A list. One that is written down and empty is `Some`.
    ///
    /// # Errors
    /// The value is neither an array of strings or numbers nor a string.
    pub fn list(&self, key: &'static str) -> Result<Option<ItemList>, Error> {
        self.value(key).map(|value| ItemList::from_json(self.place(key), value)).transpose()
    }

    /// An object within.
    ///
    /// # Errors
    /// The value is not an object.
    pub fn block(&self, key: &'static str) -> Result<Option<Block>, Error> {
        self.value(key).map(|value| Block::new(self.place(key), value)).transpose()
    }

    /// Keys that nobody asked for.
    #[must_use]
    pub fn unknown(&self) -> Vec<&'a str> {
        let asked = self.asked.borrow();
        self.block.keys.keys().map(String::as_str).filter(|key| !asked.contains(key)).collect()
    }

    /// Keys that were asked for, sorted, none twice.
    #[must_use]
    pub fn asked(&self) -> Vec<&'static str> {
        let mut asked = self.asked.borrow().clone();
        asked.sort_unstable();
        asked.dedup();
        asked
    }

    /// What stands under the keys that nobody asked for.
    #[must_use]
    pub fn others(&self) -> Map<String, Value> {
        self.unknown().into_iter().filter_map(|key| Some((key.to_owned(), self.block.keys.get(key)?.clone()))).collect()
    }

    /// Ends reading.
    ///
    /// # Errors
    /// There are keys that nobody asked for.
    pub fn finish(self) -> Result<(), Error> {
        let unknown = self.unknown();
        let Some(first) = unknown.first() else { return Ok(()) };
        let (place, accepted) = (self.place(&excerpt(first)), self.asked());
        let meant = did_you_mean(first, accepted.iter().copied());
        let msg = format!("{place}: unknown key; accepted: {}{meant}", accepted.join(", "));
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
    fn each_key_has_its_type() {
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
    fn errors_name_the_path_and_what_is_accepted() {
        let b = block(json!({"n": 70000, "w": "z", "zz": 1}));
        let r = b.reader();
        let error = r.port("n").expect_err("out of bounds");
        assert_eq!(error.msg, "chain[1].n: 70000 is not accepted; accepted: a whole number from 1 to 65535");
        let error = r.one_of("w", &[("a", 1), ("b", 2)]).expect_err("no such word");
        assert_eq!(error.msg, r#"chain[1].w: "z" is not accepted; accepted: a, b"#);
        let error = r.finish().expect_err("unknown");
        assert_eq!(error.msg, "chain[1].zz: unknown key; accepted: n, w");
        assert_eq!(error.code, Code::InvalidConfig);
        let b = block(json!({"proxy_prot": 1}));
        let r = b.reader();
        r.port("proxy_port").expect("absent");
        let error = r.finish().expect_err("unknown");
        assert_eq!(error.msg, "chain[1].proxy_prot: unknown key; accepted: proxy_port; did you mean \"proxy_port\"?");
    }
}
