//! A network's configuration list, and the configuration that each plugin gets on stdin (SPEC.md, "Deriving execution
//! configuration from plugin configuration").

use crate::cni::{Block, CniCommand, Error, ValidAttachment, version, wrong_type};
use crate::networks::RunnableConfiguration;
use serde_json::{Map, Value, json};

impl RunnableConfiguration {
    /// Returns the version in which the plugins are called.
    #[must_use]
    pub fn version(&self) -> &str {
        if self.cni_version.is_empty() { version::UNSTATED } else { &self.cni_version }
    }

    /// Returns whether the network's version has `command`.
    pub(super) fn allows(&self, command: CniCommand) -> bool {
        version::check(self.version(), command).is_ok()
    }

    /// Returns the configuration of `plugin` for ADD, DEL and CHECK: its own keys, the network's name and version,
    /// the previous result, `args`, and the keys of `runtimeConfig` that its `capabilities` list.
    ///
    /// # Errors
    /// `capabilities` is not an object of booleans, or `args` is not an object although the call passes values.
    pub(super) fn attachment_conf(
        &self,
        plugin: &Block,
        previous: Option<&Value>,
    ) -> Result<Map<String, Value>, Error> {
        let mut conf = self.node_conf(plugin);
        if let Some(previous) = previous {
            conf.insert("prevResult".to_owned(), previous.clone());
        }
        let mut runtime_config = Map::new();
        for capability in capabilities(plugin)? {
            if let Some(value) = self.runtime_config.get(capability) {
                runtime_config.insert(capability.to_owned(), value.clone());
            }
        }
        if !runtime_config.is_empty() {
            conf.insert("runtimeConfig".to_owned(), runtime_config.into());
        }
        if !self.args.is_empty() {
            let args = plugin.keys.get("args").unwrap_or(&Value::Null);
            let invalid = || invalid(plugin, "args", args, "an object whose cni is an object");
            let mut args = match args {
                Value::Null => Map::new(),
                args => args.as_object().cloned().ok_or_else(invalid)?,
            };
            let cni = args.entry("cni").or_insert_with(|| json!({}));
            cni.as_object_mut().ok_or_else(invalid)?.extend(self.args.clone());
            conf.insert("args".to_owned(), args.into());
        }
        Ok(conf)
    }

    /// Returns the configuration of `plugin` for STATUS, which concerns no attachment.
    pub(super) fn node_conf(&self, plugin: &Block) -> Map<String, Value> {
        let mut conf = plugin.keys.clone();
        // It describes the plugin to the runtime; the plugin must not get it.
        conf.shift_remove("capabilities");
        conf.insert("name".to_owned(), self.name.as_str().into());
        conf.insert("cniVersion".to_owned(), self.cni_version.as_str().into());
        conf
    }

    /// Returns the configuration of `plugin` for GC. The list of valid attachments has two keys: the reference
    /// library used the second one before the specification defined the first (`libcni/api.go`).
    pub(super) fn gc_conf(&self, plugin: &Block, valid: Option<&[ValidAttachment]>) -> Map<String, Value> {
        let mut conf = self.node_conf(plugin);
        if let Some(valid) = valid {
            let list: Value =
                valid.iter().map(|a| json!({"containerID": a.container_id, "ifname": a.ifname})).collect();
            conf.insert("cni.dev/valid-attachments".to_owned(), list.clone());
            conf.insert("cni.dev/attachments".to_owned(), list);
        }
        conf
    }
}

fn capabilities(plugin: &Block) -> Result<Vec<&str>, Error> {
    let expected = "true or false, by name";
    match plugin.keys.get("capabilities") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Object(named)) => {
            let mut supported = Vec::new();
            for (name, value) in named {
                if value.as_bool().ok_or_else(|| invalid(plugin, &format!("capabilities.{name}"), value, expected))? {
                    supported.push(name.as_str());
                }
            }
            Ok(supported)
        }
        Some(other) => Err(invalid(plugin, "capabilities", other, expected)),
    }
}

fn invalid(plugin: &Block, key: &str, value: &Value, expected: &str) -> Error {
    wrong_type(&format!("{}.{key}", plugin.path), value, expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::Code;

    fn plugin(conf: &Value) -> Block {
        Block::new("chain[1]", conf).expect("an object")
    }

    fn network() -> RunnableConfiguration {
        let runtime_config = json!({"portMappings": [1], "dns": {"servers": []}, "mac": "m"});
        RunnableConfiguration {
            name: "n".into(),
            cni_version: "1.1.0".into(),
            runtime_config: runtime_config.as_object().expect("an object").clone(),
            ..RunnableConfiguration::default()
        }
    }

    #[test]
    fn a_plugin_gets_the_name_the_version_and_the_previous_result() {
        let own = plugin(&json!({"type": "x", "name": "other", "cniVersion": "0.1.0", "a": {"b": [1, null]}}));
        let previous = json!({"cniVersion": "1.1.0", "ips": []});
        let conf = network().attachment_conf(&own, Some(&previous)).expect("a configuration");
        let wanted = json!({
            "type": "x", "name": "n", "cniVersion": "1.1.0", "a": {"b": [1, null]}, "prevResult": previous,
        });
        assert_eq!(Value::Object(conf), wanted);
        let conf = network().attachment_conf(&own, None).expect("a configuration");
        assert!(!conf.contains_key("prevResult"));
    }

    #[test]
    fn runtime_config_has_the_keys_that_capabilities_list() {
        let able = json!({"type": "x", "capabilities": {"portMappings": true, "mac": false, "ips": true}});
        let conf = network().attachment_conf(&plugin(&able), None).expect("a configuration");
        assert_eq!(conf["runtimeConfig"], json!({"portMappings": [1]}));
        assert!(!conf.contains_key("capabilities"));
        let unable = json!({"type": "x", "capabilities": {"ips": true}});
        let conf = network().attachment_conf(&plugin(&unable), None).expect("a configuration");
        assert!(!conf.contains_key("runtimeConfig"));
    }

    #[test]
    fn capabilities_that_are_not_booleans_are_refused() {
        for (wrong, place) in [(json!([]), "chain[1].capabilities: "), (json!({"a": 1}), "chain[1].capabilities.a: ")] {
            let own = plugin(&json!({"type": "x", "capabilities": wrong}));
            let error = network().attachment_conf(&own, None).expect_err("refused");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(place), "{error}");
        }
    }

    #[test]
    fn args_of_the_network_override_those_of_the_plugin() {
        let args = json!({"a": 1, "b": 2});
        let network = RunnableConfiguration { args: args.as_object().expect("an object").clone(), ..network() };
        for (own, wanted) in [
            (json!({"type": "x"}), json!({"cni": {"a": 1, "b": 2}})),
            (
                json!({"args": {"other": 0, "cni": {"b": 9, "c": 3}}}),
                json!({"other": 0, "cni": {"b": 2, "c": 3, "a": 1}}),
            ),
        ] {
            assert_eq!(network.attachment_conf(&plugin(&own), None).expect("a configuration")["args"], wanted);
        }
        for wrong in [json!([]), json!({"cni": 1})] {
            let error = network.attachment_conf(&plugin(&json!({"args": wrong})), None).expect_err("refused");
            assert!(error.msg.starts_with("chain[1].args: "), "{error}");
        }
    }

    #[test]
    fn gc_has_the_list_under_both_keys_and_no_attachment_keys() {
        let own = plugin(&json!({"type": "x", "capabilities": {"mac": true}}));
        let valid = [ValidAttachment { container_id: "c".into(), ifname: "eth0".into() }];
        let list = json!([{"containerID": "c", "ifname": "eth0"}]);
        let wanted = json!({
            "type": "x", "name": "n", "cniVersion": "1.1.0",
            "cni.dev/valid-attachments": list, "cni.dev/attachments": list,
        });
        assert_eq!(Value::Object(network().gc_conf(&own, Some(&valid))), wanted);
        assert!(!network().gc_conf(&own, None).contains_key("cni.dev/valid-attachments"));
    }
}
