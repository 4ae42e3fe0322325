//! Consistency of the files in `manifests/`. `tests/apiserver` tests that they work.

use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests")
}

fn documents(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("readable");
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn rendered(platform: &str) -> Vec<Value> {
    documents(&manifests().join(platform).join("rendered.yaml"))
}

fn kind<'a>(documents: &'a [Value], kind: &str) -> &'a Value {
    documents.iter().find(|document| document["kind"] == kind).unwrap_or_else(|| panic!("there is no {kind}"))
}

#[test]
fn the_scc_allows_only_what_the_pod_needs() {
    let objects = rendered("openshift");
    let scc = kind(&objects, "SecurityContextConstraints");
    let pod = &kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let context = &pod["containers"][0]["securityContext"];
    assert_eq!(scc["allowedCapabilities"], context["capabilities"]["add"]);
    assert_eq!((&scc["allowPrivilegedContainer"], &context["privileged"]), (&json!(false), &json!(false)));
    assert_eq!(context["seLinuxOptions"], json!({"type": "spc_t"}));
    let volumes = pod["volumes"].as_array().expect("volumes").iter();
    let mut kinds: Vec<&str> =
        volumes.filter_map(|volume| volume.as_object()?.keys().next_back().map(String::as_str)).collect();
    // The API server adds this volume for the service account.
    kinds.push("projected");
    kinds.sort_unstable();
    kinds.dedup();
    let allowed = scc["volumes"].as_array().expect("a list").iter().map(|kind| kind.as_str().expect("text"));
    assert_eq!(allowed.collect::<Vec<_>>(), kinds);
}

#[test]
fn the_kustomize_bases_are_rendered_from_this_chart() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("hack/manifests.sh");
    let output = Command::new(script).arg("--digest").output().expect("it starts");
    let line = format!("# Chart: {}\n", String::from_utf8_lossy(&output.stdout).trim());
    assert!(output.status.success() && line.len() > 20, "{line}");
    for platform in ["kubernetes", "openshift"] {
        let text = fs::read_to_string(manifests().join(platform).join("rendered.yaml")).expect("readable");
        assert!(text.contains(&line), "{platform}: run hack/manifests.sh");
    }
}
