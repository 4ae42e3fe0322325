//! A file with a configuration: a plugin's own, or a list of which one member is ours.

use super::{Code, CniCommand, Error, NetConf};
use serde_json::Value;
use std::path::Path;

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
