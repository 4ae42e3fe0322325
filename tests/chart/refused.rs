//! Values that the chart refuses, with the path of the key.

use crate::helm::{leaves, merged, names_unknown_key, nested, refusals, render, render_file, table, values};
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
    let unknown = |path: &str| {
        (format!("/{}", path.replace('.', "/")), "unknown".to_owned(), nested(&format!("{path}.unknown"), json!({})))
    };
    let mut cases: Vec<(String, String, Value)> = objects.into_iter().map(unknown).collect();
    cases.extend(table("unknown_keys"));
    let messages = refusals(&cases.iter().map(|(.., values)| values.clone()).collect::<Vec<_>>());
    for ((pointer, key, values), message) in cases.iter().zip(messages) {
        assert!(names_unknown_key(&message, pointer, key), "{values}: {message}");
    }
}

#[test]
fn a_wrong_value_is_refused() {
    let pointer = |path: &str| format!("at '/{}", path.replace('.', "/"));
    let values = table("wrong_values").into_iter();
    let values = values.map(|(path, value): (String, Value)| (pointer(&path), nested(&path, value)));
    let items =
        table("wrong_items").into_iter().map(|(place, values): (String, Value)| (format!("at '{place}'"), values));
    assert_refused(&values.chain(items).collect::<Vec<_>>());
}

#[test]
fn values_that_contradict_each_other_are_refused() {
    assert_refused(&table("contradictions"));
    for case in table("contradictions_of_templates") {
        assert_refused(&[case]);
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
