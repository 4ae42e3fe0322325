//! The values of Istio's chart istio-cni: each one has an effect, is harmless, or is refused.

use crate::helm::{DEFAULT, manifests, merged, names_unknown_key, nested, refusals, render, table};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

const NAMES: &str = include_str!("istio-cni-values.txt");

/// Returns the names and defaults of the sections of `NAMES` whose heading begins with `section`.
fn published(section: &str) -> Vec<(&'static str, Value)> {
    let mut heading = "";
    let mut found = Vec::new();
    for line in NAMES.lines() {
        match line.strip_prefix("# ") {
            Some(title) => heading = title,
            None if heading.starts_with(section) => {
                let (name, default) = line.split_once(' ').expect("a name and a default");
                found.push((name, serde_json::from_str(default).expect("JSON")));
            }
            None => {}
        }
    }
    found
}

/// Returns the second column of the documentation by name.
fn documented() -> BTreeMap<String, String> {
    let text = fs::read_to_string(manifests().join("istio-cni-values.md")).expect("readable");
    let sections = text.split_once("\n## ").expect("sections").1;
    let mut found = BTreeMap::new();
    for line in sections.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        for name in cells[1].split(", ") {
            let name = name.trim_matches('`').to_owned();
            assert_eq!(found.insert(name.clone(), cells[2].to_owned()), None, "{name}: listed twice");
        }
    }
    found
}

#[test]
fn the_documentation_lists_every_published_value() {
    let listed: BTreeSet<String> = documented().into_keys().collect();
    let names: BTreeSet<String> = published("").into_iter().map(|(name, _)| name.to_owned()).collect();
    assert_eq!(listed, names);
}

#[test]
fn each_value_that_is_documented_as_the_same_has_an_effect() {
    let rows: Vec<(String, Value, Value)> = table("same_as_istio_cni");
    let tested: BTreeSet<String> = rows.iter().map(|(name, ..)| name.clone()).collect();
    let same = documented().into_iter().filter(|(_, here)| here == "same");
    assert_eq!(tested, same.map(|(name, _)| name).collect(), "same_as_istio_cni of cases.yaml");
    for (name, value, context) in rows {
        let without = if context == json!({}) { DEFAULT.clone() } else { render(&context).expect("rendered") };
        let with = render(&merged(&context, &nested(&name, value))).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_ne!(with, without, "{name}: no effect");
    }
}

#[test]
fn other_values_are_accepted_only_if_they_are_harmless() {
    let documented = documented();
    let (mut defaults, mut accepted, mut refused) = (json!({}), vec![json!({}); 2], Vec::new());
    for (name, default) in published("") {
        let here = documented[name].as_str();
        let wrong = if let Some(values) = here.strip_prefix("only ") {
            defaults = merged(&defaults, &nested(name, default));
            let right = values.split('`').skip(1).step_by(2).map(|value| serde_saphyr::from_str(value).expect("YAML"));
            let right: Vec<Value> = right.collect();
            for (i, value) in right.iter().enumerate() {
                accepted[i] = merged(&accepted[i], &nested(name, value.clone()));
            }
            let mut wrong = vec![json!("other"), json!(true), json!({"type": "Unconfined"})];
            wrong.retain(|value| !right.contains(value));
            wrong
        } else if here == "inactive" {
            defaults = merged(&defaults, &nested(name, default));
            vec![json!(7)]
        } else if here == "rejected" {
            vec![default]
        } else {
            assert_eq!(here, "same", "{name}");
            continue;
        };
        refused.extend(wrong.into_iter().map(|value| (name, nested(name, value))));
    }
    for values in [vec![defaults], accepted].concat() {
        assert!(render(&values).as_ref() == Ok(&*DEFAULT), "{values} has an effect");
    }
    let values: Vec<Value> = refused.iter().map(|(_, values)| values.clone()).collect();
    for ((name, values), message) in refused.iter().zip(refusals(&values)) {
        let pointer = format!("/{}", name.replace('.', "/"));
        let (parent, key) = pointer.rsplit_once('/').expect("a key");
        let is_named = message.contains(&format!("at '{pointer}")) || names_unknown_key(&message, parent, key);
        assert!(is_named, "{values}: {message}");
    }
}

/// The defaults of istio-cni 1.27, as a user's values file has them.
fn defaults() -> Value {
    published("1.27").into_iter().fold(json!({}), |all, (name, value)| merged(&all, &nested(name, value)))
}

#[test]
fn of_istio_cnis_defaults_only_the_image_is_refused() {
    let error = render(&defaults()).expect_err("refused");
    let refused: Vec<&str> = error.lines().filter_map(|line| line.strip_prefix("- ")).collect();
    let names: Vec<&str> = refused.iter().filter_map(|line| line.split(':').next()).collect();
    assert_eq!(names, ["image", "global.hub", "global.tag"], "{error}");

    let mut values = merged(&defaults(), &json!({"image": "detour", "global": {"hub": "registry.example", "tag": ""}}));
    let text = render(&values).expect("rendered");
    for expected in [
        "registry.example/detour:",
        "cpu: 100m",
        "maxUnavailable: 1",
        "\"exclude_namespaces\": [\n          \"kube-system\"\n",
    ] {
        assert!(text.contains(expected), "{expected}");
    }
    values["ambient"]["enabled"] = json!(true);
    values["ownerName"] = json!("IstioOperator");
    let error = render(&values).expect_err("refused");
    assert!(error.contains("at '/ambient/enabled'") && error.contains("at '/ownerName'"), "{error}");
}

#[test]
fn istios_registries_images_and_versions_are_refused() {
    for (values, path) in [
        (json!({"hub": "docker.io/istio"}), "hub"),
        (json!({"hub": "gcr.io/istio-release"}), "hub"),
        (json!({"global": {"hub": "registry.istio.io/release"}}), "global.hub"),
        (json!({"image": "docker.io/istio/install-cni:1.27.0"}), "image"),
        (json!({"image": "registry.redhat.io/openshift-service-mesh/istio-cni-rhel9:1.27"}), "image"),
        (json!({"tag": "1.27.0-distroless", "global": {"hub": ""}}), "tag"),
        (json!({"global": {"tag": "1.27", "hub": ""}}), "global.tag"),
    ] {
        let error = render(&values).expect_err(&format!("{values} renders"));
        assert!(error.contains(&format!("\n- {path}: \"")), "{values}: {error}");
    }
    // A mirror may use any tag.
    assert!(render(&json!({"hub": "registry.example/mesh", "tag": "1.27.0"})).is_ok());
}
