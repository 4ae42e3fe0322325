//! Manifests with several objects: pods, pod templates, lists and documents.

use crate::run::{detour, file};
use serde_json::{Value, json};

const CONTAINERS: &str = "[{name: app, securityContext: {runAsUser: 1000}}, {name: istio-proxy}]";

/// A Deployment as `istioctl kube-inject` prints it, one that is not injected, a CronJob, a pod, and others.
const ALL: &str = include_str!("manifests.yaml");

fn pods(said: &Value) -> Vec<(&str, &Value, bool)> {
    let list = said.as_array().expect("a list");
    list.iter()
        .map(|one| (one["pod"].as_str().expect("a name"), &one["template_of"], one["redirected"] == true))
        .collect()
}

#[test]
fn every_pod_and_pod_template_is_explained() {
    let run = detour(&["explain", "-f", "-", "-o", "json"], ALL, &[]);
    let said = run.json();
    assert_eq!(
        pods(&said),
        [
            ("shop/web-*", &json!("Deployment shop/web"), true),
            ("shop/db-*", &json!("StatefulSet shop/db"), false),
            ("jobs/web-*", &json!("CronJob jobs/web"), true),
            ("shop/alone", &Value::Null, true),
        ]
    );
    let excluded: Vec<&Value> = said.as_array().expect("a list").iter().map(|one| &one["exempt"][0]["who"]).collect();
    assert_eq!(excluded, [&Value::Null, &Value::Null, &json!("uid 7"), &Value::Null], "the namespace in the same file");
    assert_eq!(said[1]["warnings"][0]["code"], "template-without-sidecar");
    assert_eq!(run.stderr, "note: -: skipped objects without a pod: Service shop/web, ConfigMap settings\n");
    let yaml = detour(&["explain", "-f", "-", "-o", "yaml"], ALL, &[]).stdout;
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).expect("YAML"), said);
    let table = detour(&["explain", "-f", "-"], ALL, &[]).stdout;
    let headings: Vec<&str> = table.lines().filter(|line| line.ends_with("/web") || line.ends_with("/alone")).collect();
    assert_eq!(headings, ["Deployment shop/web", "CronJob jobs/web", "Pod shop/alone"], "{table}");
    assert!(table.contains("Pod shop/web-* of Deployment shop/web is redirected: "), "{table}");
}

#[test]
fn pods_are_selected_by_name_kind_and_namespace() {
    let explain = |more: &[&str]| detour(&[&["explain", "-f", "-", "-o", "json"], more].concat(), ALL, &[]);
    assert_eq!(explain(&["cronjob/web"]).json()["template_of"], "CronJob jobs/web");
    assert_eq!(explain(&["-n", "jobs"]).json()["template_of"], "CronJob jobs/web");
    assert_eq!(explain(&["web", "-n", "shop"]).json()["template_of"], "Deployment shop/web");
    assert_eq!(pods(&explain(&["web"]).json()).len(), 2);
    let run = explain(&["cronjob/db"]);
    let said = "expected a pod or an object with a pod template named \"cronjob/db\", got Deployment shop/web, ";
    assert!(run.code == 2 && run.stderr.contains(said), "{run:?}");
    let unnamed = "kind: Job\nmetadata: {name: j}\nspec: {template: {spec: {containers: [{name: c}]}}}";
    let run = detour(&["explain", "-f", "-", "-n", "shop", "-o", "json"], unnamed, &[]);
    assert_eq!(run.json()["pod"], "shop/j-*", "as kubectl -n does");
}

#[test]
fn commands_for_one_pod_refuse_several_and_list_them() {
    let trace = ["trace", "-f", "-", "--from", "uid=1000", "--to", "1.2.3.4:5/tcp"];
    for arguments in [&trace[..], &["explain", "-f", "-", "--rules", "nft"], &["explain", "-f", "-", "--format", "svg"]]
    {
        let run = detour(arguments, ALL, &[]);
        assert!(run.code == 2 && run.stdout.is_empty(), "{run:?}");
        let said = "expected one pod or pod template, got Deployment shop/web, StatefulSet shop/db, CronJob jobs/web, \
                    Pod shop/alone; select one by name";
        assert!(run.stderr.contains(said), "{run:?}");
        assert_eq!(detour(&[arguments, &["alone"]].concat(), ALL, &[]).code, 0);
    }
}

#[test]
fn an_invalid_pod_does_not_hide_the_others() {
    let wrong = ALL.replace(
        "{name: alone, namespace: shop, annotations: {",
        "{name: alone, annotations: {detour.io/exclude-uids: root, ",
    );
    let run = detour(&["explain", "-f", "-", "-o", "json"], &wrong, &[]);
    let report: Value = serde_json::from_str(&run.stdout).expect("JSON");
    assert_eq!((run.code, pods(&report).len()), (1, 4));
    let failing = report.as_array().expect("a list").iter().filter_map(|pod| pod["add_fails"].as_str());
    let causes: Vec<&str> = failing.collect();
    let start = "annotation \"detour.io/exclude-uids\" of pod default/alone: ";
    assert!(causes.len() == 1 && causes[0].starts_with(start), "{causes:?}");
}

#[test]
fn a_namespace_file_must_contain_the_pods_namespace() {
    let pod = "kind: Pod\nmetadata: {name: web, namespace: shop}\nspec: {containers: [{name: app}]}\n";
    for (text, got) in [
        (pod, "Pod shop/web"),
        ("kind: Namespace\nmetadata: {name: other}\n", "Namespace other"),
        ("kind: Secret\nmetadata: {name: x}\n", "Secret x"),
    ] {
        let namespace = file("ns.yaml", text);
        let run = detour(&["explain", "-f", "-", "--namespace-file", &namespace], pod, &[]);
        assert_eq!(run.code, 2, "{run:?}");
        let said = format!("{}: expected Namespace shop of Pod shop/web, got {got}", &*namespace);
        assert!(run.stderr.contains(&said), "{run:?}");
    }
}

#[test]
fn a_single_plugin_applies_to_pods_that_select_its_network() {
    let pod = |networks: &str| {
        format!(
            "kind: Pod\nmetadata: {{name: web, namespace: shop, annotations: {{sidecar.istio.io/status: x{networks}}}}}\n\
             spec: {{containers: {CONTAINERS}}}\n"
        )
    };
    let plugin =
        json!({"cniVersion": "1.0.0", "name": "istio-cni", "type": "istio-cni", "kubernetes": {"kubeconfig": "/k"}});
    let list = file("10-x.conflist", &json!({"cniVersion": "1.0.0", "name": "n", "plugins": [plugin]}).to_string());
    let plugin = file("istio-cni.conf", &plugin.to_string());
    let explain = |conf: &str, networks: &str| {
        detour(&["explain", "-f", "-", "--config", conf, "-o", "json"], &pod(networks), &[]).json()
    };
    let key = "k8s.v1.cni.cncf.io/networks";
    for (networks, found) in [
        (String::new(), "is not set"),
        (format!(", {key}: ''"), "selects no network"),
        (format!(", {key}: 'alt-net, istio-cni-2'"), "selects alt-net, istio-cni-2"),
    ] {
        let said = explain(&plugin, &networks);
        let expected = format!("not redirected: the pod does not select network istio-cni: annotation {key} {found}");
        assert_eq!((&said["decision"], &said["redirected"]), (&json!(expected), &json!(false)));
        assert_eq!(said["warnings"][0]["code"], "network-not-selected");
        assert_eq!(explain(&list, &networks)["redirected"], true, "a configuration list applies to every pod");
    }
    for networks in [
        format!(", {key}: default/istio-cni"),
        format!(", {key}: '[{{\"name\": \"istio-cni\", \"namespace\": \"default\"}}]'"),
        ", v1.multus-cni.io/default-network: istio-cni".into(),
    ] {
        assert_eq!(explain(&plugin, &networks)["redirected"], true, "{networks}");
    }
    // Multus uses the installed configuration only for a definition of the selected namespace.
    for (networks, object) in
        [(format!(", {key}: istio-cni"), "shop/istio-cni"), (format!(", {key}: pay/istio-cni"), "pay/istio-cni")]
    {
        let said = explain(&plugin, &networks);
        let why = format!("the pod selects {object}, and no such NetworkAttachmentDefinition is known");
        assert_eq!((&said["decision"], &said["redirected"]), (&json!(format!("not redirected: {why}")), &json!(false)));
        let next =
            format!("select default/istio-cni in annotation {key}; if {object} exists, add it: --definitions FILE");
        assert_eq!(said["warnings"][0]["next"], next);
    }
    let trace = ["trace", "-f", "-", "--from", "uid=1000", "--to", "1.2.3.4:5/tcp", "-o", "json", "--config", &plugin];
    assert_eq!(detour(&trace, &pod(""), &[]).json()["arrives_at"], "direct");
}
