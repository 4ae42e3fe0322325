//! Edits the configuration list of a cluster network (a CNI conflist): adds, replaces and removes the plugin's entry.
//! The order of keys stays the same, the formatting does not.

use super::record::Digest;
use crate::cni::{CNI_CONF_DIR, ONLY_INLINED, excerpt, has_only_inlined, is_identifier, version};
use serde_json::{Map, Value};

/// Why the plugin's entry can't be added to a file. Runtimes skip most of these files too (libcni,
/// `NetworkConfFromBytes` and `ConfFromBytes`).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnusableList {
    /// The file is empty: another process is writing it, or was killed while writing.
    #[error("empty file")]
    Empty,
    /// The file is not JSON. Runtimes accept no byte order marks, comments or trailing commas.
    #[error("invalid JSON: {0}")]
    NotJson(String),
    /// The file is too large, or not UTF-8. Runtimes may accept it.
    #[error("expected UTF-8 text of at most 1 MiB")]
    NotText,
    /// The JSON has a feature that this parser refuses. Runtimes may accept it.
    #[error("expected JSON with at most 127 levels and without lone surrogates: {0}")]
    Unsupported(String),
    /// A key that runtimes read is in another case, which Go ignores.
    #[error("key {0:?} in another case than that of the CNI specification; runtimes may accept it")]
    OtherCase(String),
    /// The plugins are in files of the directory that has the network's name (libcni 1.3).
    #[error("expected plugins in the list itself, got a list with files in the directory of its name")]
    NotInlined,
    /// The plugin does not support the version of the list, so each ADD would fail.
    #[error("unsupported cniVersion {0}; expected one of {supported}", supported = version::SUPPORTED.join(", "))]
    Version(String),
    /// Another user than root can change the file: a copy would be root's.
    #[error("another user can change the file: {0}")]
    Untrusted(String),
    /// The file is JSON, but not an object.
    #[error("expected a JSON object")]
    NotObject,
    /// The network has no name; a runtime refuses it.
    #[error("missing key \"name\"")]
    NoName,
    /// A `.conflist` file has no configuration list.
    #[error("missing key \"plugins\"")]
    NoPlugins,
    /// An element of the configuration list has no type.
    #[error("plugins[{0}]: missing key \"type\"")]
    NoType(usize),
    /// A `.conf` file has no plugin type.
    #[error("missing key \"type\"; a configuration list belongs in a .conflist file")]
    NotSingle,
    /// Multus generates its file from the cluster network's, which would drop the entry.
    #[error("configuration of Multus; the plugin belongs in the cluster network's file, which Multus calls")]
    Multus,
    /// The file configures the loopback interface, not a pod network.
    #[error("configuration of the loopback interface")]
    Loopback,
    /// Another tool's `.conflist` file has the name that the list made of this `.conf` file would have.
    #[error("{0:?} is a configuration list of the same name; remove one of the two files")]
    Twice(String),
}

impl UnusableList {
    /// Whether runtimes may use the file, so that another list would change the network of the pods.
    pub(super) fn may_be_used(&self) -> bool {
        matches!(
            self,
            Self::NotText
                | Self::Unsupported(_)
                | Self::OtherCase(_)
                | Self::NotInlined
                | Self::Version(_)
                | Self::Untrusted(_)
        )
    }
}

/// Returns the configuration list `text` with `entry`, which replaces an entry of the same `type` or is appended. The
/// text does not change if it has the entry already.
///
/// # Errors
/// A runtime would reject the list.
pub fn rewrite(text: &str, entry: &Value) -> Result<String, UnusableList> {
    let mut list = ConfList::parse(text)?;
    match list.of_type(&entry["type"])[..] {
        [only] if list.plugins[only] == *entry => return Ok(text.to_owned()),
        [] => list.plugins.push(entry.clone()),
        [first, ref others @ ..] => {
            list.plugins[first] = entry.clone();
            list.remove(others);
        }
    }
    Ok(list.text())
}

/// Returns the configuration list `text` without its entries of the type `kind`; `None` if it has none.
///
/// # Errors
/// As [`rewrite`].
pub fn without(text: &str, kind: &str) -> Result<Option<String>, UnusableList> {
    let mut list = ConfList::parse(text)?;
    let own = list.of_type(&Value::from(kind));
    list.remove(&own);
    Ok((!own.is_empty()).then(|| list.text()))
}

/// Returns the entries of the configuration list `text` that have the type `kind`.
///
/// # Errors
/// As [`rewrite`].
pub fn of_type(text: &str, kind: &str) -> Result<Vec<Value>, UnusableList> {
    let list = ConfList::parse(text)?;
    let own = list.of_type(&Value::from(kind));
    Ok(own.into_iter().map(|index| list.plugins[index].clone()).collect())
}

/// Returns the digests of the entries of the configuration list `text` that have the type `kind`.
///
/// # Errors
/// As [`rewrite`].
pub(super) fn digests(text: &str, kind: &str) -> Result<Vec<Digest>, UnusableList> {
    Ok(of_type(text, kind)?.iter().map(Digest::of_value).collect())
}

/// Whether the configuration list `text` is an own list: an entry has the key `cni_conf_dir`.
#[must_use]
pub fn is_own_list(text: &str) -> bool {
    ConfList::parse(text).is_ok_and(|list| list.plugins.iter().any(|plugin| plugin.get(CNI_CONF_DIR).is_some()))
}

/// Checks that the plugin supports the version that runtimes use for the configuration list `text`: the newest known
/// one of `cniVersions`, or else `cniVersion` (libcni 1.3, `NetworkConfFromBytes`).
///
/// # Errors
/// As [`rewrite`]; [`UnusableList::Version`].
pub(super) fn check_version(text: &str) -> Result<(), UnusableList> {
    let keys = object(text)?;
    let versions = keys.get("cniVersions").and_then(Value::as_array).into_iter().flatten();
    let is_supported = |version: &Value| version.as_str().is_some_and(|text| version::SUPPORTED.contains(&text));
    match keys.get("cniVersion").filter(|version| !version.is_null() && *version != "") {
        Some(stated) if !is_supported(stated) && !versions.clone().any(is_supported) => {
            Err(UnusableList::Version(excerpt(&stated.to_string())))
        }
        _ => Ok(()),
    }
}

/// Returns the name of a configuration list without plugins, which runtimes then read from the directory of this name;
/// `None` for any other text.
pub(super) fn directory(text: &str) -> Option<String> {
    let keys = object(text).ok().filter(|_| matches!(ConfList::parse(text), Err(UnusableList::NotInlined)))?;
    keys.get("name")?.as_str().filter(|name| is_identifier(name)).map(str::to_owned)
}

/// Returns the types of the plugins in the list, in order.
///
/// # Errors
/// As [`rewrite`].
pub fn types(text: &str) -> Result<Vec<String>, UnusableList> {
    let list = ConfList::parse(text)?;
    Ok(list.plugins.iter().filter_map(|plugin| Some(plugin["type"].as_str()?.to_owned())).collect())
}

/// Converts the configuration of a single plugin to a configuration list of the same name and version. Both are part of
/// the state that the plugin and its IPAM plugin save on the node. Beside a single plugin, runtimes ignore the files in
/// the directory of the network's name; the list tells them to ignore them too.
///
/// # Errors
/// A runtime would reject the configuration.
pub fn list_of(conf: &str) -> Result<String, UnusableList> {
    let keys = object(conf)?;
    if keys.get("type").and_then(Value::as_str).is_none_or(str::is_empty) {
        return Err(UnusableList::NotSingle);
    }
    let name = keys.get("name").filter(|name| name.is_string()).ok_or(UnusableList::NoName)?.clone();
    let version = keys.get("cniVersion").cloned();
    let mut list: Map<String, Value> = version.map(|version| ("cniVersion".to_owned(), version)).into_iter().collect();
    list.insert("name".into(), name);
    list.insert(ONLY_INLINED.into(), true.into());
    Ok(ConfList { keys: list, plugins: vec![Value::Object(keys)] }.text())
}

fn object(text: &str) -> Result<Map<String, Value>, UnusableList> {
    if text.trim().is_empty() {
        return Err(UnusableList::Empty);
    }
    match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(keys)) => match keys.keys().find(|key| is_in_other_case(key)) {
            Some(key) => Err(UnusableList::OtherCase(key.clone())),
            None => Ok(keys),
        },
        Ok(_) => Err(UnusableList::NotObject),
        Err(_) if text.starts_with('\u{feff}') => Err(UnusableList::NotJson("byte order mark at the start".into())),
        Err(error) => Err(refused(error.to_string())),
    }
}

fn is_in_other_case(key: &str) -> bool {
    let read = ["cniVersion", "cniVersions", "name", "plugins", "type"];
    read.iter().any(|known| *known != key && known.eq_ignore_ascii_case(key))
}

/// Tells JSON that Go's parser may accept from invalid JSON.
fn refused(error: String) -> UnusableList {
    let features = ["recursion limit exceeded", "surrogate", "unexpected end of hex escape"];
    if features.iter().any(|feature| error.contains(feature)) {
        UnusableList::Unsupported(error)
    } else {
        UnusableList::NotJson(error)
    }
}

/// A configuration list that a runtime would accept.
struct ConfList {
    keys: Map<String, Value>,
    plugins: Vec<Value>,
}

impl ConfList {
    fn parse(text: &str) -> Result<Self, UnusableList> {
        let keys = object(text)?;
        if !keys.get("name").is_some_and(Value::is_string) {
            return Err(UnusableList::NoName);
        }
        let plugins = match keys.get("plugins") {
            Some(Value::Array(plugins)) => plugins.clone(),
            None => Vec::new(),
            Some(_) => return Err(UnusableList::NoPlugins),
        };
        if plugins.is_empty() {
            let only_inlined = has_only_inlined(&keys);
            return Err(if only_inlined { UnusableList::NoPlugins } else { UnusableList::NotInlined });
        }
        if let Some(index) = plugins.iter().position(|plugin| plugin["type"].as_str().is_none_or(str::is_empty)) {
            return Err(UnusableList::NoType(index));
        }
        Ok(Self { keys, plugins })
    }

    fn of_type(&self, kind: &Value) -> Vec<usize> {
        let of_type = |(index, plugin): (usize, &Value)| (plugin["type"] == *kind).then_some(index);
        self.plugins.iter().enumerate().filter_map(of_type).collect()
    }

    /// Removes the plugins at `indices`, which are in ascending order.
    fn remove(&mut self, indices: &[usize]) {
        for index in indices.iter().rev() {
            self.plugins.remove(*index);
        }
    }

    fn text(mut self) -> String {
        self.keys.insert("plugins".into(), self.plugins.into());
        format!("{:#}\n", Value::Object(self.keys))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entry() -> Value {
        json!({"type": "detour", "chain": [{"type": "uid-exclude", "uids": ["1337"]}]})
    }

    #[test]
    fn an_older_entry_is_replaced_in_place_and_duplicates_are_removed() {
        let value = |text: Result<String, _>| serde_json::from_str::<Value>(&text.expect("a list")).expect("JSON");
        let text = r#"{"name":"n","plugins":[{"type":"detour","old":1},{"type":"a"},{"type":"detour"},{"type":"b"},{"type":"detour"}]}"#;
        let replaced = rewrite(text, &json!({"type": "detour", "new": 1}));
        let plugins = json!([{"type": "detour", "new": 1}, {"type": "a"}, {"type": "b"}]);
        assert_eq!(value(replaced.clone()), json!({"name": "n", "plugins": plugins}));
        let without = without(&replaced.expect("a list"), "detour").map(Option::unwrap_or_default);
        assert_eq!(value(without)["plugins"], json!([{"type": "a"}, {"type": "b"}]));
    }

    #[test]
    fn the_order_of_keys_stays_and_escaped_or_duplicate_keys_are_understood() {
        for text in [
            r#"{"z":1,"name":"n", "pl\u0075gins" : [{"\u0074ype":"a","k":1.5}],"a":2}"#,
            r#"{"z":1,"name":"n","plugins":[{"type":"b"}],"\u0070lugins":[{"type":"a","k":1.5}],"a":2}"#,
        ] {
            let written = rewrite(text, &entry()).expect("a list");
            let keys: Map<String, Value> = serde_json::from_str(&written).expect("JSON");
            assert_eq!(keys.keys().collect::<Vec<_>>(), ["z", "name", "plugins", "a"]);
            assert_eq!(keys["plugins"], json!([{"type": "a", "k": 1.5}, entry()]), "{written}");
            assert_eq!(keys["plugins"][0].as_object().expect("an object").keys().collect::<Vec<_>>(), ["type", "k"]);
        }
    }

    #[test]
    fn a_list_that_runtimes_refuse_is_refused() {
        for (text, why) in [
            ("", UnusableList::Empty),
            (" \n", UnusableList::Empty),
            ("[]", UnusableList::NotObject),
            (r#"{"plugins":[{"type":"a"}]}"#, UnusableList::NoName),
            (r#"{"name":"n"}"#, UnusableList::NotInlined),
            (r#"{"name":"n","plugins":[]}"#, UnusableList::NotInlined),
            (r#"{"name":"n","loadOnlyInlinedPlugins":true}"#, UnusableList::NoPlugins),
            (r#"{"name":"n","loadOnlyInlinedPlugins":"True"}"#, UnusableList::NoPlugins),
            (r#"{"name":"n","plugins":{}}"#, UnusableList::NoPlugins),
            (r#"{"name":"n","plugins":[{"type":"a"},{}]}"#, UnusableList::NoType(1)),
            (r#"{"name":"n","plugins":["a"]}"#, UnusableList::NoType(0)),
        ] {
            assert_eq!(rewrite(text, &entry()), Err(why), "{text}");
        }
        assert_eq!(list_of(r#"{"name":"n","plugins":[]}"#), Err(UnusableList::NotSingle));
        assert_eq!(list_of(r#"{"type":"n"}"#), Err(UnusableList::NoName));
    }

    #[test]
    fn the_version_is_the_one_that_runtimes_use() {
        let check = |keys: &str| check_version(&format!(r#"{{"name":"n",{keys}"plugins":[{{"type":"a"}}]}}"#));
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
            assert_eq!(check(unsupported), Err(UnusableList::Version(version.into())), "{unsupported}");
        }
    }

    #[test]
    fn only_a_list_without_plugins_has_a_directory() {
        assert_eq!(directory(r#"{"name":"n"}"#), Some("n".into()));
        assert_eq!(directory(r#"{"name":"n","plugins":[],"loadOnlyInlinedPlugins":false}"#), Some("n".into()));
        for other in [
            r#"{"name":"..","plugins":[]}"#,
            r#"{"name":"a/b"}"#,
            r#"{"name":"n","loadOnlyInlinedPlugins":true}"#,
            r#"{"name":"n","plugins":[{"type":"a"}]}"#,
            r#"{"plugins":[]}"#,
            "{",
        ] {
            assert_eq!(directory(other), None, "{other}");
        }
    }

    proptest::proptest! {
        #[test]
        fn adding_the_entry_twice_changes_nothing_and_removing_it_restores_the_plugins(
            types in proptest::collection::vec("[a-z]{1,4}", 1..4), extra in "[ -~]{0,6}",
        ) {
            let plugins: Vec<_> = types.iter().map(|kind| json!({"type": kind, "k": extra})).collect();
            let value = json!({"cniVersion": "1.0.0", "name": "n", "plugins": plugins, "z": {"plugins": [extra]}});
            let with = rewrite(&value.to_string(), &entry()).expect("a list");
            proptest::prop_assert_eq!(&rewrite(&with, &entry()).expect("a list"), &with);
            proptest::prop_assert_eq!(without(&with, "detour").expect("a list"), Some(format!("{value:#}\n")));
        }
    }
}
