//! The network configuration of this plugin, and its file: one plugin, or a configuration list that contains one of this
//! plugin.

use crate::cni::block::json_error;
use crate::cni::error::{Code, Error};
use crate::cni::request::CniCommand;
pub use chain::{ALLOW, BlockBounds, Bounds, OUTSIDE_BOUNDS, OWN_TYPES, OutsideBounds, PROGRAM, REQUEST, SUB_PLUGINS};
pub(super) use chain::{NODE_BOUNDS, blocks, kind};
pub(super) use keys::is_of_this_plugin;
pub use keys::{CNI_CONF_DIR, POD_ANNOTATIONS, unknown_key};
pub use kubernetes::{DEFAULT_AGENT_PREFIXES, Kubernetes};
pub use net_conf::{AUTO_DIALECT, GROUP_FILE, NetConf, RuleFormat, ValidAttachment};
pub(super) use primary::is_primary;
pub use primary::{DefaultNetwork, GLOBAL_NAMESPACE, NetworkName, NetworkStatus, Primary, SYSTEM_NAMESPACE};
use serde_json::{Map, Value};
use std::path::Path;

mod chain;
mod keys;
mod kubernetes;
mod net_conf;
mod primary;

/// The file name of the plugin's own list: a copy of the cluster network's configuration list with the plugin's entry.
/// Of the files in their configuration directory, runtimes use the first one.
pub const OWN_LIST: &str = "00-detour.conflist";

/// U+FEFF in UTF-8, which some editors write. JSON parsers refuse it (RFC 8259, section 8.1).
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The key of a list whose runtimes ignore the files in the directory of its name.
pub const ONLY_INLINED: &str = "loadOnlyInlinedPlugins";

/// Whether a runtime reads a file of this name (libcni, `ConfFiles`).
#[must_use]
pub fn is_configuration_file(name: &str) -> bool {
    [".conflist", ".conf", ".json"].iter().any(|suffix| name.ends_with(suffix))
}

/// Whether a configuration list has only the plugins in its text, and runtimes ignore the files in the directory of its
/// name (libcni 1.3, `NetworkConfFromBytes`).
#[must_use]
pub fn has_only_inlined(list: &Map<String, Value>) -> bool {
    match list.get(ONLY_INLINED) {
        Some(Value::String(text)) => text.eq_ignore_ascii_case("true"),
        value => value == Some(&Value::Bool(true)),
    }
}

/// Parses a plugin's configuration, or the one plugin of a configuration list that is of this plugin's types. Beside a
/// plugin of type `detour`, the entry `istio-cni` is Istio's own.
///
/// # Errors
/// The text is not JSON, has no plugin of these types or more than one, or the plugin's configuration is invalid.
pub fn configuration(place: &Path, text: &[u8]) -> Result<NetConf, Error> {
    let with_place = |error: Error| error.at(place.display());
    let value: Value = serde_json::from_slice(text).map_err(|error| {
        let what = if text.starts_with(BYTE_ORDER_MARK) { ": byte order mark at the start" } else { "" };
        with_place(Error::new(Code::Decode, format!("invalid JSON: {}{what}", json_error(&error))))
    })?;
    let Some(plugins) = value.get("plugins").and_then(Value::as_array) else {
        return NetConf::parse(text, CniCommand::Add, "detour").map_err(with_place);
    };
    let kind = |plugin: &&Value| plugin["type"].as_str().unwrap_or_default().to_owned();
    let mut own: Vec<&Value> = plugins.iter().filter(|plugin| OWN_TYPES.contains(&kind(plugin).as_str())).collect();
    if own.iter().any(|plugin| kind(plugin) == "detour") {
        own.retain(|plugin| kind(plugin) != "istio-cni");
    }
    let [plugin] = own[..] else {
        let types: Vec<String> = plugins.iter().map(|plugin| kind(&plugin)).collect();
        let msg = format!(
            "plugins: expected one plugin of type {}, got {} (types in the list: {}); give a file with only that plugin",
            OWN_TYPES.join(" or "),
            own.len(),
            types.join(", ")
        );
        return Err(with_place(Error::new(Code::InvalidConfig, msg)));
    };
    let mut plugin = plugin.clone();
    for key in ["name", "cniVersion"] {
        plugin[key] = value[key].clone();
    }
    NetConf::parse(plugin.to_string().as_bytes(), CniCommand::Add, "detour").map_err(with_place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: &Value) -> Result<NetConf, Error> {
        configuration(Path::new("c"), value.to_string().as_bytes())
    }

    #[test]
    fn a_plugin_or_the_own_plugin_of_a_list_is_parsed() {
        let plugin = parse(&json!({"name": "n", "type": "istio-cni", "prevResult": {}})).expect("a plugin");
        assert_eq!((plugin.name.as_str(), plugin.kind.as_str()), ("n", "istio-cni"));
        let list = json!({"name": "l", "cniVersion": "1.0.0", "plugins": [{"type": "bridge"}, {"type": "detour"}]});
        let list = parse(&list).expect("a list");
        assert_eq!((list.name.as_str(), list.cni_version.as_str(), list.chain.len()), ("l", "1.0.0", 3));
        let beside_istio = json!({"name": "l", "plugins": [{"type": "istio-cni"}, {"type": "detour"}]});
        assert_eq!(parse(&beside_istio).expect("a list").kind, "detour");
    }

    #[test]
    fn a_list_without_an_own_plugin_or_with_two_is_refused() {
        for (plugins, start) in [
            (
                json!([{"type": "bridge"}]),
                "c: plugins: expected one plugin of type detour or istio-cni or excludedns, got 0 (types in the list: bridge); ",
            ),
            (
                json!([{"type": "detour"}, {"type": "excludedns"}]),
                "c: plugins: expected one plugin of type detour or istio-cni or excludedns, got 2 (types",
            ),
        ] {
            let error = parse(&json!({"name": "l", "plugins": plugins})).expect_err("refused");
            assert!(error.msg.starts_with(start), "{error}");
        }
        assert!(configuration(Path::new("c"), b"x").expect_err("no JSON").msg.starts_with("c: invalid JSON"));
    }
}
