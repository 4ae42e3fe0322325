//! `cni.ownList`: where the agent writes a configuration list of its own instead of editing the cluster network's.

use crate::helm::{agent, chart_file, flag, merged, nested, render};
use detour_cni::agent::install::{PLATFORMS, Platform};
use serde_json::{Value, json};

fn own_list(values: &Value) -> Option<String> {
    flag(&agent(values), "own-list")
}

fn chain(entries: Value) -> Value {
    nested("config.chain", entries)
}

/// Under Multus, the runtime reads Multus's configuration, and the plugin has a file in Multus's directory.
#[test]
fn it_is_on_by_default_on_each_platform_where_the_plugin_is_in_the_cluster_networks_list() {
    for name in Platform::names() {
        let is_chained = Platform::named(name).expect("a name").chained;
        let wanted = is_chained.then(|| "true".to_owned());
        assert_eq!(own_list(&nested("global.platform", json!(name))), wanted, "{name}");
    }
    assert!(PLATFORMS.iter().any(|platform| !platform.chained));
    assert_eq!(own_list(&json!({"chained": false})), None);
}

#[test]
fn it_is_on_by_default_only_for_a_release_that_redirects() {
    let exclusions = json!([{"type": "uid-exclude", "uids": [1337]}]);
    let redirection = json!([{"type": "uid-exclude", "uids": [1337]}, {"type": "istio-redirect"}]);
    for (values, wanted) in [
        (chain(redirection), "true"),
        // Without chain, the agent adds the default sub-plugins.
        (chain(Value::Null), "true"),
        (chain(exclusions.clone()), "false"),
        (chain(json!([])), "false"),
        (chain(json!([{"type": "exclude-ldap"}])), "false"),
        // Attachments under Multus beside an entry of the cluster network's list.
        (json!({"attachments": [{"name": "excludedns", "chain": [{"type": "uid-exclude"}]}]}), "true"),
        // The runtime reads the primary plugin's own file.
        (json!({"primaryPlugin": {"enabled": true}}), "false"),
    ] {
        assert_eq!(own_list(&values).as_deref(), Some(wanted), "{values}");
        // The value overrides the default.
        for given in [true, false] {
            let values = merged(&values, &nested("cni.ownList", json!(given)));
            assert_eq!(own_list(&values), Some(given.to_string()), "{values}");
        }
        let istio = merged(&values, &json!({"istioOwnedCNIConfig": true}));
        assert_eq!(own_list(&istio).as_deref(), Some("true"), "{istio}");
        let istio = merged(&values, &json!({"istioOwnedCNIConfig": false}));
        assert_eq!(own_list(&istio).as_deref(), Some(wanted), "{istio}");
    }
    let ambient: Value = serde_saphyr::from_str(&chart_file("values-ambient.yaml")).expect("YAML");
    assert_eq!(own_list(&ambient).as_deref(), Some("false"));
    let excludedns: Value = serde_saphyr::from_str(&chart_file("values-excludedns.yaml")).expect("YAML");
    assert_eq!(own_list(&excludedns), None);
    let without_multus = merged(&excludedns, &json!({"global": {"platform": "kubernetes"}, "attachments": null}));
    assert_eq!(own_list(&without_multus).as_deref(), Some("false"));
}

fn excludes_on_openshift() -> Value {
    merged(&nested("global.platform", json!("openshift")), &chain(json!([{"type": "uid-exclude"}])))
}

#[test]
fn exclusions_only_never_replace_the_attachment_that_redirects() {
    let error = render(&excludes_on_openshift()).expect_err("refused");
    assert!(error.contains("would replace default/istio-cni"), "{error}");
    let others = [
        nested("attachments", json!([{"name": "excludedns"}])),
        nested("cni.multusChain", json!("/run/chain")),
        nested("config.chain", json!([{"type": "uid-exclude"}, {"type": "own-redirect"}])),
    ];
    for values in others {
        let rendered = render(&merged(&excludes_on_openshift(), &values)).expect("rendered");
        let chain = values.get("cni").is_some();
        assert_eq!(rendered.contains("attachments.json: |\n    []"), values.get("attachments").is_none(), "{rendered}");
        assert_eq!(rendered.contains("kind: NetworkAttachmentDefinition"), !chain, "{rendered}");
    }
}
