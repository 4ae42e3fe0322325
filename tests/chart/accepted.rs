//! Values that the chart accepts. Each value of `values.yaml` has an effect.

use crate::helm::{
    DEFAULT, agent, leaves, merged, nested, objects, objects_in, of_kind, render, render_with, table, values,
};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The limit for the number of values, without the keys of `config`.
const MAX_VALUES: usize = 56;

/// A value that differs from the default, and the other values without which it has no effect.
fn changes() -> Vec<(String, Value, Value)> {
    table("changes")
}

#[test]
fn each_value_changes_the_objects() {
    for (path, value, context) in changes() {
        let without = match &context {
            Value::Object(keys) if keys.is_empty() => DEFAULT.clone(),
            _ => render(&context).unwrap_or_else(|error| panic!("{context}: {error}")),
        };
        let values = merged(&context, &nested(&path, value));
        let with = render(&values).unwrap_or_else(|error| panic!("{values}: {error}"));
        // All names of a platform with the same directories differ only in the given name.
        let same = path == "global.platform";
        assert_eq!(with == without, same, "{path}");
    }
}

#[test]
fn each_value_of_the_chart_is_tested() {
    let tested: BTreeSet<String> = changes().into_iter().map(|(path, ..)| path).collect();
    let all: BTreeSet<String> = leaves(&values()).into_iter().collect();
    let count = all.iter().filter(|path| !path.starts_with("config.")).count();
    assert!(count <= MAX_VALUES, "{count} values");
    assert_eq!(tested, all, "add a row to changes of cases.yaml for each value of values.yaml");
}

#[test]
fn the_value_outside_global_takes_precedence() {
    let image = |values: &Value| agent(values)["image"].as_str().expect("text").to_owned();
    let global = json!({"global": {"hub": "g.example", "tag": "1"}, "pullPolicy": "Never"});
    assert_eq!(image(&global), "g.example/detour:1");
    let local = merged(&global, &json!({"hub": "l.example", "tag": "2", "pullPolicy": "Always"}));
    assert_eq!(image(&local), "l.example/detour:2");
    assert_eq!(agent(&global)["imagePullPolicy"], "Never");
    assert_eq!(agent(&local)["imagePullPolicy"], "Always");
    assert_eq!(image(&json!({"image": "r.example/a/detour:3", "hub": "l.example"})), "r.example/a/detour:3");
}

/// Returns the keys of the plugin's configuration.
fn config(values: &Value) -> Value {
    let objects = objects(values);
    let text = of_kind(&objects, "ConfigMap")["data"]["config.json"].as_str().expect("text").to_owned();
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn the_guard_is_added_to_the_chain_once() {
    let kinds = |values: Value| -> Vec<String> {
        let chain = config(&values)["chain"].as_array().expect("a chain").clone();
        chain.iter().map(|block| block["type"].as_str().expect("text").to_owned()).collect()
    };
    let guard = json!({"enabled": true});
    let default = ["istio-redirect", "uid-exclude", "dns-exclude", "mesh-guard"];
    assert_eq!(kinds(json!({"guard": guard})), default);
    assert_eq!(kinds(json!({"guard": guard, "config": {"chain": null}})), default);
    let own = json!([{"type": "mesh-guard", "dns": true}, {"type": "istio-redirect"}]);
    assert_eq!(kinds(json!({"guard": guard, "config": {"chain": own}})), ["mesh-guard", "istio-redirect"]);
}

#[test]
fn the_log_level_is_that_of_the_plugin() {
    assert_eq!(config(&json!({}))["log_level"], "info");
    assert_eq!(config(&json!({"logLevel": "debug"}))["log_level"], "debug");
}

/// Who calls the plugin follows from `chained`.
#[test]
fn without_an_entry_in_the_list_multus_calls_the_plugin() {
    let attachment = json!(["default/istio-cni"]);
    let definitions = |values: &Value| {
        let objects = objects(values);
        let found = objects.iter().filter(|object| object["kind"] == "NetworkAttachmentDefinition");
        let name = |object: &Value| {
            let metadata = &object["metadata"];
            format!("{}/{}", metadata["namespace"].as_str().unwrap_or(""), metadata["name"].as_str().unwrap_or(""))
        };
        json!(found.map(name).collect::<Vec<_>>())
    };
    assert_eq!(definitions(&json!({})), json!([]));
    assert_eq!(definitions(&json!({"chained": false})), attachment);
    assert_eq!(definitions(&json!({"chained": false, "primaryPlugin": {"enabled": true}})), json!([]));
    assert_eq!(definitions(&json!({"global": {"platform": "openshift"}})), attachment);
    let list = json!({"global": {"platform": "openshift"}, "chained": true, "cniConfDir": "/etc/cni/net.d"});
    assert_eq!(definitions(&list), json!([]));
}

#[test]
fn the_dialect_of_the_configuration_overrides_istios_value() {
    let native = json!({"global": {"nativeNftables": true}});
    assert_eq!(config(&native)["dialect"], "nftables");
    assert_eq!(config(&merged(&native, &nested("config.dialect", json!("iptables"))))["dialect"], "iptables");
    assert_eq!(config(&json!({})).get("dialect"), None);
}

#[test]
fn nodes_get_the_taint_at_their_creation_where_agents_run_and_the_api_exists() {
    let values = json!({
        "taint": {"enabled": true, "atCreation": true},
        "nodeSelector": {"pool": "mesh"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
    });
    let tolerated = json!({"key": "cni.istio.io/not-ready", "operator": "Exists", "effect": "NoSchedule"});
    for version in ["v1", "v1beta1"] {
        let api = format!("admissionregistration.k8s.io/{version}");
        let (beta, kind) = ("admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy", "MutatingAdmissionPolicy");
        let served = ["--kube-version", "1.35.0", "--api-versions", beta, "--api-versions", &format!("{api}/{kind}")];
        let objects = objects_in(&render_with(&values.to_string(), &served).expect("rendered"));
        let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
        let (policy, binding) = (of_kind(&objects, kind), of_kind(&objects, "MutatingAdmissionPolicyBinding"));
        assert_eq!((&policy["apiVersion"], &binding["apiVersion"]), (&json!(api), &json!(api)));
        assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"]);
        assert_eq!(policy["spec"]["matchConstraints"]["objectSelector"]["matchLabels"], pod["nodeSelector"]);
        assert_eq!(pod["nodeSelector"], json!({"kubernetes.io/os": "linux", "pool": "mesh"}));
        assert!(pod["tolerations"].as_array().expect("a list").contains(&tolerated), "{pod}");
    }
    let refused = render_with(&values.to_string(), &["--kube-version", "1.33.0"]).map(drop).expect_err("no such API");
    assert!(refused.contains("taint.atCreation: the API server has no MutatingAdmissionPolicy; expected"), "{refused}");
}

/// Returns the annotations that the admission policy decides with these values.
fn decided(values: &Value) -> Vec<String> {
    let enabled = json!({"admissionPolicy": {"enabled": true}});
    let objects = objects(&merged(&enabled, values));
    let Some(policy) = objects.iter().find(|object| object["metadata"]["name"] == "detour-bounds") else {
        return Vec::new();
    };
    let validations = policy["spec"]["validations"].as_array().expect("a list");
    let key = |message: &str| message.split('"').nth(1).expect("an annotation").replace("detour.io/exclude-", "");
    validations.iter().map(|validation| key(validation["message"].as_str().expect("text"))).collect()
}

#[test]
fn the_admission_policy_decides_the_annotations_that_the_plugin_reads() {
    let uids = ["uids", "gids", "outbound-ports-for-uids"];
    let with_dns = [&uids[..], &["dns"]].concat();
    let chain = |chain: Value| json!({"config": {"chain": chain}});
    for (values, wanted) in [
        (json!({}), &with_dns[..]),
        (chain(Value::Null), &with_dns[..]),
        (chain(json!([{"type": "istio-redirect"}])), &[]),
        (chain(json!([{"type": "uid-exclude"}])), &uids),
        (chain(json!([{"type": "uid-exclude", "pod_overrides": false}, {"type": "dns-exclude"}])), &["dns"]),
        (chain(json!([{"type": "container-exclude"}])), &["containers"]),
        (chain(json!([{"type": "destination-exclude"}])), &["outbound-ports", "outbound-ip-ranges"]),
        (
            merged(
                &chain(json!([{"type": "dns-exclude"}])),
                &json!({"attachments": [
                    {"name": "a", "chain": [{"type": "container-exclude"}, {"type": "dns-exclude", "pod_overrides": false}]}
                ]}),
            ),
            &["dns", "containers"],
        ),
        (
            merged(
                &chain(json!([{"type": "dns-exclude", "pod_overrides": false}])),
                &json!({"attachments": [
                    {"name": "a", "chain": [{"type": "dns-exclude"}]}
                ]}),
            ),
            &[],
        ),
    ] {
        assert_eq!(decided(&values), wanted, "{values}");
    }
}

#[test]
fn resources_override_the_defaults_key_by_key() {
    let given = json!({"resources": {"limits": {"memory": "1Gi"}}});
    let wanted = json!({"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "1Gi"}});
    assert_eq!(agent(&given)["resources"], wanted);
}

#[test]
fn every_key_of_the_plugin_can_be_given() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("conf/full.conf");
    let mut full: Value = serde_json::from_str(&std::fs::read_to_string(path).expect("readable")).expect("JSON");
    let keys = full.as_object_mut().expect("an object");
    // The chart sets these keys.
    for key in ["cniVersion", "name", "type", "log_level", "auto_dialect", "cni_conf_dir"] {
        keys.remove(key);
    }
    let kubernetes = keys["kubernetes"].as_object_mut().expect("an object");
    kubernetes.retain(|key, _| ["agent_pod_prefixes", "timeout_seconds", "cluster_dns"].contains(&key.as_str()));
    let text = render(&json!({"config": full})).expect("rendered");
    assert_ne!(text, *DEFAULT);
    let primary = json!({
        "primaryPlugin": {"enabled": true}, "chained": false, "cniConfFileName": "00-detour.conf",
        "config": {"clusterNetwork": "/etc/cni/net.d/10-x.conflist", "network_status": "always", "chain": []},
    });
    render(&primary).expect("rendered");
    let executable = json!({"config": {"chain": [{"type": "exclude-ldap", "servers": ["ldap"], "nested": {"a": 1}}]}});
    render(&executable).expect("rendered");
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().expect("a list").iter().map(|item| item.as_str().expect("text")).collect()
}

#[test]
fn the_scc_allows_only_what_the_agent_needs() {
    let objects = objects(&json!({"global": {"platform": "openshift"}}));
    let scc = of_kind(&objects, "SecurityContextConstraints");
    let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let context = &pod["containers"][0]["securityContext"];
    assert_eq!(scc["allowedCapabilities"], context["capabilities"]["add"]);
    assert_eq!((&scc["allowPrivilegedContainer"], &context["privileged"]), (&json!(false), &json!(false)));
    assert_eq!(context["seLinuxOptions"], json!({"type": "spc_t"}));
    let volumes = pod["volumes"].as_array().expect("volumes").iter();
    let kinds = volumes.filter_map(|volume| volume.as_object()?.keys().next_back().map(String::as_str));
    // The API server adds this volume for the service account.
    let kinds: BTreeSet<&str> = kinds.chain(["projected"]).collect();
    assert_eq!(strings(&scc["volumes"]), kinds.into_iter().collect::<Vec<_>>());
}

#[test]
fn the_scc_admits_the_pod_which_has_fewer_rights_than_the_agent() {
    for repair in [true, false] {
        let objects = objects(&json!({"global": {"platform": "openshift"}, "repair": {"enabled": repair}}));
        let (scc, pod) = (of_kind(&objects, "SecurityContextConstraints"), &of_kind(&objects, "Pod")["spec"]);
        let agent = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
        let [context, of_agent] = [pod, agent].map(|spec| &spec["containers"][0]["securityContext"]);
        let [own, allowed] = [&context["capabilities"]["add"], &scc["allowedCapabilities"]].map(strings);
        assert!(own.len() < allowed.len() && own.iter().all(|name| allowed.contains(name)), "{own:?}: {allowed:?}");
        for key in
            ["privileged", "allowPrivilegeEscalation", "readOnlyRootFilesystem", "seLinuxOptions", "seccompProfile"]
        {
            assert_eq!(context[key], of_agent[key], "{key}");
        }
        // The API server adds the type projected only for a token.
        assert_eq!(pod["automountServiceAccountToken"], false);
        for volume in pod["volumes"].as_array().expect("volumes") {
            assert!(volume["hostPath"].is_object() && strings(&scc["volumes"]).contains(&"hostPath"), "{volume}");
        }
        for key in ["serviceAccountName", "nodeSelector", "tolerations"] {
            assert_eq!(pod[key], agent[key], "{key}");
        }
        assert_eq!(pod["containers"][0]["image"], agent["containers"][0]["image"]);
    }
}

/// The controller of a DaemonSet adopts pods that its selector matches.
#[test]
fn no_selector_of_the_chart_matches_the_pod() {
    let everything = json!({"global": {"networkPolicy": {"enabled": true}}, "podMonitor": {"enabled": true}});
    let objects = objects(&everything);
    let labels = &of_kind(&objects, "Pod")["metadata"]["labels"];
    for (kind, selector) in [("DaemonSet", "selector"), ("PodMonitor", "selector"), ("NetworkPolicy", "podSelector")] {
        let selected = of_kind(&objects, kind)["spec"][selector]["matchLabels"].as_object().expect("labels");
        assert!(selected.iter().any(|(label, value)| labels[label] != *value), "{kind}");
    }
    assert_eq!(labels["app.kubernetes.io/part-of"], "detour");
}

#[test]
fn the_pod_mounts_the_directories_of_attachments_too() {
    let directories = |values: &Value| {
        let pod = of_kind(&objects(values), "Pod").clone();
        let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().expect("mounts").clone();
        mounts.iter().map(|mount| mount["mountPath"].as_str().expect("text").to_owned()).collect::<Vec<_>>()
    };
    let multus = "/host/etc/cni/multus/net.d".to_owned();
    assert!(!directories(&json!({})).contains(&multus));
    assert!(directories(&json!({"attachments": [{"name": "a"}]})).contains(&multus));
    assert!(directories(&json!({"global": {"platform": "openshift"}})).contains(&multus));
}
