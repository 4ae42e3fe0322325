//! The configurations in `conf/` and the table of their keys.

use detour_cni::agent::install::default_chain;
use detour_cni::cni::{Bounds, CniCommand, NetConf, NodeConf, SUB_PLUGINS};
use detour_cni::sub_plugins::check;
use serde_json::{Value, json};
use std::path::Path;

const FULL: &str = include_str!("../../conf/full.conf");
const TABLE: &str = include_str!("../../conf/README.md");

fn parse(conf: &Value) -> NetConf {
    NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("accepted")
}

fn types(conf: &NetConf) -> Vec<&str> {
    conf.chain.iter().filter_map(|block| block.keys["type"].as_str()).collect()
}

const ALL_THREE: [&str; 3] = ["istio-redirect", "uid-exclude", "dns-exclude"];

/// The configuration of a plugin, or of the own plugin of a list.
#[test]
fn samples_are_accepted_without_warnings() {
    for (text, chain, is_primary) in [
        (include_str!("../../conf/openshift-istio-cni.conf"), &ALL_THREE[..], false),
        (include_str!("../../conf/99-exclude-dns.conf"), &ALL_THREE[1..], false),
        (include_str!("../../conf/openshift-vault.conf"), &["istio-redirect", "container-exclude"], false),
        (include_str!("../../conf/bounds.conf"), &SUB_PLUGINS[..5], false),
        (include_str!("../../conf/chained.conflist"), &ALL_THREE, false),
        (include_str!("../../conf/ambient.conflist"), &["uid-exclude", "dns-exclude", "destination-exclude"], false),
        (include_str!("../../conf/primary-openshift.conf"), &[], true),
        (include_str!("../../conf/primary-bridge.conf"), &ALL_THREE, true),
        (include_str!("../../conf/primary-own-exclusion.conf"), &["istio-redirect", "exclude-backup"], true),
    ] {
        let conf = detour_cni::cni::configuration(Path::new("f"), text.as_bytes()).expect("accepted");
        assert_eq!(types(&conf), chain);
        assert_eq!(conf.primary.is_some(), is_primary, "{text}");
        assert!(is_primary || conf.kubernetes.excludes("kube-system"));
        assert_eq!(conf.warnings, [""; 0]);
    }
}

#[test]
fn the_sample_of_bounds_is_valid() {
    let conf = NetConf::parse(include_bytes!("../../conf/bounds.conf"), CniCommand::Add, "x").expect("accepted");
    assert!(conf.bounds.is_set());
    let check = |bounds: &Bounds| check(&conf.chain, bounds, &conf.args, &|_| None, true);
    assert_eq!(check(&conf.bounds), Ok(()));
    let wrong = Bounds { allow: Some(json!({"uid": 7})), ..conf.bounds.clone() };
    assert!(check(&wrong).is_err_and(|error| error.msg.contains("allow.uid: unknown key")));
}

/// Compares types and UIDs; a sample may also list defaults.
#[test]
fn samples_chart_and_installation_have_the_same_exclusions() {
    let core = |chain: &Value| -> Vec<(Value, Value)> {
        let blocks = chain.as_array().expect("an array");
        blocks.iter().map(|block| (block["type"].clone(), block["uids"].clone())).collect()
    };
    let json = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    let list = json(include_str!("../../conf/chained.conflist"));
    let values: Value =
        serde_saphyr::from_str(include_str!("../../manifests/chart/values.yaml")).expect("the chart's values");
    for (place, chain) in [
        ("conf/openshift-istio-cni.conf", &json(include_str!("../../conf/openshift-istio-cni.conf"))["chain"]),
        ("conf/chained.conflist", &list["plugins"].as_array().expect("an array").last().expect("a member")["chain"]),
        ("manifests/chart/values.yaml", &values["config"]["chain"]),
    ] {
        assert_eq!(core(chain), core(&default_chain()), "{place}");
    }
}

/// The file is that of Multus's installer, except for the type.
#[test]
fn the_configuration_file_of_multus_is_accepted() {
    let conf = parse(&json!({
        "cniVersion": "0.3.1", "name": "multus-cni-network", "type": "detour", "logLevel": "verbose",
        "logToStderr": true, "kubeconfig": "/etc/cni/net.d/multus.d/multus.kubeconfig",
        "capabilities": {"portMappings": true, "bandwidth": true}, "namespaceIsolation": true,
        "globalNamespaces": "default,shop",
        "delegates": [{"cniVersion": "0.3.1", "name": "cbr0", "plugins": [{"type": "flannel"}, {"type": "portmap"}]}],
    }));
    let kubeconfig = conf.kubernetes.kubeconfig.as_deref().and_then(Path::to_str);
    assert_eq!(kubeconfig, Some("/etc/cni/net.d/multus.d/multus.kubeconfig"));
    assert!(conf.primary.is_some_and(|primary| primary.global_namespaces == ["default", "shop"]));
    assert_eq!((conf.chain, conf.warnings), (vec![], vec![]));
}

#[test]
fn the_node_configuration_equals_that_of_an_installation() {
    let text = include_str!("../../conf/node.json");
    let (node, warnings) = NodeConf::parse("conf/node.json", text.as_bytes()).expect("accepted");
    assert_eq!(warnings, [""; 0]);
    let json = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    assert_eq!(json(&node.text()), json(text), "every key");
    for key in json(text).as_object().expect("an object").keys() {
        assert!(TABLE.contains(&format!("`{key}`")) || key == "kubernetes", "{key}");
    }
}

#[test]
fn the_full_configuration_has_the_defaults() {
    let full: Value = serde_json::from_str(FULL).expect("JSON");
    let short = json!({"cniVersion": "1.1.0", "name": full["name"], "type": "detour", "chain": full["chain"]});
    assert_eq!(parse(&full), parse(&short));
    assert_eq!(types(&parse(&full)), SUB_PLUGINS);
}

#[test]
fn the_table_has_every_key_of_the_full_configuration() {
    fn keys(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(object) => object.iter().for_each(|(key, value)| {
                found.push(format!("`{key}`"));
                keys(value, found);
            }),
            Value::Array(items) => items.iter().for_each(|item| keys(item, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    keys(&serde_json::from_str(FULL).expect("JSON"), &mut found);
    let missing: Vec<_> = found.iter().filter(|key| !TABLE.contains(*key)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn the_full_configuration_has_every_key_of_the_table() {
    let full: Value = serde_json::from_str(FULL).expect("JSON");
    let sections = TABLE.split("\n## ").filter_map(|section| section.split_once('\n'));
    let mut tables = 0;
    for (heading, section) in sections {
        let name = heading.split('`').nth(1).unwrap_or(heading);
        let is_of_name = |block: &&Value| block["type"] == name;
        let block = full["chain"].as_array().expect("an array").iter().find(is_of_name);
        let object = match name {
            "Top level" => &full,
            "kubernetes" => &full["kubernetes"],
            _ => match block {
                Some(block) => block,
                None => continue,
            },
        };
        tables += 1;
        let rows = section.lines().skip_while(|line| !line.starts_with("| key ")).skip(2);
        for row in rows.take_while(|line| line.starts_with('|')) {
            let cell = row.split('|').nth(1).expect("a cell");
            for key in cell.split('`').skip(1).step_by(2) {
                assert!(object.get(key).is_some(), "conf/full.conf: {heading}: {key:?} is missing");
            }
        }
    }
    assert_eq!(tables, 2 + SUB_PLUGINS.len());
}
