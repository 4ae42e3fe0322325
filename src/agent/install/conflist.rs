//! The configuration list of a cluster network (a CNI conflist), to which the plugin's entry is added, and from which it
//! is removed. The order of keys stays the same, the formatting does not.

use super::record::Digest;
use crate::cni::{CNI_CONF_DIR, ONLY_INLINED, excerpt, version};
use serde_json::{Map, Value};
use std::mem;

/// The suffix of the names of configuration lists.
const LIST_SUFFIX: &str = ".conflist";
/// The key of the plugins in a list.
const PLUGINS: &str = "plugins";

/// Why the plugin's entry can't be added to a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnusableList {
    /// Runtimes skip the file too, or it configures no pod network (libcni, `NetworkConfFromBytes` and `ConfFromBytes`).
    #[error("{0}")]
    Invalid(String),
    /// Runtimes may use the file, so that another list would change the network of the pods.
    #[error("{0}")]
    Unsupported(String),
    /// Multus generates its file from the cluster network's, which would drop the entry.
    #[error("configuration of Multus; the plugin belongs in the cluster network's file, which Multus calls")]
    Multus,
}

/// A configuration list that a runtime would accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfList {
    /// All keys, in their order; that of the plugins has no value here.
    keys: Map<String, Value>,
    plugins: Vec<Value>,
}

impl ConfList {
    /// Parses a file of a directory that runtimes read: a list, or a single plugin, which becomes a list of the same name
    /// and version. Both are part of the state that the plugin and its IPAM plugin save on the node. Beside a single plugin,
    /// runtimes ignore the files in the directory of the network's name; the list tells them to ignore them too.
    ///
    /// # Errors
    /// A runtime would reject the file, or it has a feature that this parser does not support.
    pub fn of_file(name: &str, text: &str) -> Result<Self, UnusableList> {
        if name.ends_with(LIST_SUFFIX) {
            return Self::parse(text);
        }
        let plugin = object(text)?;
        if plugin.get("type").and_then(Value::as_str).is_none_or(str::is_empty) {
            return Err(missing(&plugin, "type", "; a configuration list belongs in a .conflist file"));
        }
        let copied = |key: &str| plugin.get(key).map(|value| (key.to_owned(), value.clone()));
        let mut keys: Map<String, Value> = ["cniVersion", "name"].into_iter().filter_map(copied).collect();
        keys.insert(ONLY_INLINED.into(), true.into());
        keys.insert(PLUGINS.into(), vec![Value::Object(plugin)].into());
        Self::of_keys(keys)
    }

    /// Parses a list.
    ///
    /// # Errors
    /// As [`Self::of_file`].
    pub fn parse(text: &str) -> Result<Self, UnusableList> {
        object(text).and_then(Self::of_keys)
    }

    fn of_keys(mut keys: Map<String, Value>) -> Result<Self, UnusableList> {
        if !keys.get("name").is_some_and(Value::is_string) {
            return Err(missing(&keys, "name", ""));
        }
        let plugins = match keys.get_mut(PLUGINS).map(mem::take) {
            Some(Value::Array(plugins)) => plugins,
            None => Vec::new(),
            Some(_) => return Err(missing(&keys, PLUGINS, "")),
        };
        if plugins.is_empty() {
            // libcni 1.3
            let what = "expected plugins in the list itself, got a list with files in the directory of its name, or \
                        without plugins";
            return Err(UnusableList::Unsupported(what.into()));
        }
        match plugins.iter().position(|plugin| kind_of(plugin).is_empty()) {
            Some(index) => Err(UnusableList::Invalid(format!("plugins[{index}]: missing key \"type\""))),
            None => Ok(Self { keys, plugins }),
        }
    }

    /// Refuses a list with a version in which each ADD of the plugin would fail. Runtimes use the newest known one of
    /// `cniVersions`, or else `cniVersion` (libcni 1.3, `NetworkConfFromBytes`).
    pub(super) fn check_version(&self) -> Result<(), UnusableList> {
        let versions = self.keys.get("cniVersions").and_then(Value::as_array).into_iter().flatten();
        let is_supported = |version: &Value| version.as_str().is_some_and(|text| version::SUPPORTED.contains(&text));
        match self.keys.get("cniVersion").filter(|version| !version.is_null() && *version != "") {
            Some(stated) if !is_supported(stated) && !versions.clone().any(is_supported) => {
                let (got, supported) = (excerpt(&stated.to_string()), version::SUPPORTED.join(", "));
                Err(UnusableList::Unsupported(format!("unsupported cniVersion {got}; expected one of {supported}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns the name of the network.
    pub(super) fn name(&self) -> &str {
        self.keys.get("name").and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns the types of the plugins, in order.
    pub fn types(&self) -> impl Iterator<Item = &str> {
        self.plugins.iter().map(kind_of)
    }

    /// Returns the entries of the type `kind`.
    pub fn entries(&self, kind: &str) -> impl Iterator<Item = &Value> {
        self.plugins.iter().filter(move |plugin| kind_of(plugin) == kind)
    }

    /// Returns the digests of the entries of the type `kind`.
    pub(super) fn digests(&self, kind: &str) -> Vec<Digest> {
        self.entries(kind).map(Digest::of_value).collect()
    }

    /// Whether the list is an own list: an entry has the key `cni_conf_dir`.
    pub(super) fn is_own(&self) -> bool {
        self.plugins.iter().any(|plugin| plugin.get(CNI_CONF_DIR).is_some())
    }

    /// Returns the list with `entry` in place of the entries of the same type, or at its end.
    #[must_use]
    pub fn with(&self, entry: &Value) -> Self {
        let position = self.types().position(|kind| kind == kind_of(entry)).unwrap_or(self.plugins.len());
        let mut list = self.without(kind_of(entry));
        list.plugins.insert(position, entry.clone());
        list
    }

    /// Returns the list without its entries of the type `kind`.
    #[must_use]
    pub fn without(&self, kind: &str) -> Self {
        let plugins = self.plugins.iter().filter(|plugin| kind_of(plugin) != kind).cloned().collect();
        Self { keys: self.keys.clone(), plugins }
    }

    /// Returns the list with only its entries of the type `kind`; `None` if it has none.
    pub(super) fn only(mut self, kind: &str) -> Option<Self> {
        self.plugins.retain(|plugin| kind_of(plugin) == kind);
        (!self.plugins.is_empty()).then_some(self)
    }

    /// Returns the list as text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut keys = self.keys.clone();
        keys.insert(PLUGINS.into(), self.plugins.clone().into());
        format!("{:#}\n", Value::Object(keys))
    }
}

/// Returns the name of the list that is made of a file: `10-x.conflist` for `10-x.conf` and `10-x.json`.
pub(super) fn list_name(name: &str) -> String {
    let stem = name.strip_suffix(".conf").or_else(|| name.strip_suffix(".json"));
    stem.map_or_else(|| name.to_owned(), |stem| format!("{stem}{LIST_SUFFIX}"))
}

fn kind_of(plugin: &Value) -> &str {
    plugin["type"].as_str().unwrap_or_default()
}

/// Returns the error of a missing key. Go ignores the case of keys, so runtimes may use a file that has it in another case.
fn missing(keys: &Map<String, Value>, key: &str, hint: &str) -> UnusableList {
    match keys.keys().find(|found| *found != key && found.eq_ignore_ascii_case(key)) {
        Some(found) => UnusableList::Unsupported(format!("expected the key {key:?}, got {found:?}")),
        None => UnusableList::Invalid(format!("missing key {key:?}{hint}")),
    }
}

fn object(text: &str) -> Result<Map<String, Value>, UnusableList> {
    let invalid = |why: &str| UnusableList::Invalid(why.to_owned());
    match serde_json::from_str(text) {
        Ok(Value::Object(keys)) => Ok(keys),
        Ok(_) => Err(invalid("expected a JSON object")),
        // Another process is writing it, or was killed while writing.
        Err(_) if text.trim().is_empty() => Err(invalid("empty file")),
        Err(_) if text.starts_with('\u{feff}') => Err(invalid("invalid JSON: byte order mark at the start")),
        Err(error) => Err(invalid(&format!("invalid JSON: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry() -> Value {
        json!({"type": "detour", "chain": [{"type": "uid-exclude", "uids": ["1337"]}]})
    }

    fn parse(text: &str) -> ConfList {
        ConfList::parse(text).expect("a list")
    }

    fn value(list: &ConfList) -> Value {
        serde_json::from_str(&list.text()).expect("JSON")
    }

    #[test]
    fn an_older_entry_is_replaced_in_place_and_duplicates_are_removed() {
        let text = r#"{"name":"n","plugins":[{"type":"detour","old":1},{"type":"a"},{"type":"detour"},{"type":"b"},{"type":"detour"}]}"#;
        let replaced = parse(text).with(&json!({"type": "detour", "new": 1}));
        let plugins = json!([{"type": "detour", "new": 1}, {"type": "a"}, {"type": "b"}]);
        assert_eq!(value(&replaced), json!({"name": "n", "plugins": plugins}));
        assert_eq!(value(&replaced.without("detour"))["plugins"], json!([{"type": "a"}, {"type": "b"}]));
    }

    #[test]
    fn the_order_of_keys_stays_and_escaped_or_duplicate_keys_are_understood() {
        for text in [
            r#"{"z":1,"name":"n", "pl\u0075gins" : [{"\u0074ype":"a","k":1.5}],"a":2}"#,
            r#"{"z":1,"name":"n","plugins":[{"type":"b"}],"\u0070lugins":[{"type":"a","k":1.5}],"a":2}"#,
        ] {
            let written = parse(text).with(&entry()).text();
            let keys: Map<String, Value> = serde_json::from_str(&written).expect("JSON");
            assert_eq!(keys.keys().collect::<Vec<_>>(), ["z", "name", "plugins", "a"]);
            assert_eq!(keys["plugins"], json!([{"type": "a", "k": 1.5}, entry()]), "{written}");
            assert_eq!(keys["plugins"][0].as_object().expect("an object").keys().collect::<Vec<_>>(), ["type", "k"]);
        }
    }

    #[test]
    fn a_list_that_runtimes_refuse_is_refused() {
        for (text, why) in [
            ("", "empty file"),
            (" \n", "empty file"),
            ("[]", "expected a JSON object"),
            (r#"{"plugins":[{"type":"a"}]}"#, "missing key \"name\""),
            (r#"{"name":"n","plugins":{}}"#, "missing key \"plugins\""),
            (r#"{"name":"n","plugins":[{"type":"a"},{}]}"#, "plugins[1]: missing key \"type\""),
            (r#"{"name":"n","plugins":["a"]}"#, "plugins[0]: missing key \"type\""),
        ] {
            assert_eq!(ConfList::parse(text), Err(UnusableList::Invalid(why.into())), "{text}");
        }
        for (text, why) in [
            (r#"{"name":"n","plugins":[]}"#, "missing key \"type\"; a configuration list belongs in a .conflist file"),
            (r#"{"type":"n"}"#, "missing key \"name\""),
        ] {
            assert_eq!(ConfList::of_file("1.conf", text), Err(UnusableList::Invalid(why.into())), "{text}");
        }
    }

    /// Another list would change the network of the pods.
    #[test]
    fn a_list_that_only_runtimes_can_use_is_unsupported() {
        for text in [
            r#"{"name":"n"}"#,
            r#"{"name":"n","plugins":[]}"#,
            r#"{"name":"n","loadOnlyInlinedPlugins":true}"#,
            r#"{"NAME":"n","plugins":[{"type":"a"}]}"#,
            r#"{"name":"n","Plugins":[{"type":"a"}]}"#,
        ] {
            assert!(matches!(ConfList::parse(text), Err(UnusableList::Unsupported(_))), "{text}");
        }
    }

    #[test]
    fn the_version_is_the_one_that_runtimes_use() {
        let check = |keys: &str| parse(&format!(r#"{{"name":"n",{keys}"plugins":[{{"type":"a"}}]}}"#)).check_version();
        for supported in ["", r#""cniVersion":"","#, r#""cniVersion":"1.1.0","#, r#""cniVersion":null,"#] {
            assert_eq!(check(supported), Ok(()), "{supported}");
        }
        assert_eq!(check(r#""cniVersion":"1.2.0","cniVersions":["1.2.0","1.1.0"],"#), Ok(()));
        for (unsupported, version) in [
            (r#""cniVersion":"1.2.0","#, r#""1.2.0""#),
            (r#""cniVersion":"0.5.0","#, r#""0.5.0""#),
            (r#""cniVersion":1,"#, "1"),
            (r#""cniVersion":"2.0.0","cniVersions":["2.1.0"],"#, r#""2.0.0""#),
        ] {
            let why = check(unsupported).expect_err("unsupported").to_string();
            assert!(why.starts_with(&format!("unsupported cniVersion {version}; expected one of 0.1.0, ")), "{why}");
        }
    }

    proptest::proptest! {
        #[test]
        fn adding_the_entry_twice_changes_nothing_and_removing_it_restores_the_plugins(
            types in proptest::collection::vec("[a-z]{1,4}", 1..4), extra in "[ -~]{0,6}",
        ) {
            let plugins: Vec<_> = types.iter().map(|kind| json!({"type": kind, "k": extra})).collect();
            let value = json!({"cniVersion": "1.0.0", "name": "n", "plugins": plugins, "z": {"plugins": [extra]}});
            let with = parse(&value.to_string()).with(&entry());
            proptest::prop_assert_eq!(&parse(&with.text()).with(&entry()), &with);
            proptest::prop_assert_eq!(with.without("detour").text(), format!("{value:#}\n"));
        }
    }
}
