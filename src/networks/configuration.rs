//! A network's CNI configuration: one plugin, or a configuration list.

use crate::cni::{Block, BlockReader, Code, Error, excess, is_identifier, json_error, version, wrong_type};
use serde_json::{Map, Value};

/// A network's configuration, checked, with the values that the plugins get with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunnableConfiguration {
    /// The text, with a name inserted if it had none.
    pub text: String,
    /// `name`: the network's name.
    pub name: String,
    /// `cniVersion`, or the newest supported one of `cniVersions`; empty if it is not set, which means 0.1.0.
    pub cni_version: String,
    /// The plugins, at least one. Each `type` is the name of an executable.
    pub plugins: Vec<Block>,
    /// `disableCheck`: CHECK is skipped.
    pub disable_check: bool,
    /// `disableGC`: GC is skipped.
    pub disable_gc: bool,
    /// `runtimeConfig` of the runtime; each plugin gets the keys that its `capabilities` list.
    pub runtime_config: Map<String, Value>,
    /// Values for `args.cni` of each plugin, from the pod's network selection (Multus's `cni-args`). They override
    /// the plugin's own values.
    pub args: Map<String, Value>,
    /// Whether it comes from the node's administrator: from the plugin's own configuration, or from a file that only
    /// root can change. Definitions come from users of the cluster.
    pub trusted: bool,
}

const ACCEPTED: &str = r#"a JSON object with "type", or with "plugins", a list of such objects"#;
const ACCEPTED_TYPE: &str = "the name of an executable, without /";

impl RunnableConfiguration {
    /// Parses `text`, which comes from `place`. Inserts `name` if the text has none.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`] with the place, the key and the expected value.
    pub fn parse(place: &str, text: &str, name: Option<&str>) -> Result<Self, Error> {
        let value = json(place, text)?;
        let block = Block::new(place, &value)?;
        let keys = block.reader();
        let written = keys.string("name")?.filter(|name| !name.is_empty());
        let (text, name) = match (written, name) {
            (Some(written), _) => (text.to_owned(), written.to_owned()),
            (None, Some(name)) => {
                let mut named = block.keys.clone();
                named.shift_remove("name");
                named.shift_insert(0, "name".to_owned(), name.into());
                (Value::Object(named).to_string(), name.to_owned())
            }
            (None, None) => return Err(missing(&keys, "name", "letters, digits, _, . and -")),
        };
        if !is_identifier(&name) {
            let accepted = "letters, digits, _, . and -, a letter or digit first";
            return Err(wrong_type(&keys.place("name"), &Value::from(name), accepted));
        }
        Ok(Self {
            cni_version: cni_version(&keys)?,
            plugins: plugins(&block)?,
            disable_check: boolean(&keys, "disableCheck")?,
            disable_gc: boolean(&keys, "disableGC")?,
            text,
            name,
            ..Self::default()
        })
    }

    /// Applies `change` to the text; `None` if `change` returns `None`.
    ///
    /// # Errors
    /// Those of `change` and of [`Self::parse`].
    pub fn changed(
        &self,
        place: &str,
        change: impl FnOnce(&Value) -> Result<Option<Value>, Error>,
    ) -> Result<Option<Self>, Error> {
        let changed = change(&json(place, &self.text)?)?;
        changed.map(|text| Self::parse(place, &text.to_string(), None)).transpose()
    }

    /// Returns the list `name` of single plugins; `None` if there are none.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub fn list_of(place: &str, name: &str, version: &str, plugins: &[Self]) -> Result<Option<Self>, Error> {
        if plugins.is_empty() {
            return Ok(None);
        }
        let keys = plugins.iter().flat_map(|plugin| &plugin.plugins).map(|block| Value::Object(block.keys.clone()));
        let list = serde_json::json!({"cniVersion": version, "name": name, "plugins": keys.collect::<Vec<_>>()});
        let trusted = plugins.iter().all(|plugin| plugin.trusted);
        Self::parse(place, &list.to_string(), None).map(|list| Some(Self { trusted, ..list }))
    }

    /// Returns the types of the plugins, in order.
    pub fn types(&self) -> impl Iterator<Item = &str> {
        self.plugins.iter().map(Block::kind)
    }
}

/// Parses the JSON of a configuration, within the limits of size and number of values.
pub(super) fn json(place: &str, text: &str) -> Result<Value, Error> {
    if let Some(excess) = excess(text.as_bytes()) {
        return Err(Error::new(Code::InvalidConfig, format!("{place}: {excess}, got more")));
    }
    serde_json::from_str(text).map_err(|error| {
        Error::new(Code::InvalidConfig, format!("{place}: invalid JSON: {}; expected {ACCEPTED}", json_error(&error)))
    })
}

fn missing(keys: &BlockReader<'_>, key: &str, accepted: &str) -> Error {
    Error::new(Code::InvalidConfig, format!("{}: missing; expected {accepted}", keys.place(key)))
}

/// Returns the newest version that the configuration lists and this plugin supports, as libcni does (`libcni/conf.go`).
fn cni_version(keys: &BlockReader<'_>) -> Result<String, Error> {
    let one = keys.string("cniVersion")?.unwrap_or_default().to_owned();
    let Some(list) = keys.list("cniVersions")?.filter(|list| !list.items.is_empty()) else { return Ok(one) };
    let listed = |version: &&str| *version == one || list.items.iter().any(|item| item == version);
    match version::SUPPORTED.into_iter().rfind(listed) {
        Some(newest) => Ok(newest.to_owned()),
        None => Err(list.reject(&list.items.join(","), &format!("at least one of {}", version::SUPPORTED.join(", ")))),
    }
}

fn plugins(block: &Block) -> Result<Vec<Block>, Error> {
    let keys = block.reader();
    // As in Multus, `type` takes precedence over `plugins`.
    if keys.value("type").is_some_and(|kind| kind != "") {
        check_type(&keys)?;
        return Ok(vec![block.clone()]);
    }
    let plugins = match keys.value("plugins") {
        Some(Value::Array(plugins)) if !plugins.is_empty() => plugins,
        Some(other) => {
            return Err(wrong_type(&keys.place("plugins"), other, "an array of at least one object with type"));
        }
        None => {
            let msg = format!("{}: neither type nor plugins is set; expected {ACCEPTED}", block.path);
            return Err(Error::new(Code::InvalidConfig, msg));
        }
    };
    let plugin = |(i, plugin)| {
        let plugin = Block::new(format!("{}[{i}]", keys.place("plugins")), plugin)?;
        check_type(&plugin.reader())?;
        Ok(plugin)
    };
    plugins.iter().enumerate().map(plugin).collect()
}

/// Rejects a type with a path, which would leave the directories of executables.
fn check_type(keys: &BlockReader<'_>) -> Result<(), Error> {
    match keys.value("type") {
        Some(Value::String(kind)) if !kind.is_empty() && !kind.contains('/') => Ok(()),
        Some(other) => Err(wrong_type(&keys.place("type"), other, ACCEPTED_TYPE)),
        None => Err(missing(keys, "type", ACCEPTED_TYPE)),
    }
}

/// Parses a boolean. libcni accepts strings too.
fn boolean(keys: &BlockReader<'_>, key: &'static str) -> Result<bool, Error> {
    match keys.value(key).and_then(Value::as_str).map(|text| text.to_ascii_lowercase().parse()) {
        Some(Ok(flag)) => Ok(flag),
        _ => Ok(keys.boolean(key)?.unwrap_or(false)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<RunnableConfiguration, Error> {
        RunnableConfiguration::parse("P", text, Some("nad"))
    }

    fn types(text: &str) -> Vec<String> {
        parse(text).unwrap_or_else(|error| panic!("{error}")).types().map(str::to_owned).collect()
    }

    #[test]
    fn text_with_a_name_is_preserved_byte_for_byte() {
        let text = " {\n\t\"type\":\"bridge\", \"name\" : \"br\" ,\"mtu\": 1e3, \"x\":12345678901234567890123}\n";
        let read = parse(text).expect("accepted");
        assert_eq!((&*read.text, &*read.name, &*read.cni_version), (text, "br", ""));
        assert_eq!(read.plugins[0].keys["type"], "bridge");
    }

    #[test]
    fn a_missing_name_is_inserted_and_nothing_else_changes() {
        for (text, wanted) in [
            ("\n{ \"type\": \"a\", \"n\": 1}", "{\"name\":\"nad\",\"type\":\"a\",\"n\":1}"),
            (
                "{\"type\":\"a\",\"name\": \"\" ,\"x\":{\"name\":\"\"}}",
                "{\"name\":\"nad\",\"type\":\"a\",\"x\":{\"name\":\"\"}}",
            ),
            ("{\"name\":null,\"type\":\"a\"}", "{\"name\":\"nad\",\"type\":\"a\"}"),
        ] {
            let read = parse(text).expect("accepted");
            assert_eq!((&*read.text, &*read.name), (wanted, "nad"));
            let again = RunnableConfiguration::parse("P", &read.text, None).expect("accepted");
            assert_eq!(again.name, "nad");
        }
        let error = RunnableConfiguration::parse("P", "{\"type\":\"a\"}", None).expect_err("no name");
        assert_eq!(error.msg, "P.name: missing; expected letters, digits, _, . and -");
    }

    #[test]
    fn a_configuration_has_one_plugin_or_a_list() {
        assert_eq!(types("{\"type\":\"a\"}"), ["a"]);
        assert_eq!(types("{\"plugins\":[{\"type\":\"a\"},{\"type\":\"b\"}]}"), ["a", "b"]);
        assert_eq!(types("{\"type\":\"c\",\"plugins\":[{\"type\":\"a\"}]}"), ["c"]);
        assert_eq!(types("{\"type\":\"\",\"plugins\":[{\"type\":\"a\"}]}"), ["a"]);
        let list =
            "{\"cniVersion\":\"0.4.0\",\"disableCheck\":true,\"disableGC\":\"TRUE\",\"plugins\":[{\"type\":\"a\"}]}";
        let read = parse(list).expect("accepted");
        assert!(read.disable_check && read.disable_gc && read.cni_version == "0.4.0");
        assert_eq!(read.plugins[0].path, "P.plugins[0]");
    }

    #[test]
    fn the_newest_supported_version_is_chosen() {
        for (versions, wanted) in [
            ("\"cniVersion\":\"0.3.1\"", "0.3.1"),
            ("\"cniVersions\":[\"0.4.0\",\"1.1.0\",\"2.0.0\"]", "1.1.0"),
            ("\"cniVersion\":\"1.1.0\",\"cniVersions\":[\"0.4.0\"]", "1.1.0"),
            ("\"cniVersion\":\"7\",\"cniVersions\":[]", "7"),
        ] {
            assert_eq!(parse(&format!("{{{versions},\"type\":\"a\"}}")).expect("accepted").cni_version, wanted);
        }
        assert!(parse("{\"cniVersions\":[\"9.9.9\"],\"type\":\"a\"}").is_err());
    }

    #[test]
    fn errors_contain_the_place_and_the_key() {
        for (text, wanted) in [
            ("", "P: invalid JSON: EOF while parsing a value at line 1 column 0; expected a JSON object with"),
            ("{\"type\":", "P: invalid JSON: EOF"),
            ("[]", "P: "),
            ("{}", "P: neither type nor plugins is set; expected a JSON object with"),
            ("{\"type\":\"../sh\"}", "P.type: "),
            ("{\"type\":7}", "P.type: "),
            ("{\"plugins\":[]}", "P.plugins: "),
            ("{\"plugins\":[{\"type\":\"a\"},{}]}", "P.plugins[1].type: missing"),
            ("{\"plugins\":[{\"type\":\"a/b\"}]}", "P.plugins[0].type: "),
            ("{\"plugins\":[7]}", "P.plugins[0]: "),
            ("{\"type\":\"a\",\"name\":\"x/y\"}", "P.name: "),
            ("{\"type\":\"a\",\"name\":7}", "P.name: "),
            ("{\"type\":\"a\",\"cniVersion\":1}", "P.cniVersion: "),
            ("{\"type\":\"a\",\"disableCheck\":\"maybe\"}", "P.disableCheck: "),
        ] {
            let error = parse(text).expect_err(text);
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(wanted), "{error}");
        }
    }
}
