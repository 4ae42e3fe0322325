//! What goes to a plugin's stdin (SPEC.md, "Deriving execution configuration from plugin
//! configuration").

use super::{NetworkConfiguration, Plugin};
use crate::cni::{Error, ValidAttachment, wrong_type};
use serde_json::{Map, Value, json};

/// The configuration of `plugin` in `network` for ADD, DEL and CHECK: its own keys, with the
/// network's name and version, the previous result, and of what the runtime offers what the
/// plugin's `capabilities` ask for.
///
/// # Errors
/// `capabilities` is no object of booleans, or `args` no object where the call has some.
pub(super) fn for_attachment(
    network: &NetworkConfiguration,
    plugin: &Plugin,
    previous: Option<&Value>,
) -> Result<Map<String, Value>, Error> {
    let mut conf = for_node(network, plugin);
    if let Some(previous) = previous {
        conf.insert("prevResult".to_owned(), previous.clone());
    }
    let mut offered = Map::new();
    for capability in capabilities(plugin)? {
        if let Some(value) = network.runtime_config.get(capability) {
            offered.insert(capability.to_owned(), value.clone());
        }
    }
    if !offered.is_empty() {
        conf.insert("runtimeConfig".to_owned(), offered.into());
    }
    if !network.args.is_empty() {
        let wrong = || {
            wrong(plugin, "args", plugin.conf.get("args").unwrap_or(&Value::Null), "an object whose cni is an object")
        };
        let args = plugin.conf.get("args").filter(|args| !args.is_null());
        let mut args = args.map_or_else(|| Some(Map::new()), |args| args.as_object().cloned()).ok_or_else(wrong)?;
        let cni = args.entry("cni").or_insert_with(|| json!({}));
        cni.as_object_mut().ok_or_else(wrong)?.extend(network.args.clone());
        conf.insert("args".to_owned(), args.into());
    }
    Ok(conf)
}

/// The configuration for STATUS, which is about no attachment.
pub(super) fn for_node(network: &NetworkConfiguration, plugin: &Plugin) -> Map<String, Value> {
    let mut conf = plugin.conf.clone();
    // A description of the plugin for the runtime; the plugin must not see it.
    conf.shift_remove("capabilities");
    conf.insert("name".to_owned(), network.name.as_str().into());
    conf.insert("cniVersion".to_owned(), network.cni_version.as_str().into());
    conf
}

/// The configuration for GC. The list goes under two names: the reference library sent it under
/// the second before the first was in the specification (`libcni/api.go`).
pub(super) fn for_gc(network: &NetworkConfiguration, plugin: &Plugin, valid: Option<&[ValidAttachment]>) -> Map<String, Value> {
    let mut conf = for_node(network, plugin);
    if let Some(valid) = valid {
        let list: Value = valid.iter().map(|a| json!({"containerID": a.container_id, "ifname": a.ifname})).collect();
        conf.insert("cni.dev/valid-attachments".to_owned(), list.clone());
        conf.insert("cni.dev/attachments".to_owned(), list);
    }
    conf
}

fn capabilities(plugin: &Plugin) -> Result<Vec<&str>, Error> {
    let accepted = "true or false, by name";
    match plugin.conf.get("capabilities") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Object(named)) => {
            let mut wanted = Vec::new();
            for (name, value) in named {
                if value.as_bool().ok_or_else(|| wrong(plugin, &format!("capabilities.{name}"), value, accepted))? {
                    wanted.push(name.as_str());
                }
            }
            Ok(wanted)
        }
        Some(other) => Err(wrong(plugin, "capabilities", other, accepted)),
    }
}

fn wrong(plugin: &Plugin, key: &str, value: &Value, accepted: &str) -> Error {
    wrong_type(&format!("{}.{key}", plugin.path), value, accepted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::Code;

    fn plugin(conf: &Value) -> Plugin {
        Plugin { kind: "x".into(), path: "chain[1]".into(), conf: conf.as_object().expect("an object").clone() }
    }

    fn network() -> NetworkConfiguration {
        let runtime_config = json!({"portMappings": [1], "dns": {"servers": []}, "mac": "m"});
        NetworkConfiguration {
            name: "n".into(),
            cni_version: "1.1.0".into(),
            runtime_config: runtime_config.as_object().expect("an object").clone(),
            ..NetworkConfiguration::default()
        }
    }

    #[test]
    fn name_version_and_previous_result_are_put_in() {
        let own = plugin(&json!({"type": "x", "name": "other", "cniVersion": "0.1.0", "a": {"b": [1, null]}}));
        let previous = json!({"cniVersion": "1.1.0", "ips": []});
        let conf = for_attachment(&network(), &own, Some(&previous)).expect("a configuration");
        let wanted = json!({
            "type": "x", "name": "n", "cniVersion": "1.1.0", "a": {"b": [1, null]}, "prevResult": previous,
        });
        assert_eq!(Value::Object(conf), wanted);
        let conf = for_attachment(&network(), &own, None).expect("a configuration");
        assert!(!conf.contains_key("prevResult"));
    }

    #[test]
    fn of_the_runtimes_offer_what_the_plugin_can_take() {
        let able = json!({"type": "x", "capabilities": {"portMappings": true, "mac": false, "ips": true}});
        let conf = for_attachment(&network(), &plugin(&able), None).expect("a configuration");
        assert_eq!(conf["runtimeConfig"], json!({"portMappings": [1]}));
        assert!(!conf.contains_key("capabilities"));
        let unable = json!({"type": "x", "capabilities": {"ips": true}});
        let conf = for_attachment(&network(), &plugin(&unable), None).expect("a configuration");
        assert!(!conf.contains_key("runtimeConfig"));
    }

    #[test]
    fn capabilities_are_booleans_by_name() {
        for (wrong, place) in [(json!([]), "chain[1].capabilities: "), (json!({"a": 1}), "chain[1].capabilities.a: ")] {
            let own = plugin(&json!({"type": "x", "capabilities": wrong}));
            let error = for_attachment(&network(), &own, None).expect_err("refused");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(place), "{error}");
        }
    }

    #[test]
    fn args_of_the_call_win_over_the_plugins_own() {
        let args = json!({"a": 1, "b": 2});
        let network = NetworkConfiguration { args: args.as_object().expect("an object").clone(), ..network() };
        for (own, wanted) in [
            (json!({"type": "x"}), json!({"cni": {"a": 1, "b": 2}})),
            (
                json!({"args": {"other": 0, "cni": {"b": 9, "c": 3}}}),
                json!({"other": 0, "cni": {"b": 2, "c": 3, "a": 1}}),
            ),
        ] {
            assert_eq!(for_attachment(&network, &plugin(&own), None).expect("a configuration")["args"], wanted);
        }
        for wrong in [json!([]), json!({"cni": 1})] {
            let error = for_attachment(&network, &plugin(&json!({"args": wrong})), None).expect_err("refused");
            assert!(error.msg.starts_with("chain[1].args: "), "{error}");
        }
    }

    #[test]
    fn gc_has_the_list_twice_and_nothing_of_an_attachment() {
        let own = plugin(&json!({"type": "x", "capabilities": {"mac": true}}));
        let valid = [ValidAttachment { container_id: "c".into(), ifname: "eth0".into() }];
        let list = json!([{"containerID": "c", "ifname": "eth0"}]);
        let wanted = json!({
            "type": "x", "name": "n", "cniVersion": "1.1.0",
            "cni.dev/valid-attachments": list, "cni.dev/attachments": list,
        });
        assert_eq!(Value::Object(for_gc(&network(), &own, Some(&valid))), wanted);
        assert!(!for_gc(&network(), &own, None).contains_key("cni.dev/valid-attachments"));
    }
}
