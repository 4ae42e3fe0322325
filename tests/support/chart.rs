//! The chart, rendered by helm, and objects of Kubernetes in YAML.

use super::called::start;
use super::program::built;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests")
}

/// Renders a chart as the release `detour` in `kube-system`, with further arguments. The error is the text that helm prints.
pub(crate) fn template(chart: &Path, arguments: &[&str], stdin: &str) -> Result<String, String> {
    let mut helm = Command::new(built("helm"));
    helm.args(["template", "detour"]).arg(chart).args(["--namespace", "kube-system"]).args(arguments);
    let output = start(&mut helm, stdin).wait_with_output().expect("helm ends");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// Returns the objects of a text.
pub(crate) fn objects_in(text: &str) -> Vec<Value> {
    let all: Vec<Value> = serde_saphyr::from_multiple(text).expect("YAML");
    all.into_iter().filter(|object| !object.is_null()).collect()
}

#[track_caller]
pub(crate) fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    objects.iter().find(|object| object["kind"] == kind).unwrap_or_else(|| panic!("{kind} not found"))
}
