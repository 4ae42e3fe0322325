//! A list that somebody wrote down, and where: what every list-valued key and annotation is
//! before its items are understood.
//!
//! A file with a configuration: a plugin's own, or a list of which one member is ours.

use super::json::{LIST_BYTES, LIST_ITEMS, at_most, excerpt};
use super::{CniCommand, Code, Error, NetConf};
use serde_json::Value;
use std::collections::HashSet;
use std::hash::Hash;
use std::path::Path;

/// The items of a list and the place they come from, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ItemList {
    /// For example `chain[0].uids` or `annotation "x" of pod a/b`.
    pub place: String,
    /// Trimmed, none empty.
    pub items: Vec<String>,
}

impl ItemList {
    /// A comma list.
    ///
    /// # Errors
    /// It is longer or has more items than a list may.
    pub fn from_text(place: impl Into<String>, text: &str) -> Result<Self, Error> {
        Self::split(place, text, ',')
    }

    /// A list with another separator.
    ///
    /// # Errors
    /// As [`Self::from_text`].
    pub fn split(place: impl Into<String>, text: &str, separator: char) -> Result<Self, Error> {
        let place = place.into();
        at_most(LIST_BYTES, "bytes", &place, text.len())?;
        let items = || text.split(separator).map(str::trim).filter(|item| !item.is_empty());
        at_most(LIST_ITEMS, "items", &place, items().count())?;
        Ok(Self { place, items: items().map(Into::into).collect() })
    }

    /// A JSON array of strings and numbers, or a comma string, or one number.
    ///
    /// # Errors
    /// Any other JSON value, or more items than a list may have.
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
                let items = items.ok_or_else(|| wrong_type(&place, value, LIST))?;
                Ok(Self { place, items: items.into_iter().filter(|i| !i.is_empty()).collect() })
            }
            _ => Err(wrong_type(&place, value, LIST)),
        }
    }

    /// Every item as `parse` understands it, in order, none twice.
    ///
    /// # Errors
    /// An item is none of `accepted`.
    pub fn distinct<T: Clone + Eq + Hash>(
        &self,
        accepted: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let (mut known, mut values) = (HashSet::new(), Vec::new());
        for item in &self.items {
            let value = parse(item).ok_or_else(|| self.reject(item, accepted))?;
            if known.insert(value.clone()) {
                values.push(value);
            }
        }
        Ok(values)
    }

    /// The error for an item that is not understood.
    #[must_use]
    pub fn reject(&self, item: &str, accepted: &str) -> Error {
        let msg = format!("{}: {:?} is not accepted; accepted: {accepted}", self.place, excerpt(item));
        Error::new(Code::InvalidConfig, msg)
    }
}

const LIST: &str = "an array of strings or numbers, or a comma-separated string";

/// The error for a value of the wrong type or out of bounds.
#[must_use]
pub fn wrong_type(place: &str, value: &Value, accepted: &str) -> Error {
    Error::new(Code::InvalidConfig, format!("{place}: {} is not accepted; accepted: {accepted}", shown(value)))
}

/// A value as messages show it: as JSON, and only the start of it.
pub(super) fn shown(value: &Value) -> String {
    excerpt(&value.to_string())
}

/// The name of the program; an executable of this name is always this plugin.
pub const PROGRAM: &str = "detour";

/// The types of a configuration that are ours.
pub const OWN_TYPES: [&str; 3] = ["detour", "istio-cni", "excludedns"];

/// Understands a plugin's configuration, or a plugin list by that of its members which is ours.
///
/// # Errors
/// It is no JSON, holds no plugin of ours or more than one, or what it says is wrong.
pub fn configuration(place: &Path, text: &[u8]) -> Result<NetConf, Error> {
    let about = |error: Error| Error { msg: format!("{}: {}", place.display(), error.msg), ..error };
    let value: Value = serde_json::from_slice(text)
        .map_err(|error| about(Error::new(Code::Decode, format!("it is not JSON: {error}"))))?;
    let Some(plugins) = value.get("plugins").and_then(Value::as_array) else {
        return NetConf::parse(text, CniCommand::Add, "detour").map_err(about);
    };
    let kind = |plugin: &&Value| plugin["type"].as_str().unwrap_or_default().to_owned();
    let ours: Vec<&Value> = plugins.iter().filter(|plugin| OWN_TYPES.contains(&kind(plugin).as_str())).collect();
    let [one] = ours[..] else {
        let types: Vec<String> = plugins.iter().map(|plugin| kind(&plugin)).collect();
        let own = OWN_TYPES.join(", ");
        let msg = format!(
            "plugins: {} of type {own}, wanted is one; the list has {}; give a file with that plugin alone",
            ours.len(),
            types.join(", ")
        );
        return Err(about(Error::new(Code::InvalidConfig, msg)));
    };
    let mut plugin = one.clone();
    for key in ["name", "cniVersion"] {
        plugin[key] = value[key].clone();
    }
    NetConf::parse(plugin.to_string().as_bytes(), CniCommand::Add, "detour").map_err(about)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_way_to_write_a_list_gives_the_same_items() {
        for value in [json!("1, 2,,"), json!(["1", " 2 ", ""]), json!([1, 2]), json!([1, "2"])] {
            assert_eq!(ItemList::from_json("k", &value).expect("a list").items, ["1", "2"], "{value}");
        }
        assert_eq!(ItemList::from_json("k", &json!(7)).expect("a list").items, ["7"]);
        assert!(ItemList::from_json("k", &json!("")).expect("a list").items.is_empty());
    }

    #[test]
    fn a_list_that_is_too_long_is_refused_by_place_and_numbers() {
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
        let error = ItemList::from_text("k", &",".repeat(LIST_BYTES + 1)).expect_err("too long");
        assert_eq!(error.msg, "k: expected at most 65536 bytes, got 65537");
    }

    #[test]
    fn an_item_that_is_refused_is_quoted_in_part() {
        let list = ItemList::from_text("k", &"x".repeat(LIST_BYTES)).expect("one item");
        let error = list.distinct("numbers", |_| None::<u32>).expect_err("no number");
        assert!(error.msg.len() < 200 && error.msg.contains("xxx…\" is not accepted; accepted: numbers"), "{error}");
    }

    #[test]
    fn what_is_no_list_is_refused_by_place_and_value() {
        let error = ItemList::from_json("chain[0].uids", &json!({"a": 1})).expect_err("an error");
        assert_eq!(error.code, Code::InvalidConfig);
        assert!(error.msg.starts_with(r#"chain[0].uids: {"a":1} is not accepted; accepted: an array"#), "{error}");
        assert!(ItemList::from_json("k", &json!([["1"]])).is_err());
    }

    fn of(value: &Value) -> Result<NetConf, Error> {
        configuration(Path::new("c"), value.to_string().as_bytes())
    }

    #[test]
    fn a_plugin_or_the_one_of_a_list_that_is_ours() {
        let plugin = of(&json!({"name": "n", "type": "istio-cni", "prevResult": {}})).expect("a plugin");
        assert_eq!((plugin.name.as_str(), plugin.kind.as_str()), ("n", "istio-cni"));
        let list = json!({"name": "l", "cniVersion": "1.0.0", "plugins": [{"type": "bridge"}, {"type": "detour"}]});
        let list = of(&list).expect("a list");
        assert_eq!((list.name.as_str(), list.cni_version.as_str(), list.chain.len()), ("l", "1.0.0", 3));
    }

    #[test]
    fn a_list_without_ours_or_with_two_is_refused_by_what_it_has() {
        for (plugins, start) in [
            (json!([{"type": "bridge"}]), "c: plugins: 0 of type detour, istio-cni, excludedns"),
            (json!([{"type": "detour"}, {"type": "istio-cni"}]), "c: plugins: 2 of type "),
        ] {
            let error = of(&json!({"name": "l", "plugins": plugins})).expect_err("refused");
            assert!(error.msg.starts_with(start) && error.msg.contains("the list has "), "{error}");
        }
        assert!(configuration(Path::new("c"), b"x").expect_err("no JSON").msg.starts_with("c: it is not JSON"));
    }
}
