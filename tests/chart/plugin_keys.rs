//! The keys of the plugin's configuration in the schema. `src/cni/netconf` compares the keys of the top level and of
//! `kubernetes` with the schema.

use crate::helm::schema;
use detour_cni::cni::{CniCommand, NetConf};
use detour_cni::plugin::{TargetNode, validate};
use serde_json::{Value, json};
use std::collections::BTreeSet;

fn check(conf: &Value) -> Result<Vec<String>, String> {
    let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").map_err(|error| error.msg)?;
    let node = TargetNode { is_installed: &|_, _| Some(true), group_file: None, may_name_source: true };
    validate(&conf, node).map_err(|error| error.msg)
}

fn with_chain(entry: Value) -> Result<Vec<String>, String> {
    check(&json!({"cniVersion": "1.1.0", "name": "n", "type": "detour", "chain": [entry]}))
}

/// Returns the keys that the plugin accepts in an entry of `chain`, from its message for an unknown key.
fn keys_of(sub_plugin: &str) -> BTreeSet<String> {
    let error = with_chain(json!({"type": sub_plugin, "?": 1})).expect_err("an unknown key");
    let list = error.split("expected one of ").nth(1).unwrap_or_else(|| panic!("{error}"));
    list.split("; ").next().expect("a list").split(", ").map(str::to_owned).collect()
}

#[test]
fn the_schema_has_the_keys_of_each_sub_plugin() {
    let schema = schema();
    for (sub_plugin, definition) in [
        ("istio-redirect", "istioRedirect"),
        ("uid-exclude", "uidExclude"),
        ("dns-exclude", "dnsExclude"),
        ("container-exclude", "containerExclude"),
    ] {
        let properties = schema["definitions"][definition]["properties"].as_object().expect("an object");
        let keys: BTreeSet<String> = properties.keys().cloned().collect();
        assert_eq!(keys, keys_of(sub_plugin), "{definition}");
    }
    let entries = schema["definitions"]["chainEntry"]["allOf"].as_array().expect("a list");
    let types: BTreeSet<&str> =
        entries.iter().map(|entry| entry["if"]["properties"]["type"]["const"].as_str().expect("text")).collect();
    assert_eq!(types, detour_cni::cni::SUB_PLUGINS.into_iter().collect());
}

#[test]
fn the_plugin_knows_each_key_of_the_schema() {
    let schema = schema();
    for definition in ["config", "attachment"] {
        for key in schema["definitions"][definition]["properties"].as_object().expect("an object").keys() {
            if definition == "attachment" && ["name", "namespace", "namespaces"].contains(&key.as_str()) {
                continue;
            }
            let warnings = check(&json!({"cniVersion": "1.1.0", "name": "n", "type": "excludedns", key: null}));
            assert_eq!(warnings, Ok(Vec::new()), "{definition}: {key}");
        }
    }
}
