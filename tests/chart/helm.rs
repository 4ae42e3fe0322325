//! Renders the chart with helm.

use crate::support::chart;
pub(crate) use crate::support::chart::{manifests, objects_in, of_kind};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// A values file with the registry of all renderings, unless their values set another one: the chart has no default.
static HUB: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("chart-hub.yaml");
    fs::write(&path, "global: {hub: default.example}\n").expect("writable");
    path
});

/// The optional API of `taint.atCreation`.
const TAINT_POLICIES: &str = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy";

/// The chart's objects with its default values.
pub(crate) static DEFAULT: LazyLock<String> =
    LazyLock::new(|| render(&json!({})).expect("helm renders the chart with its defaults"));

pub(crate) fn chart_file(name: &str) -> String {
    let path = manifests().join("chart").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub(crate) fn schema() -> Value {
    serde_json::from_str(&chart_file("values.schema.json")).expect("JSON")
}

/// Returns a table of cases.yaml.
pub(crate) fn table<T: DeserializeOwned>(name: &str) -> Vec<T> {
    let mut tables: Value = serde_saphyr::from_str(include_str!("cases.yaml")).expect("YAML");
    serde_json::from_value(tables[name].take()).expect("rows")
}

/// Returns the default values.
pub(crate) fn values() -> Value {
    serde_saphyr::from_str(&chart_file("values.yaml")).expect("YAML")
}

/// Renders the chart with a values file. The error is the text that helm prints.
pub(crate) fn render(values: &Value) -> Result<String, String> {
    render_file(&values.to_string(), "1.33.0")
}

/// Renders the chart with the text of a values file for a version of Kubernetes, with all optional APIs that the chart
/// uses.
pub(crate) fn render_file(values: &str, version: &str) -> Result<String, String> {
    render_with(values, &["--kube-version", version, "--api-versions", TAINT_POLICIES])
}

/// Renders the chart with the text of a values file for a cluster, which flags of helm describe.
pub(crate) fn render_with(values: &str, cluster: &[&str]) -> Result<String, String> {
    template(&manifests().join("chart"), values, cluster)
}

/// Renders the chart as for a cluster with OpenShift's API.
pub(crate) fn render_for_openshift(values: &Value) -> Result<String, String> {
    let cluster = ["--kube-version", "1.33.0", "--api-versions", "security.openshift.io/v1"];
    template(&manifests().join("chart"), &values.to_string(), &cluster)
}

/// Returns the notes that helm prints after an installation with these values, from a copy of the chart in which they
/// are a template of an object: without a cluster, helm renders only objects.
pub(crate) fn notes(values: &Value) -> String {
    static COPY: LazyLock<PathBuf> = LazyLock::new(|| {
        let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("chart-with-notes");
        let _ = fs::remove_dir_all(&copy);
        fs::create_dir_all(&copy).expect("writable");
        let status =
            Command::new("cp").arg("-r").arg(manifests().join("chart")).arg(&copy).status().expect("cp starts");
        assert!(status.success());
        let copy = copy.join("chart");
        let notes = format!("{{{{ define \"notes\" }}}}{}{{{{ end }}}}", chart_file("templates/NOTES.txt"));
        let object = "kind: Notes\ntext: {{ include \"notes\" . | toJson }}\n";
        fs::write(copy.join("templates/notes.yaml"), format!("{notes}\n{object}")).expect("writable");
        copy
    });
    let text = template(&COPY, &values.to_string(), &["--kube-version", "1.33.0"])
        .unwrap_or_else(|error| panic!("{values}: {error}"));
    of_kind(&objects_in(&text), "Notes")["text"].as_str().expect("text").to_owned()
}

fn template(chart: &Path, values: &str, cluster: &[&str]) -> Result<String, String> {
    let hub = HUB.to_str().expect("UTF-8");
    chart::template(chart, &[cluster, &["--values", hub, "--values", "-"]].concat(), values)
}

/// Returns helm's message for each values file, none of which renders. Helm names all wrong values, so one call checks
/// several files if none of them sets a value of another.
#[track_caller]
pub(crate) fn refusals(cases: &[Value]) -> Vec<String> {
    let mut groups: Vec<(Value, Vec<usize>)> = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        match groups.iter_mut().find(|(values, _)| !overlap(values, case)) {
            Some((values, members)) => {
                *values = merged(values, case);
                members.push(i);
            }
            None => groups.push((case.clone(), vec![i])),
        }
    }
    let mut messages = vec![String::new(); cases.len()];
    for (values, members) in groups {
        let Err(message) = render(&values) else { panic!("{values} renders") };
        members.into_iter().for_each(|i| messages[i].clone_from(&message));
    }
    messages
}

/// Reports whether both set the same value.
fn overlap(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            a.iter().any(|(key, value)| b.get(key).is_some_and(|other| overlap(value, other)))
        }
        _ => true,
    }
}

/// Reports whether helm's message refuses `key` in the object at `pointer` as unknown.
pub(crate) fn names_unknown_key(message: &str, pointer: &str, key: &str) -> bool {
    let start = format!("at '{pointer}': additional propert");
    message.lines().any(|line| line.contains(&start) && line.contains(&format!("'{key}'")))
}

/// Renders the chart and returns its objects.
#[track_caller]
pub(crate) fn objects(values: &Value) -> Vec<Value> {
    objects_in(&render(values).unwrap_or_else(|error| panic!("{values}: {error}")))
}

/// Returns the agent's container.
#[track_caller]
pub(crate) fn agent(values: &Value) -> Value {
    of_kind(&objects(values), "DaemonSet")["spec"]["template"]["spec"]["containers"][0].clone()
}

/// Returns the value of a flag of the agent.
pub(crate) fn flag(agent: &Value, name: &str) -> Option<String> {
    let prefix = format!("--{name}=");
    let mut flags = agent["args"].as_array().expect("a list").iter().filter_map(Value::as_str);
    flags.find_map(|flag| flag.strip_prefix(&prefix)).map(str::to_owned)
}

/// Returns values with only the value at `path`, such as `global.hub`.
pub(crate) fn nested(path: &str, value: Value) -> Value {
    path.rsplit('.').fold(value, |value, key| json!({ key: value }))
}

/// Returns `values` with those of `over`, as helm merges values files.
pub(crate) fn merged(values: &Value, over: &Value) -> Value {
    let (Value::Object(values), Value::Object(over)) = (values, over) else { return over.clone() };
    let mut all: Map<String, Value> = values.clone();
    for (key, value) in over {
        let value = values.get(key).map_or_else(|| value.clone(), |below| merged(below, value));
        all.insert(key.clone(), value);
    }
    Value::Object(all)
}

/// Returns the paths of all leaves below an object: values that are not objects with keys.
pub(crate) fn leaves(value: &Value) -> Vec<String> {
    let below = |(key, value): (&String, &Value)| {
        let inner = leaves(value);
        if inner.is_empty() { vec![key.clone()] } else { inner.iter().map(|leaf| format!("{key}.{leaf}")).collect() }
    };
    value.as_object().into_iter().flatten().flat_map(below).collect()
}
