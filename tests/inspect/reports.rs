//! `docs/reports.md` documents every field of JSON reports.

use crate::run::detour;
use serde_json::Value;

const POD: &str = "
kind: Pod
metadata: {name: web, namespace: shop, annotations: {sidecar.istio.io/status: '{}'}}
spec: {initContainers: [{name: early}], containers: [{name: app}, {name: istio-proxy}]}
";

/// Returns the section of the document about a command.
fn section(command: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reports.md");
    let text = std::fs::read_to_string(path).expect("readable");
    let (_, after) = text.split_once(&format!("\n## `{command}`\n")).expect("a section");
    after.split("\n## ").next().expect("split yields at least one").to_owned()
}

/// Returns the keys of an object, of its nested objects, and of the first object of each list.
fn fields(value: &Value) -> Vec<String> {
    let Value::Object(object) = value else { return Vec::new() };
    let within = object.values().flat_map(|value| match value {
        Value::Array(items) => items.first().map(fields).unwrap_or_default(),
        other => fields(other),
    });
    object.keys().cloned().chain(within).collect()
}

#[test]
fn every_field_is_documented() {
    for arguments in [
        &["explain", "-f", "-"][..],
        &["trace", "-f", "-", "--from", "uid=1", "--to", "1.2.3.4:5/tcp"],
        &["rules", "--pid", "self"],
        &["version"],
    ] {
        let own_pid = std::process::id().to_string();
        let arguments: Vec<&str> =
            arguments.iter().map(|&a| if a == "self" { own_pid.as_str() } else { a }).chain(["-o", "json"]).collect();
        let section = section(arguments[0]);
        let found = fields(&detour(&arguments, POD, &[]).json());
        assert!(found.len() > 1, "{arguments:?}");
        for field in found {
            let quoted = [format!("`{field}`"), format!("\"{field}\"")];
            assert!(quoted.iter().any(|quoted| section.contains(quoted.as_str())), "{arguments:?}: {field}");
        }
    }
}
