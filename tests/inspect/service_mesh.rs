//! The guide to OpenShift Service Mesh (docs/openshift.md): its injection template, with what Istio's
//! injector makes of it (`tests/golden/injected/excludedns.yaml`), and detour's decisions for these pods.
//! `tests/apiserver/service_mesh.rs` runs the commands of the guide.

use crate::run::{Run, detour};
use detour_cni::networks;
use detour_cni::pod::Pod;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn path(within: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(within)
}

fn read(within: &str) -> String {
    std::fs::read_to_string(path(within)).unwrap_or_else(|error| panic!("{within}: {error}"))
}

/// The injector's values, followed by the injected pods.
fn recorded() -> (Value, Vec<Value>) {
    let mut all: Vec<Value> =
        serde_saphyr::from_multiple(&read("tests/golden/injected/excludedns.yaml")).expect("YAML");
    let pods = all.split_off(1);
    (all.remove(0), pods)
}

fn recorded_pod(name: &str) -> Value {
    let (_, pods) = recorded();
    pods.into_iter().find(|pod| pod["metadata"]["name"] == name).unwrap_or_else(|| panic!("pod {name} not found"))
}

/// The networks that a pod selects, as `NAMESPACE/NAME`.
fn selected(pod: &Value) -> Vec<String> {
    let mut facts = Pod { namespace: "shop".into(), ..Pod::default() };
    for (key, value) in pod["metadata"]["annotations"].as_object().into_iter().flatten() {
        facts.annotations.insert(key.clone(), value.as_str().expect("text").to_owned());
    }
    let selections = networks::networks(&facts).expect("valid annotation");
    selections.elements.iter().map(|one| one.object.to_string()).collect()
}

fn explain(pod: &Value, arguments: &[&str]) -> Value {
    detour(&[&["explain", "-o", "json", "-f", "-"], arguments].concat(), &pod.to_string(), &[]).json()
}

#[test]
fn the_recorded_pods_were_injected_with_the_shipped_template() {
    let patch: Value =
        serde_saphyr::from_str(&read("manifests/openshift-service-mesh/injection-template.yaml")).expect("YAML");
    assert_eq!(recorded().0, patch["spec"]["values"], "run hack/record-injected.sh");
}

#[test]
fn the_template_adds_the_attachment_to_each_form_of_the_annotation_and_keeps_the_other_networks() {
    for (name, networks) in [
        ("no-networks", &["default/istio-cni", "default/excludedns"][..]),
        ("comma", &["shop/alt-net", "default/istio-cni", "default/excludedns"]),
        ("json", &["shop/alt-net", "default/istio-cni", "default/excludedns"]),
        ("selected", &["default/excludedns", "default/istio-cni"]),
    ] {
        assert_eq!(selected(&recorded_pod(name)), networks, "{name}");
    }
    assert!(recorded_pod("json")["metadata"]["annotations"].to_string().contains(r#"\"interface\": \"net7\""#));
}

#[test]
fn pods_that_select_their_templates_or_are_gateways_or_are_not_injected_do_not_get_the_attachment() {
    for (name, networks) in [("templates", &["default/istio-cni"][..]), ("gateway", &[]), ("not-injected", &[])] {
        assert_eq!(selected(&recorded_pod(name)), networks, "{name}");
    }
}

#[test]
fn beside_the_operators_plugin_detour_excludes_uid_1337_and_does_not_redirect() {
    for name in ["no-networks", "comma", "json", "selected"] {
        let report = explain(&recorded_pod(name), &["--config", "conf/99-exclude-dns.conf"]);
        assert_eq!(report["redirected"], false, "{name}: {report}");
        assert!(report["decision"].to_string().contains("istio-redirect is not in the sub-plugin chain"), "{report}");
        assert!(report["exempt"].to_string().contains("1337"), "{name}: {report}");
        assert_eq!(report["warnings"], json!([]), "{name}: {report}");
    }
    for name in ["templates", "gateway"] {
        let report = explain(&recorded_pod(name), &["--config", "conf/99-exclude-dns.conf"]);
        assert!(report["decision"].to_string().contains("does not select network excludedns"), "{name}: {report}");
        assert_eq!(report["exempt"], json!([]), "{name}: {report}");
    }
}

#[test]
fn instead_of_the_operators_plugin_detour_redirects_the_same_pods() {
    for name in ["no-networks", "comma", "json", "selected", "templates"] {
        let report = explain(&recorded_pod(name), &["--config", "conf/openshift-istio-cni.conf"]);
        assert_eq!(report["redirected"], true, "{name}: {report}");
        assert_eq!(report["proxy"]["uid"], json!([1_000_659_999]), "{name}");
        assert!(report["exempt"].to_string().contains("1337"), "{name}: {report}");
    }
}

/// Runs `detour explain` as the primary plugin of OpenShift (conf/primary-openshift.conf) for a pod in namespace shop
/// with these networks. The sample gives shop the definition istio-cni; default has istio-cni and excludedns; bank has
/// excludedns.
fn explain_tenant(test: &str, networks: &str) -> Run {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("service-mesh-{test}"));
    std::fs::create_dir_all(directory.join("net.d")).expect("writable");
    let write = |name: &str, text: &str| {
        let file = directory.join(name);
        std::fs::write(&file, text).expect("writable");
        file.display().to_string()
    };
    write("net.d/istio-cni.conf", &read("conf/openshift-istio-cni.conf"));
    write("net.d/excludedns.conf", &read("conf/99-exclude-dns.conf"));
    let mut node: Value = serde_json::from_str(&read("conf/primary-openshift.conf")).expect("JSON");
    node["confDir"] = json!(directory.join("net.d"));
    node["clusterNetwork"] =
        json!(write("ovn.conf", r#"{"cniVersion": "0.3.1", "name": "ovn", "type": "ovn-k8s-cni-overlay"}"#));
    let node = write("node.conf", &node.to_string());
    let mut definitions: Vec<String> = [("default", "istio-cni"), ("default", "excludedns"), ("bank", "excludedns")]
        .map(|(namespace, name)| {
            json!({"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
                   "metadata": {"namespace": namespace, "name": name}, "spec": {}})
            .to_string()
        })
        .to_vec();
    let sample = read("manifests/samples/namespace-attachment.yaml");
    definitions.push(sample.replace("metadata:\n", "metadata:\n  namespace: shop\n"));
    let definitions = write("definitions.yaml", &definitions.join("\n---\n"));
    let mut pod = recorded_pod("no-networks");
    pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] = json!(networks);
    let arguments = ["explain", "-f", "-", "-o", "json", "--config", &node, "--definitions", &definitions];
    detour(&arguments, &pod.to_string(), &[])
}

#[test]
fn definitions_of_the_pods_namespace_and_of_default_are_found_although_openshift_isolates_namespaces() {
    for (test, networks) in
        [("own", "istio-cni, default/excludedns"), ("default", "default/istio-cni, default/excludedns")]
    {
        let report = explain_tenant(test, networks).json();
        assert_eq!(report["redirected"], true, "{networks}: {report}");
        assert!(report["exempt"].to_string().contains("1337"), "{networks}: {report}");
    }
}

#[test]
fn a_missing_definition_and_one_of_another_tenant_are_errors_that_name_it() {
    for (test, networks, expected) in [
        ("missing", "excludedns", "NetworkAttachmentDefinition \"excludedns\" not found in namespace \"shop\""),
        ("other", "bank/excludedns", "namespaceIsolation forbids pods of namespace \"shop\""),
    ] {
        let run = explain_tenant(test, networks);
        let report: Value = serde_json::from_str(&run.stdout).expect("JSON");
        let cause = report["add_fails"].as_str().unwrap_or_default();
        assert!(run.code == 1 && cause.contains(expected), "{networks}: {run:?}");
    }
}
