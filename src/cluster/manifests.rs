//! Objects in manifests, which a user passes to a command, or which are in a directory for nodes without an API: YAML with
//! one or more documents, JSON, lists. Pod templates of workloads count as pods. Text is parsed to values first:
//! a parser of YAML for each type would be several percent of the program.

use super::resources::{
    DEFAULT_NAMESPACE, Definition, DefinitionObject, DefinitionQuery, Event, Lookup, NamespaceObject, PodObject,
};
use super::{Cluster, Definitions, uid_mismatch};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use crate::trusted_file::{FileError, check, names_in, read_trusted};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::{fmt, io};

/// The extensions of the files that are read.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];
/// [`EXTENSIONS`] for messages.
const PATTERNS: &str = "*.yaml, *.yml, *.json";
/// The maximum size of a file; an object has at most 1.5 MiB (etcd, `--max-request-bytes`).
const MAX_FILE: u64 = 4 << 20;
/// The JSON pointers to pod templates: of workloads, of cron jobs, of `PodTemplate`.
const TEMPLATES: [&str; 3] = ["/spec/template", "/spec/jobTemplate/spec/template", "/template"];
/// The kind of pods.
const POD: &str = "Pod";

/// A pod, or a workload's pod template as a pod. `Display` gives the object's kind, namespace and name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// The object's kind: `Pod`, or the kind of a workload.
    pub kind: String,
    /// The object's name.
    pub name: String,
    /// The pod; for a template, its name ends with `*`.
    pub pod: Pod,
}

impl Given {
    /// Returns whether it is a workload's pod template.
    #[must_use]
    pub fn is_template(&self) -> bool {
        self.kind != POD
    }

    /// Returns whether `name` selects it: the object's name, or `KIND/NAME` as in kubectl.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        match name.split_once('/') {
            Some((kind, name)) => kind.eq_ignore_ascii_case(&self.kind) && name == self.name,
            None => name == self.name,
        }
    }
}

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind, self.pod.namespace, self.name)
    }
}

/// The objects in a text, each kind in its order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// Pods and pod templates.
    pub pods: Vec<Given>,
    /// Namespaces.
    pub namespaces: Vec<Namespace>,
    /// NetworkAttachmentDefinitions.
    pub definitions: Vec<Definition>,
    /// Kind, namespace and name of objects of other kinds.
    pub others: Vec<String>,
}

/// Parses the objects in `text`. `place` is where it comes from, for errors; `namespace` is the namespace of objects
/// without one.
///
/// # Errors
/// The text is not YAML, or a Pod, a pod template, a Namespace or a definition in it is invalid.
pub fn objects(place: &Path, text: &str, namespace: &str) -> Result<Objects, Error> {
    let mut objects = Objects::default();
    for object in documents(text).map_err(|error| manifest_error(place, error))? {
        match (text_at(&object, "/kind").strip_suffix("List"), object.get("items")) {
            (Some(kind), Some(Value::Array(items))) => {
                items.iter().try_for_each(|item| objects.add(place, item, kind, namespace))?;
            }
            _ => objects.add(place, &object, "", namespace)?,
        }
    }
    Ok(objects)
}

impl Objects {
    /// Adds the objects of `other`.
    pub fn extend(&mut self, other: Self) {
        self.pods.extend(other.pods);
        self.namespaces.extend(other.namespaces);
        self.definitions.extend(other.definitions);
        self.others.extend(other.others);
    }

    /// Adds an object. `item_kind` and `namespace` are for one without.
    fn add(&mut self, place: &Path, object: &Value, item_kind: &str, namespace: &str) -> Result<(), Error> {
        let [kind, version, name, own_namespace] =
            ["/kind", "/apiVersion", "/metadata/name", "/metadata/namespace"].map(|at| text_at(object, at));
        let kind = if kind.is_empty() { item_kind } else { kind };
        let title = match (kind, own_namespace) {
            ("", _) => "an object without a kind".to_owned(),
            (_, "") => format!("{kind} {name}"),
            _ => format!("{kind} {own_namespace}/{name}"),
        };
        let invalid = |cause| manifest_error(place, format!("{title}: {cause}"));
        let is_a = |wanted: &str, of: &str| kind == wanted && (version.is_empty() || version == of);
        let template = if is_a(POD, "v1") { None } else { template(object) };
        if is_a(POD, "v1") || template.is_some() {
            let mut pod: PodObject = typed(template.as_ref().unwrap_or(object)).map_err(invalid)?;
            pod.metadata.namespace.get_or_insert_with(|| namespace.to_owned());
            self.pods.push(Given { kind: kind.to_owned(), name: name.to_owned(), pod: pod.into() });
        } else if is_a("Namespace", "v1") {
            self.namespaces.push(typed::<NamespaceObject>(object).map_err(invalid)?.into());
        } else if is_a("NetworkAttachmentDefinition", "k8s.cni.cncf.io/v1") {
            let mut definition: DefinitionObject = typed(object).map_err(invalid)?;
            definition.metadata.namespace.get_or_insert_with(|| namespace.to_owned());
            self.definitions.push(definition.into());
        } else {
            self.others.push(title);
        }
        Ok(())
    }

    /// Returns a namespace. One without a manifest has no annotations, because many directories contain only pods.
    fn namespace(&self, name: &str) -> Namespace {
        let found = self.namespaces.iter().find(|namespace| namespace.name == *name).cloned();
        found.unwrap_or_else(|| Namespace { name: name.to_owned(), ..Namespace::default() })
    }

    fn look_up(&self, wanted: &[DefinitionQuery], missing: &str) -> Vec<Lookup> {
        let found = |query: &DefinitionQuery| self.definitions.iter().find(|one| one.object == query.object).cloned();
        wanted
            .iter()
            .map(|query| found(query).map_or_else(|| Lookup::Missing(missing.to_owned()), Lookup::Found))
            .collect()
    }
}

/// A source with only these definitions.
impl Definitions for Objects {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        Ok(self.look_up(wanted, "not found in the given objects"))
    }
}

fn text_at<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// Returns an object's pod template as a pod in its namespace, called `NAME-*`; `None` if it has no template.
fn template(object: &Value) -> Option<Value> {
    let mut templates = TEMPLATES.iter().filter_map(|pointer| object.pointer(pointer));
    let mut template = templates.find(|template| template.pointer("/spec/containers").is_some())?.clone();
    if template["metadata"].is_null() {
        template["metadata"] = json!({});
    }
    if let Value::Object(metadata) = &mut template["metadata"] {
        metadata.insert("name".to_owned(), format!("{}-*", text_at(object, "/metadata/name")).into());
        metadata.insert("namespace".to_owned(), object["metadata"]["namespace"].clone());
    }
    Some(template)
}

fn manifest_error(place: &Path, cause: impl fmt::Display) -> Error {
    Error::new(Code::InvalidConfig, format!("manifest {}: {cause}", place.display()))
}

/// A directory of manifests as a source of facts.
#[derive(Debug)]
pub(super) struct Manifests {
    /// The directory; subdirectories are not read.
    pub(super) dir: PathBuf,
}

impl Cluster for Manifests {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let found = self.read().and_then(|objects| {
            let pod = self.pod(&objects, wanted)?;
            Ok(Facts { pod, namespace: with_namespace.then(|| objects.namespace(&wanted.namespace)) })
        });
        found.map_err(|error| error.of_pod(&wanted.namespace, &wanted.name))
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        let objects = self.read().map_err(|error| error.of_pod(&wanted.namespace, &wanted.name))?;
        Ok(objects.namespace(&wanted.namespace))
    }

    fn probe(&self) -> Result<(), Error> {
        self.read().map(drop)
    }

    /// Logs the report: manifests are not changed.
    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        let Pod { namespace, name, .. } = pod;
        tracing::info!(status, ?events, "pod {namespace}/{name}: report not written to the manifests");
        Ok(())
    }
}

impl Definitions for Manifests {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        let missing = format!("no manifest in {} ({PATTERNS})", self.dir.display());
        Ok(self.read()?.look_up(wanted, &missing))
    }
}

impl Manifests {
    /// Returns all objects. A file that can't be read is an error for all pods, because it may contain the object that
    /// decides about one.
    fn read(&self) -> Result<Objects, Error> {
        let invalid = |what: &str| {
            Error::new(Code::InvalidConfig, format!("kubernetes.manifests_dir: {} {what}", self.dir.display()))
        };
        let failed = |error: io::Error| invalid("can't be read; expected a directory").with_details(error.to_string());
        // A user who can change a file decides which pods have a sidecar, and what is excluded.
        let trusted = check(&self.dir).map_err(|error| match error {
            FileError::Io(error) => failed(error),
            refused => invalid(&format!("is not used: {refused}")),
        });
        let mut found = Objects::default();
        for name in names_in(&trusted?).map_err(failed)? {
            let path = self.dir.join(name);
            if path.extension().is_some_and(|found| EXTENSIONS.iter().any(|extension| found == *extension)) {
                let text = read_trusted(&path, MAX_FILE).map_err(|error| manifest_error(&path, error))?;
                let text = String::from_utf8(text).map_err(|_| manifest_error(&path, "expected UTF-8"))?;
                found.extend(objects(&path, &text, DEFAULT_NAMESPACE)?);
            }
        }
        Ok(found)
    }

    fn pod(&self, objects: &Objects, wanted: &PodRef) -> Result<Pod, Error> {
        let is_named = |pod: &&Pod| (&pod.namespace, &pod.name) == (&wanted.namespace, &wanted.name);
        let mut named = objects.pods.iter().map(|given| &given.pod).filter(is_named).peekable();
        let directory = self.dir.display();
        let msg = match named.peek() {
            Some(other) => {
                format!("{} in {directory}; correct metadata.uid or remove it", uid_mismatch(other, wanted))
            }
            None => format!("no manifest in {directory} ({PATTERNS}); add one"),
        };
        named.find(|pod| pod.matches(wanted)).cloned().ok_or_else(|| Error::new(Code::PodUnknown, msg))
    }
}

/// Parses YAML with any number of documents, or one JSON document. Empty documents are skipped. Errors contain no
/// snippet, because a kubeconfig has secrets.
///
/// # Errors
/// The text is neither; the error has the line.
pub(crate) fn documents(text: &str) -> Result<Vec<Value>, String> {
    // JSON is YAML too, but the JSON parser saves a tenth of a millisecond per call.
    if let Some(object) = text.starts_with('{').then(|| serde_json::from_str(text).ok()).flatten() {
        return Ok(vec![object]);
    }
    let options = serde_saphyr::options! { with_snippet: false };
    serde_saphyr::from_multiple_with_options(text, options).map_err(|error| {
        // The advice of the library is for programmers.
        error.to_string().replace(", set DuplicateKeyPolicy in Options if acceptable", "")
    })
}

/// Deserializes a value.
///
/// # Errors
/// The value does not have this type; the error names the invalid part, such as `spec.containers[0].name`, but shows no
/// value, because a kubeconfig has secrets.
pub(crate) fn typed<T: DeserializeOwned>(value: &Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let (path, cause) = (error.path().to_string(), without_value(&error.inner().to_string()));
        // The path of the value itself.
        if path == "." { cause } else { format!("{path}: {cause}") }
    })
}

/// Removes the value from an error such as `invalid type: string "a", expected u16`, and the names of Rust types.
fn without_value(error: &str) -> String {
    match error.rsplit_once(", expected ") {
        Some((found, expected)) => {
            let kind = found.split(['"', '`']).next().unwrap_or_default().trim_end();
            let expected = match expected {
                "a string" if !["map", "sequence", "null"].iter().any(|other| kind.ends_with(other)) => {
                    "a string; write the value in quotes"
                }
                object if object.starts_with("struct ") => "an object",
                expected => expected,
            };
            format!("{kind}, expected {expected}")
        }
        None => error.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::Code;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    #[test]
    fn pods_and_namespaces_are_found_among_other_objects() {
        let text = "
kind: Service
metadata: {name: s}
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Namespace, metadata: {name: shop}}
- {apiVersion: v1, kind: Pod, metadata: {name: web-0, namespace: shop}, spec: {containers: [{name: web}]}}
---
kind: Pod
metadata: {name: alone}
";
        let found = objects(Path::new("-"), text, "default").expect("readable");
        let names: Vec<_> = found.pods.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["Pod shop/web-0", "Pod default/alone"]);
        assert_eq!(found.namespaces[0].name, "shop");
        assert_eq!(found.others, ["Service s"]);
        let of_api = r#"{"kind": "PodList", "items": [{"metadata": {"name": "a"}}]}"#;
        let found = objects(Path::new("-"), of_api, "elsewhere").expect("readable");
        assert_eq!(found.pods[0].to_string(), "Pod elsewhere/a");
    }

    #[test]
    fn a_template_is_a_pod_in_its_workloads_namespace() {
        let spec = "{template: {metadata: {labels: {a: b}}, spec: {hostNetwork: true, containers: [{name: c}]}}}";
        for (kind, rest) in [
            ("Deployment", format!("spec: {spec}")),
            ("StatefulSet", format!("spec: {spec}")),
            ("DaemonSet", format!("spec: {spec}")),
            ("ReplicaSet", format!("spec: {spec}")),
            ("ReplicationController", format!("spec: {spec}")),
            ("DeploymentConfig", format!("spec: {spec}")),
            ("Job", format!("spec: {spec}")),
            ("CronJob", format!("spec: {{jobTemplate: {{spec: {spec}}}}}")),
            ("PodTemplate", spec[1..spec.len() - 1].to_owned()),
        ] {
            let text = format!("kind: {kind}\nmetadata: {{name: web, namespace: shop}}\n{rest}\n");
            let found = objects(Path::new("-"), &text, "default").expect("readable");
            let [given] = &found.pods[..] else { panic!("{kind}: {found:?}") };
            assert_eq!((given.to_string(), given.is_template()), (format!("{kind} shop/web"), true));
            assert_eq!((given.pod.namespace.as_str(), given.pod.name.as_str()), ("shop", "web-*"));
            assert!(given.pod.host_network && given.pod.labels["a"] == "b", "{given:?}");
            assert!(given.is_named("web") && given.is_named(&format!("{}/web", kind.to_lowercase())));
            assert!(!given.is_named("pod/web") && !given.is_named("we"));
        }
        let bare = "kind: Job\nmetadata: {name: j}\nspec: {template: {spec: {containers: [{name: c}]}}}";
        assert_eq!(objects(Path::new("-"), bare, "default").expect("readable").pods[0].pod.namespace, "default");
        for wrong in ["metadata: 7, ", ""] {
            let text = format!(
                "kind: Job\nmetadata: {{name: j}}\nspec: {{template: {{{wrong}spec: {{containers: [{{name: [c]}}]}}}}}}"
            );
            let error = objects(Path::new("f"), &text, "default").expect_err("refused");
            assert!(error.msg.starts_with("manifest f: Job j: "), "{error}");
        }
    }

    #[test]
    fn an_error_names_the_file() {
        let error = objects(Path::new("pod.yaml"), "kind: Pod\nmetadata: {name: [1]}", "default").expect_err("no name");
        assert!(error.msg.starts_with("manifest pod.yaml: "), "{error}");
        assert!(objects(Path::new("-"), "a: [", "default").is_err());
    }

    /// Nested aliases, an alias of a long text, many values, many levels.
    #[test]
    fn a_short_text_can_not_expand_without_limit() {
        let started = std::time::Instant::now();
        let levels =
            (1..12).map(|level| format!("a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 10].join(",")));
        let multiplied = format!("a0: &a0 [1]\n{}", levels.collect::<String>());
        let long = format!("x: &a {}\ny: [{}]\n", "z".repeat(65536), vec!["*a"; 40_000].join(","));
        for bomb in [multiplied, long, format!("y: [{}]\n", "[],".repeat(300_000)), "[".repeat(100_000)] {
            let error = objects(Path::new("-"), &bomb, "default").expect_err("a bomb");
            assert_eq!(error.code, Code::InvalidConfig);
        }
        assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
    }

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only deserialized")]
    struct Object {
        name: String,
        labels: Option<BTreeMap<String, String>>,
        parts: Option<Vec<Object>>,
    }

    #[test]
    fn an_error_names_the_invalid_part() {
        for (text, error) in [
            (
                "{name: a, parts: [{name: b}, {name: c, labels: {x/y: [1]}}]}",
                "parts[1].labels.x/y: invalid type: sequence",
            ),
            ("{name: a, parts: [{name: b, parts: {}}]}", "parts[0].parts: invalid type: map"),
            ("{name: a, parts: [{}]}", "parts[0]: missing field `name`"),
            ("{labels: {}}", "missing field `name`"),
            ("hello", "invalid type: string, expected an object"),
            ("{name: a, parts: [{name: b, labels: [x]}]}", "parts[0].labels: invalid type: sequence, expected a map"),
            (
                "{name: a, labels: {x/y: 7}}",
                "labels.x/y: invalid type: integer, expected a string; write the value in quotes",
            ),
        ] {
            let document = documents(text).expect("YAML").remove(0);
            let found = typed::<Object>(&document).expect_err(text);
            assert!(found.starts_with(error), "{text}: {found}");
        }
    }

    #[test]
    fn a_text_has_any_number_of_documents() {
        for (text, count) in [("", 0), ("---\n", 0), ("a: 1\n---\nb: 1\n", 2), ("{\"a\": 1}", 1), ("{a: 1}", 1)] {
            assert_eq!(documents(text).expect(text).len(), count, "{text}");
        }
        let error = documents("a: 1\na: 2\n").expect_err("invalid");
        assert!(error.starts_with("duplicate mapping key: a at line 2") && !error.contains("Options"), "{error}");
        let error = documents("a: 1\n---\nb: c: d\n").expect_err("invalid");
        assert!(error.contains("line 3") && !error.contains("b: c"), "{error}");
    }
}
