//! A directory of manifests as a source of facts, for nodes without an API: YAML files with one or more documents,
//! JSON files, lists of objects.

use super::fact_source::{Cluster, Definitions, Reports, uid_mismatch, with_pod};
use super::resources::{DefinitionQuery, Event, Lookup, ObjectRef};
use super::wire;
use super::yaml::{self, typed};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use crate::trusted_file::{self, check, read_trusted};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The extensions of the files that are read.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// [`EXTENSIONS`] for messages.
const PATTERNS: &str = "*.yaml, *.yml, *.json";

/// The maximum size of a file; an object has at most 1.5 MiB (etcd, `--max-request-bytes`).
const MAX_FILE: u64 = 4 << 20;

/// The kind of an object: `apiVersion` and `kind`.
pub(super) type ObjectKind = (&'static str, &'static str);

pub(super) const POD: ObjectKind = ("v1", "Pod");
pub(super) const NAMESPACE: ObjectKind = ("v1", "Namespace");
pub(super) const DEFINITION: ObjectKind = ("k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition");

/// A directory of manifests.
#[derive(Debug)]
pub(super) struct Manifests {
    /// The directory; subdirectories are not read.
    pub(super) dir: PathBuf,
}

/// The JSON pointers to pod templates: of workloads, of cron jobs, of `PodTemplate`.
const TEMPLATES: [&str; 3] = ["/spec/template", "/spec/jobTemplate/spec/template", "/template"];

/// One object of a file.
#[derive(Debug)]
pub(super) struct ManifestObject {
    file: PathBuf,
    object: Value,
}

impl Cluster for Manifests {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.find(wanted, with_namespace).map_err(|error| with_pod(wanted, error))
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        let (manifests, broken) = self.read()?;
        Self::namespace_of(&manifests, &broken, wanted).map_err(|error| with_pod(wanted, error))
    }

    fn probe(&self) -> Result<(), Error> {
        self.read().map(|_| ())
    }
}

impl Definitions for Manifests {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        let (manifests, broken) = self.read()?;
        let found = wanted.iter().map(|DefinitionQuery { object, .. }| match find_definition(&manifests, object) {
            Some(manifest) => Ok(Lookup::Found(manifest.read::<wire::DefinitionObject>()?.into())),
            None => Ok(Lookup::Missing(format!("no manifest in {} ({PATTERNS})", self.dir.display()))),
        });
        let found: Vec<Lookup> = found.collect::<Result<_, Error>>()?;
        let missing = wanted.iter().zip(&found).find(|(_, found)| matches!(found, Lookup::Missing(_)));
        match (missing, broken.first()) {
            (Some((DefinitionQuery { object, .. }, _)), Some(error)) => {
                Err(error.clone().with_details(format!("it may contain NetworkAttachmentDefinition {object}")))
            }
            _ => Ok(found),
        }
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        let (manifests, _) = self.read().ok()?;
        let named = manifests.iter().filter(|m| m.is(DEFINITION, None, name));
        let mut namespaces: Vec<String> = named.map(|manifest| manifest.namespace().to_owned()).collect();
        namespaces.sort();
        namespaces.dedup();
        Some(namespaces)
    }
}

impl Reports for Manifests {
    /// Logs the report: manifests are not changed.
    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        let Pod { namespace, name, .. } = pod;
        if let Some(status) = status {
            tracing::info!("pod {namespace}/{name}: network status, not written to the manifests: {status}");
        }
        for Event { reason, message, .. } in events {
            tracing::info!("pod {namespace}/{name}: Event, not written to the manifests: {reason}: {message}");
        }
        Ok(())
    }
}

impl Manifests {
    fn find(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let (manifests, broken) = self.read()?;
        let found = self.pod(&manifests, wanted).and_then(|pod| {
            let namespace = with_namespace.then(|| Self::namespace_of(&manifests, &broken, wanted)).transpose()?;
            Ok(Facts { pod, namespace })
        });
        match (found, broken.first()) {
            // A file that can't be read may contain what is missing.
            (Err(Error { code: Code::PodUnknown, msg, .. }), Some(error)) => Err(error.clone().with_details(msg)),
            (found, _) => {
                broken.iter().for_each(|error| tracing::warn!("{error}"));
                found
            }
        }
    }

    /// Returns all objects, in the order of the files' names, and the errors of files that can't be read.
    fn read(&self) -> Result<(Vec<ManifestObject>, Vec<Error>), Error> {
        let invalid = |what: &str| {
            Error::new(Code::InvalidConfig, format!("kubernetes.manifests_dir: {} {what}", self.dir.display()))
        };
        let failed = |error: io::Error| invalid("can't be read; expected a directory").with_details(error.to_string());
        // A user who can change a file decides which pods have a sidecar, and what is excluded.
        let trusted = check(&self.dir).map_err(|error| match error {
            trusted_file::FileError::Io(error) => failed(error),
            refused => invalid(&format!("is not used: {refused}")),
        });
        let mut files = Vec::new();
        for entry in fs::read_dir(trusted?).map_err(failed)? {
            let path = self.dir.join(entry.map_err(failed)?.file_name());
            if path.extension().is_some_and(|e| EXTENSIONS.iter().any(|extension| e == *extension)) {
                files.push(path);
            }
        }
        files.sort();
        let (mut manifests, mut broken) = (Vec::new(), Vec::new());
        for file in &files {
            let text = read_trusted(file, MAX_FILE).map_err(|error| manifest_error(file, error));
            let text =
                text.and_then(|text| String::from_utf8(text).map_err(|_| manifest_error(file, "expected UTF-8")));
            broken.extend(text.and_then(|text| documents(file, &text, &mut manifests)).err());
        }
        Ok((manifests, broken))
    }

    fn pod(&self, manifests: &[ManifestObject], wanted: &PodRef) -> Result<Pod, Error> {
        let PodRef { namespace, name, .. } = wanted;
        let mut other_uid = None;
        for manifest in manifests.iter().filter(|m| m.is(POD, Some(namespace), name)) {
            let pod = Pod::from(manifest.read::<wire::PodObject>()?);
            if pod.matches(wanted) {
                return Ok(pod);
            }
            other_uid = Some((pod, manifest));
        }
        let dir = self.dir.display();
        let msg = match other_uid {
            Some((pod, manifest)) => format!(
                "{} in {}; correct metadata.uid or remove it",
                uid_mismatch(&pod, wanted),
                manifest.file.display()
            ),
            None => format!("no manifest in {dir} ({PATTERNS}); add one"),
        };
        Err(Error::new(Code::PodUnknown, msg))
    }

    /// Returns the pod's namespace. One without a manifest has no annotations, because many directories contain only
    /// pods.
    fn namespace_of(manifests: &[ManifestObject], broken: &[Error], wanted: &PodRef) -> Result<Namespace, Error> {
        let name = &wanted.namespace;
        match (manifests.iter().find(|m| m.is(NAMESPACE, None, name)), broken.first()) {
            (Some(manifest), _) => Ok(manifest.read::<wire::NamespaceObject>()?.into()),
            (None, Some(error)) => Err(error.clone().with_details(format!("it may contain Namespace {name}"))),
            (None, None) => Ok(Namespace { name: name.clone(), ..Namespace::default() }),
        }
    }
}

impl ManifestObject {
    fn text(&self, pointer: &str) -> Option<&str> {
        self.object.pointer(pointer).and_then(Value::as_str)
    }

    fn namespace(&self) -> &str {
        self.text("/metadata/namespace").unwrap_or(wire::DEFAULT_NAMESPACE)
    }

    /// Returns whether it is of that kind; an object without an API version matches any.
    pub(super) fn is_a(&self, (api_version, kind): ObjectKind) -> bool {
        self.text("/kind") == Some(kind) && self.text("/apiVersion").is_none_or(|version| version == api_version)
    }

    /// Returns its kind; empty if absent.
    pub(super) fn kind(&self) -> &str {
        self.text("/kind").unwrap_or_default()
    }

    /// Returns its name; empty if absent.
    pub(super) fn name(&self) -> &str {
        self.text("/metadata/name").unwrap_or_default()
    }

    /// Returns its kind, namespace and name for messages.
    pub(super) fn title(&self) -> String {
        match (self.kind(), self.text("/metadata/namespace"), self.name()) {
            ("", _, _) => "an object without a kind".to_owned(),
            (kind, Some(namespace), name) => format!("{kind} {namespace}/{name}"),
            (kind, None, name) => format!("{kind} {name}"),
        }
    }

    /// Sets its namespace, if absent.
    pub(super) fn default_namespace(&mut self, namespace: &str) {
        if let Some(Value::Object(metadata)) = self.object.get_mut("metadata") {
            let value = metadata.entry("namespace").or_insert(Value::Null);
            if value.is_null() {
                *value = namespace.into();
            }
        }
    }

    /// Returns its pod template as a pod in its namespace, called `NAME-*`; `None` if it has no template.
    pub(super) fn template(&self) -> Option<Self> {
        let mut templates = TEMPLATES.iter().filter_map(|pointer| self.object.pointer(pointer));
        let mut object = templates.find(|template| template.pointer("/spec/containers").is_some())?.clone();
        let metadata = object.as_object_mut()?.entry("metadata").or_insert(Value::Null);
        if metadata.is_null() {
            *metadata = json!({});
        }
        if let Value::Object(metadata) = metadata {
            metadata.insert("name".to_owned(), format!("{}-*", self.name()).into());
            metadata.insert("namespace".to_owned(), self.namespace().into());
        }
        Some(Self { file: self.file.clone(), object })
    }

    fn is(&self, kind: ObjectKind, namespace: Option<&str>, name: &str) -> bool {
        self.is_a(kind)
            && self.text("/metadata/name") == Some(name)
            && namespace.is_none_or(|namespace| self.namespace() == namespace)
    }

    /// Deserializes the object.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, Error> {
        self.read_part_of(&self.title())
    }

    /// Deserializes the object, which errors name as a part of the object `title`.
    pub(super) fn read_part_of<T: DeserializeOwned>(&self, title: &str) -> Result<T, Error> {
        typed(&self.object).map_err(|cause| manifest_error(&self.file, format!("{title}: {cause}")))
    }
}

fn find_definition<'a>(manifests: &'a [ManifestObject], wanted: &ObjectRef) -> Option<&'a ManifestObject> {
    manifests.iter().find(|manifest| manifest.is(DEFINITION, Some(&wanted.namespace), &wanted.name))
}

/// Adds the objects in a file's text to `all`; a list adds its items.
pub(super) fn documents(file: &Path, text: &str, all: &mut Vec<ManifestObject>) -> Result<(), Error> {
    let manifest = |object| ManifestObject { file: file.to_owned(), object };
    for mut object in yaml::documents(text).map_err(|error| manifest_error(file, error))? {
        let item_kind = object["kind"].as_str().and_then(|kind| kind.strip_suffix("List")).map(str::to_owned);
        match (item_kind, object.get_mut("items")) {
            (Some(kind), Some(Value::Array(items))) => {
                all.extend(items.drain(..).map(|item| manifest(with_kind(item, &kind))));
            }
            _ => all.push(manifest(object)),
        }
    }
    Ok(())
}

/// Adds the kind to an item of a list: the items of a `PodList` from the API have none.
fn with_kind(mut item: Value, kind: &str) -> Value {
    if let (Value::Object(keys), false) = (&mut item, kind.is_empty()) {
        keys.entry("kind").or_insert_with(|| kind.into());
    }
    item
}

fn manifest_error(file: &Path, cause: impl std::fmt::Display) -> Error {
    Error::new(Code::InvalidConfig, format!("manifest {}: {cause}", file.display()))
}
