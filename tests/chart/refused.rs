//! Values that the chart refuses, with the path of the key.

use crate::helm::{leaves, merged, names_unknown_key, nested, refusals, render, render_file, values};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Asserts that helm refuses each values file, and that its message has the text.
#[track_caller]
fn assert_refused(cases: &[(String, Value)]) {
    let values: Vec<Value> = cases.iter().map(|(_, values)| values.clone()).collect();
    for ((text, values), message) in cases.iter().zip(refusals(&values)) {
        assert!(message.contains(text), "{values}: expected {text:?}, got {message}");
    }
}

#[test]
fn an_unknown_key_at_each_level_is_refused() {
    // Each object of values.yaml, and those of lists and of keys that the chart sets itself.
    let all = values();
    let leaves = leaves(&all);
    let objects: BTreeSet<&str> = leaves.iter().filter_map(|path| Some(path.rsplit_once('.')?.0)).collect();
    let mut cases: Vec<(String, &str, Value)> = objects
        .into_iter()
        .map(|path| (format!("/{}", path.replace('.', "/")), "unknown", nested(&format!("{path}.unknown"), json!({}))))
        .collect();
    let block = |kind: &str, key: &str| json!([{"type": kind, key: [1]}]);
    let attachment = |key: &str| json!({"attachments": [{"name": "a", key: block("uid-exclude", "gid")}]});
    let others = [
        ("", "repiar", json!({"repiar": {"enabled": false}})),
        ("/podLabels", "my team", json!({"podLabels": {"my team": "a"}})),
        ("/podAnnotations", "-a", json!({"podAnnotations": {"-a": "b"}})),
        ("/updateStrategy/rollingUpdate", "max", json!({"updateStrategy": {"rollingUpdate": {"max": 1}}})),
        ("/affinity/nodeAffinity", "required", json!({"affinity": {"nodeAffinity": {"required": {}}}})),
        ("/tolerations/0", "keys", json!({"tolerations": [{"operator": "Exists", "keys": "a"}]})),
        ("/metricsFrom/0", "namespace", json!({"metricsFrom": [{"namespace": "monitoring"}]})),
        ("/env", "EXCLUDED_NAMESPACES", json!({"env": {"EXCLUDED_NAMESPACES": "shop"}})),
        ("/config/allow", "uid", json!({"config": {"allow": {"uid": 7}}})),
        ("/config/allow/0", "label", json!({"config": {"allow": [{"label": "a"}]}})),
        ("/config", "log_level", json!({"config": {"log_level": "debug"}})),
        ("/config/kubernetes", "kubeconfig", json!({"config": {"kubernetes": {"kubeconfig": "/k"}}})),
        ("/config/chain/0", "proxy_uids", json!({"config": {"chain": block("istio-redirect", "proxy_uids")}})),
        ("/config/chain/0", "uid", json!({"config": {"chain": block("uid-exclude", "uid")}})),
        ("/attachments/0", "chian", attachment("chian")),
        ("/attachments/0", "clusterNetwork", attachment("clusterNetwork")),
        ("/attachments/0/chain/0", "gid", attachment("chain")),
    ];
    cases.extend(others.map(|(pointer, key, values)| (pointer.to_owned(), key, values)));
    let messages = refusals(&cases.iter().map(|(.., values)| values.clone()).collect::<Vec<_>>());
    for ((pointer, key, values), message) in cases.iter().zip(messages) {
        assert!(names_unknown_key(&message, pointer, key), "{values}: {message}");
    }
}

#[test]
fn a_wrong_value_is_refused() {
    let cases = [
        ("fullnameOverride", json!("Detour")),
        ("fullnameOverride", json!("d".repeat(41))),
        ("hub", json!("registry example")),
        ("image", json!("")),
        ("image", json!("detour:0.2.0")),
        ("image", json!("registry.example/detour@0.2.0")),
        ("global.hub", json!("ghcr.io/")),
        ("config.allow", json!("*")),
        ("config.allow", json!({"kinds": "init"})),
        ("config.allow", json!({"uids": null, "ports": 443})),
        ("config.allow", json!([{"namespaces": null}])),
        ("config.outside_bounds", json!("deny")),
        ("admissionPolicy.istio", json!(["all"])),
        ("tag", json!("a b")),
        ("pullPolicy", json!("always")),
        ("global.platform", json!("openshit")),
        ("global.imagePullPolicy", json!("Always")),
        ("global.imagePullSecrets", json!(["Secret_A"])),
        ("global.imagePullSecrets", json!([{"name": "secret"}])),
        ("global.logging.level", json!("verbose")),
        ("logging.level", json!("cni-agent:debug")),
        ("logLevel", json!("trace")),
        ("excludeNamespaces", json!(["Kube"])),
        ("cniBinDir", json!("opt/cni/bin")),
        ("cniConfDir", json!("/etc/cni net.d")),
        ("cniBinDir", json!("/opt/../etc")),
        ("cniBinDir", json!("/opt/cni/..")),
        ("cniConfDir", json!("/..")),
        ("cniConfDir", json!("/etc/./cni")),
        ("cniNetnsDir", json!("/run/../srv")),
        ("cniConfFileName", json!("dir/10.conf")),
        ("cniConfFileName", json!("10-calico.txt")),
        ("enabled", json!(false)),
        ("prometheusRule.labels", json!({"app.kubernetes.io/name": "mine"})),
        ("cniNetnsDir", json!("netns")),
        ("cni.ownList", json!("auto")),
        ("livePolicy", json!("exclusion")),
        ("istioOwnedCNIConfig", json!("true")),
        ("provider", json!("multus")),
        ("config.dialect", json!("nft")),
        ("config.log_file", json!("/tmp/detour.log")),
        ("config.delegate_timeout_seconds", json!(301)),
        ("config.kubernetes.timeout_seconds", json!(0)),
        ("config.kubernetes.cni_bin_dir", json!("bin")),
        ("definitions", json!("yes")),
        ("onExit", json!("keep")),
        ("repair.initContainerName", json!("check")),
        ("containerExclusion.nriSocket", json!("nri.sock")),
        ("resources.limits.memory", json!("128MB")),
        ("podMonitor.labels.a", json!("b c")),
        ("env.KUBERNETES_SERVICE_PORT", json!(65536)),
        ("revision", json!("1.27")),
        ("nodeSelector", json!({"kubernetes.io/os": "windows"})),
        ("podLabels", json!({"app.kubernetes.io/name": "mine"})),
        ("podLabels", json!({"sidecar.istio.io/inject": "true"})),
        ("updateStrategy.type", json!("Recreate")),
        ("updateStrategy.rollingUpdate.maxUnavailable", json!("half")),
        ("updateStrategy.rollingUpdate.maxUnavailable", json!(-1)),
        ("terminationGracePeriodSeconds", json!(0)),
        ("resourceQuotas.pods", json!(0)),
    ];
    let case = |(path, value): (&str, Value)| (format!("at '/{}", path.replace('.', "/")), nested(path, value));
    assert_refused(&cases.map(case));
}

#[test]
fn a_wrong_value_in_a_list_is_refused() {
    let block = |kind: &str, key: &str, value: Value| json!({"config": {"chain": [{"type": kind, key: value}]}});
    let entry = |key: &str, value: Value| block("istio-redirect", key, value);
    let containers = |key: &str, value: Value| block("container-exclude", key, value);
    let cases = [
        ("/config/chain/0", json!({"config": {"chain": [{"uids": [1]}]}})),
        ("/config/chain/0/type", json!({"config": {"chain": [{"type": "../sh"}]}})),
        ("/config/chain/0/proxy_port", entry("proxy_port", json!(70000))),
        ("/config/chain/0/inbound_interception_mode", entry("inbound_interception_mode", json!("tproxy"))),
        ("/config/chain/0/redirect_dns", entry("redirect_dns", json!("yes"))),
        ("/config/chain/0/outbound_ports_exclude/0", entry("outbound_ports_exclude", json!(["http"]))),
        ("/config/chain/0/inbound_tproxy_mark", entry("inbound_tproxy_mark", json!(0))),
        ("/config/chain/0/host_ipv4_loopback_cidr", entry("host_ipv4_loopback_cidr", json!("::1"))),
        ("/config/chain/0/pod_overrides", json!({"config": {"chain": [{"type": "uid-exclude", "pod_overrides": 1}]}})),
        ("/config/chain/0/protocols/0", json!({"config": {"chain": [{"type": "dns-exclude", "protocols": ["sctp"]}]}})),
        ("/config/chain/0/containers/0", containers("containers", json!(["vault-", "app"]))),
        ("/config/chain/0/containers", containers("containers", json!("Vault"))),
        ("/config/chain/0/scope", containers("scope", json!("tcp"))),
        ("/attachments/0", json!({"attachments": [{"namespace": "default"}]})),
        ("/attachments/0/name", json!({"attachments": [{"name": "Exclude_DNS"}]})),
        ("/attachments/0/name", json!({"attachments": [{"name": "a".repeat(64)}]})),
        ("/attachments/0/namespaces/0", json!({"attachments": [{"name": "a", "namespaces": ["*"]}]})),
        ("/attachments/0/log_level", json!({"attachments": [{"name": "a", "log_level": "loud"}]})),
        ("/tolerations/0/effect", json!({"tolerations": [{"effect": "NoRun"}]})),
        ("/tolerations/0/operator", json!({"tolerations": [{"operator": "Is"}]})),
        ("/metricsFrom/0/ipBlock/cidr", json!({"metricsFrom": [{"ipBlock": {"cidr": "10.0.0.0"}}]})),
        ("/excludeNamespaces", json!({"excludeNamespaces": ["a", "a"]})),
    ];
    assert_refused(&cases.map(|(pointer, values)| (format!("at '{pointer}'"), values)));
}

#[test]
fn values_that_contradict_each_other_are_refused() {
    let rolling = |values: Value| json!({"updateStrategy": values});
    let cases = [
        ("at '/primaryPlugin/enabled': value must be true", json!({"config": {"clusterNetwork": "ovn"}})),
        ("at '/primaryPlugin/enabled': value must be true", json!({"config": {"network_status": "always"}})),
        (
            "at '/global/networkPolicy/enabled': value must be true",
            json!({"metricsFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}]}),
        ),
        (
            "at '/updateStrategy/rollingUpdate/maxUnavailable'",
            rolling(json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 1}})),
        ),
        (
            "at '/updateStrategy/rollingUpdate'",
            rolling(json!({"type": "OnDelete", "rollingUpdate": {"maxUnavailable": 1}})),
        ),
    ];
    assert_refused(&cases.map(|(text, values)| (text.to_owned(), values)));
    // The templates refuse these values, one at a time.
    let cases = [
        (
            "repair: expected at most one of repairPods and deletePods, got both; to delete pods",
            json!({"repair": {"deletePods": true}}),
        ),
        ("cniBinDir, cniConfDir: both are \"/opt/cni\"", json!({"cniBinDir": "/opt/cni", "cniConfDir": "/opt/cni"})),
        (
            "containerExclusion.nriSocket: expected the path",
            json!({"containerExclusion": {"enabled": true, "nriSocket": ""}}),
        ),
        ("chained: with true", json!({"chained": true, "global": {"platform": "openshift"}})),
        (
            "cni.ownList: with true, the agent copies the cluster network's configuration list, but chained is false",
            json!({"cni": {"ownList": true}, "global": {"platform": "openshift"}}),
        ),
        ("istioOwnedCNIConfig: with true", json!({"istioOwnedCNIConfig": true, "chained": false})),
        (
            "cni.ownList: false, but istioOwnedCNIConfig is true",
            json!({"istioOwnedCNIConfig": true, "cni": {"ownList": false}}),
        ),
        ("taint.atCreation: expected taint.enabled=true", json!({"taint": {"atCreation": true}})),
        (
            "taint.atCreation: expected nodeSelector instead of a required node affinity",
            json!({
                "taint": {"enabled": true, "atCreation": true},
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}}},
            }),
        ),
        (
            "admissionPolicy.istio: expected admissionPolicy.enabled=true",
            json!({"admissionPolicy": {"istio": ["traffic"]}}),
        ),
        (
            "admissionPolicy.enabled: no effect, because excludeNamespaces contains \"*\"",
            json!({"admissionPolicy": {"enabled": true}, "excludeNamespaces": ["*"]}),
        ),
        (
            "config.chain[2].allow: config.chain[0].allow is already set for dns-exclude; remove one of them",
            json!({
                "admissionPolicy": {"enabled": true},
                "config": {"chain": [
                    {"type": "dns-exclude", "allow": []}, {"type": "uid-exclude", "allow": []}, {"type": "dns-exclude", "allow": {}},
                ]},
            }),
        ),
        (
            "cniConfFileName: has no effect with attachments",
            json!({"chained": false, "cniConfFileName": "a.conf", "attachments": [{"name": "a"}]}),
        ),
    ];
    for (text, values) in cases {
        assert_refused(&[(text.to_owned(), values)]);
    }
}

#[test]
fn an_admission_policy_needs_functions_of_kubernetes_1_31() {
    let values = json!({"admissionPolicy": {"enabled": true}}).to_string();
    let message = render_file(&values, "1.30.9").expect_err("refused");
    let wanted = "admissionPolicy.enabled: expected Kubernetes 1.31 or later";
    assert!(message.contains(wanted) && message.contains("got v1.30.9"), "{message}");
    render_file(&values, "1.31.0-eks-1").expect("rendered");
}

#[test]
fn a_value_of_another_type_is_refused_for_each_value() {
    let wrong = json!([{"wrong": []}]);
    let case = |leaf: &String| (format!("'/{}", leaf.replace('.', "/")), nested(leaf, wrong.clone()));
    assert_refused(&leaves(&values()).iter().map(case).collect::<Vec<_>>());
}

/// The values without which the chart can't be rendered, besides objects. `helm upgrade --reuse-values` leaves out those
/// that the previous chart did not have.
const REQUIRED: [&str; 6] =
    ["cni.credentials", "image", "definitions", "onExit", "repair.enabled", "repair.repairPods"];

#[test]
fn a_missing_value_is_refused_or_means_the_empty_value() {
    let all = values();
    let leaves = leaves(&all);
    let objects: BTreeSet<&str> = leaves.iter().filter_map(|path| Some(path.rsplit_once('.')?.0)).collect();
    for path in REQUIRED.into_iter().chain(objects) {
        // The keys of resources and labels are optional.
        if path.starts_with("global.defaultResources.") || path.ends_with(".labels") {
            continue;
        }
        let message = render(&nested(path, Value::Null)).map(drop).expect_err(path);
        assert!(message.contains(&format!(": {path}: missing; expected a value")), "{path}: {message}");
        assert!(message.contains("--reset-then-reuse-values"), "{message}");
    }
    let (mut missing, mut empty) = (json!({}), json!({}));
    for path in leaves.iter().filter(|path| !REQUIRED.contains(&path.as_str())) {
        let value = match all.pointer(&format!("/{}", path.replace('.', "/"))).expect("a value") {
            Value::Array(_) => json!([]),
            Value::Object(_) => json!({}),
            Value::Bool(false) => json!(false),
            Value::String(text) if text.is_empty() => json!(""),
            _ => continue,
        };
        // Without chain, the agent adds the default sub-plugins. One of the two hubs is required.
        if path != "config.chain" && path != "global.hub" {
            missing = merged(&missing, &nested(path, Value::Null));
            empty = merged(&empty, &nested(path, value));
        }
    }
    assert_eq!(render(&missing).expect("rendered"), render(&empty).expect("rendered"));
}

#[test]
fn without_a_registry_the_error_tells_how_to_get_an_image() {
    let defaults = values();
    assert_eq!((&defaults["hub"], &defaults["global"]["hub"]), (&json!(""), &json!("")), "not a registry of others");
    let none = json!({"global": {"hub": ""}});
    let message = render(&none).expect_err("refused");
    let version = env!("CARGO_PKG_VERSION");
    let expected = format!(
        "- hub: no image is published; build it with hack/image.sh, push it with \"skopeo copy --all \
         oci:target/image:{version} docker://registry.example/mesh/detour:{version}\", and set hub to this registry: \
         --set hub=registry.example/mesh\n"
    );
    assert!(message.contains(&format!("the values do not name an image of detour:\n{expected}")), "{message}");
    assert!(render(&merged(&none, &json!({"image": "registry.example/a/detour:1"}))).is_ok());
}

#[test]
fn all_wrong_values_are_named_at_once() {
    let values = json!({"tgg": "1", "repair": {"on": true}, "logLevel": "x"});
    let message = render(&values).map(drop).expect_err("refused");
    for path in ["'tgg'", "'/repair'", "'/logLevel'"] {
        assert!(message.contains(path), "{message}");
    }
}
