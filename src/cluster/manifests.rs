//! Facts from a directory of manifests, for whoever has no API: YAML files of one or more
//! documents, JSON files, lists of objects.

use super::{Cluster, DefinitionQuery, Event, Lookup, ObjectRef, about, another_uid, wire};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use crate::trusted_file::{self, check, read_trusted};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a file's name ends with when it is read.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// [`EXTENSIONS`], for messages.
const FILES: &str = "*.yaml, *.yml, *.json";

/// A file is larger only by mistake: an object has at most 1.5 MiB (etcd, `--max-request-bytes`).
const LARGEST: u64 = 4 << 20;

/// A kind of objects: `apiVersion` and `kind`.
pub(super) type ObjectKind = (&'static str, &'static str);

pub(super) const POD: ObjectKind = ("v1", "Pod");
pub(super) const NAMESPACE: ObjectKind = ("v1", "Namespace");
pub(super) const DEFINITION: ObjectKind = ("k8s.cni.cncf.io/v1", "NetworkAttachmentDefinition");

/// A directory of manifests.
#[derive(Debug)]
pub(super) struct Manifests {
    /// The directory; its subdirectories are not read.
    pub(super) dir: PathBuf,
}

/// Where objects hold a pod template: workloads, cron jobs, `PodTemplate`.
const TEMPLATES: [&str; 3] = ["/spec/template", "/spec/jobTemplate/spec/template", "/template"];

/// One object of a file.
#[derive(Debug)]
pub(super) struct ManifestObject {
    file: PathBuf,
    /// What the file holds.
    text: Arc<str>,
    /// Which of the file's documents, counted from 0.
    document: usize,
    /// Whether it is an item of a `List`.
    listed: bool,
    object: Value,
}

impl Cluster for Manifests {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.find(wanted, with_namespace).map_err(|error| about(wanted, error))
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        let (manifests, broken) = self.read()?;
        Self::named_namespace(&manifests, &broken, wanted).map_err(|error| about(wanted, error))
    }

    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        let (manifests, broken) = self.read()?;
        let found = wanted.iter().map(|DefinitionQuery { object, .. }| match find_definition(&manifests, object) {
            Some(manifest) => Ok(Lookup::Found(manifest.read::<wire::DefinitionObject>()?.into())),
            None => Ok(Lookup::Missing(format!("no manifest of it in {} ({FILES})", self.dir.display()))),
        });
        let found: Vec<Lookup> = found.collect::<Result<_, Error>>()?;
        let missing = wanted.iter().zip(&found).find(|(_, found)| matches!(found, Lookup::Missing(_)));
        match (missing, broken.first()) {
            (Some((DefinitionQuery { object, .. }, _)), Some(error)) => {
                Err(error.clone().with_details(format!("NetworkAttachmentDefinition {object} may stand there")))
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

    /// Manifests are not written to.
    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        let Pod { namespace, name, .. } = pod;
        if let Some(status) = status {
            tracing::info!("pod {namespace}/{name}: network status, not written to manifests: {status}");
        }
        for Event { reason, message, .. } in events {
            tracing::info!("pod {namespace}/{name}: event, not written to manifests: {reason}: {message}");
        }
        Ok(())
    }

    fn probe(&self) -> Result<(), Error> {
        self.read().map(|_| ())
    }
}

impl Manifests {
    fn find(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let (manifests, broken) = self.read()?;
        let found = self.pod(&manifests, wanted).and_then(|pod| {
            let namespace = with_namespace.then(|| Self::named_namespace(&manifests, &broken, wanted)).transpose()?;
            Ok(Facts { pod, namespace })
        });
        match (found, broken.first()) {
            // What is missing may stand in the file that can't be read.
            (Err(Error { code: Code::PodUnknown, msg, .. }), Some(error)) => Err(error.clone().with_details(msg)),
            (found, _) => {
                broken.iter().for_each(|error| tracing::warn!("{error}"));
                found
            }
        }
    }

    /// All objects, in the order of the files' names, and what can't be read.
    fn read(&self) -> Result<(Vec<ManifestObject>, Vec<Error>), Error> {
        let wrong = |what: &str| {
            Error::new(Code::InvalidConfig, format!("kubernetes.manifests_dir: {} {what}", self.dir.display()))
        };
        let failed = |error: io::Error| wrong("can't be read; accepted: a directory").with_details(error.to_string());
        // A user who can change the file decides which pods have a sidecar, and what is excluded.
        let trusted = check(&self.dir).map_err(|error| match error {
            trusted_file::FileError::Io(error) => failed(error),
            refused => wrong(&format!("is not used: {refused}")),
        });
        let mut files = Vec::new();
        for entry in fs::read_dir(trusted?).map_err(failed)? {
            let path = self.dir.join(entry.map_err(failed)?.file_name());
            if path.extension().is_some_and(|e| EXTENSIONS.iter().any(|known| e == *known)) {
                files.push(path);
            }
        }
        files.sort();
        let (mut manifests, mut broken) = (Vec::new(), Vec::new());
        for file in &files {
            let text = read_trusted(file, LARGEST).map_err(|error| self::broken(file, error));
            let text = text.and_then(|text| String::from_utf8(text).map_err(|_| self::broken(file, "not UTF-8")));
            broken.extend(text.and_then(|text| documents(file, &text, &mut manifests)).err());
        }
        Ok((manifests, broken))
    }

    fn pod(&self, manifests: &[ManifestObject], wanted: &PodRef) -> Result<Pod, Error> {
        let PodRef { namespace, name, .. } = wanted;
        let mut another = None;
        for manifest in manifests.iter().filter(|m| m.is(POD, Some(namespace), name)) {
            let pod = Pod::from(manifest.read::<wire::PodObject>()?);
            if pod.is(wanted) {
                return Ok(pod);
            }
            another = Some((pod, manifest));
        }
        let dir = self.dir.display();
        let msg = match another {
            Some((pod, manifest)) => format!(
                "{} in {}; correct metadata.uid or leave it out",
                another_uid(&pod, wanted),
                manifest.file.display()
            ),
            None => format!("no manifest of this Pod in {dir} ({FILES}); add one"),
        };
        Err(Error::new(Code::PodUnknown, msg))
    }

    /// One that has no manifest has no annotations: every pod is in a namespace, and many a directory
    /// holds the pods alone.
    fn named_namespace(manifests: &[ManifestObject], broken: &[Error], wanted: &PodRef) -> Result<Namespace, Error> {
        let name = &wanted.namespace;
        match (manifests.iter().find(|m| m.is(NAMESPACE, None, name)), broken.first()) {
            (Some(manifest), _) => Ok(manifest.read::<wire::NamespaceObject>()?.into()),
            (None, Some(error)) => Err(error.clone().with_details(format!("Namespace {name} may stand there"))),
            (None, None) => Ok(Namespace { name: name.clone(), ..Namespace::default() }),
        }
    }
}

impl ManifestObject {
    fn text(&self, pointer: &str) -> Option<&str> {
        self.object.pointer(pointer).and_then(Value::as_str)
    }

    pub(super) fn namespace(&self) -> &str {
        self.text("/metadata/namespace").unwrap_or("default")
    }

    /// Whether it is of that kind; one that doesn't say its API version may be of any.
    pub(super) fn is_a(&self, (api_version, kind): ObjectKind) -> bool {
        self.text("/kind") == Some(kind) && self.text("/apiVersion").is_none_or(|version| version == api_version)
    }

    /// Its kind; empty if it has none.
    pub(super) fn kind(&self) -> &str {
        self.text("/kind").unwrap_or_default()
    }

    /// Its name; empty if it has none.
    pub(super) fn name(&self) -> &str {
        self.text("/metadata/name").unwrap_or_default()
    }

    /// Its kind, namespace and name, for messages.
    pub(super) fn title(&self) -> String {
        match (self.kind(), self.text("/metadata/namespace"), self.name()) {
            ("", _, _) => "an object without a kind".to_owned(),
            (kind, Some(namespace), name) => format!("{kind} {namespace}/{name}"),
            (kind, None, name) => format!("{kind} {name}"),
        }
    }

    /// Sets its namespace unless it names one.
    pub(super) fn default_namespace(&mut self, namespace: &str) {
        if let Some(Value::Object(metadata)) = self.object.get_mut("metadata") {
            let own = metadata.entry("namespace").or_insert(Value::Null);
            if own.is_null() {
                *own = namespace.into();
            }
        }
    }

    /// The pods that it creates: its pod template, in its namespace, with a name such as theirs.
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
        Some(Self {
            file: self.file.clone(),
            text: Arc::clone(&self.text),
            document: self.document,
            listed: true,
            object,
        })
    }

    fn is(&self, kind: ObjectKind, namespace: Option<&str>, name: &str) -> bool {
        self.is_a(kind)
            && self.text("/metadata/name") == Some(name)
            && namespace.is_none_or(|namespace| self.namespace() == namespace)
    }

    /// The object.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, Error> {
        serde_json::from_value(self.object.clone()).map_err(|error| {
            let line = if self.listed { None } else { self.line::<T>() };
            broken(&self.file, line.unwrap_or_else(|| error.to_string()))
        })
    }

    /// What is wrong and in which line: an error in a value knows no line, so the text is read again.
    fn line<T: DeserializeOwned>(&self) -> Option<String> {
        let result = yaml::<T>(&mut self.text.as_bytes()).nth(self.document)?;
        result.err().map(|error| error.to_string())
    }
}

fn find_definition<'a>(manifests: &'a [ManifestObject], wanted: &ObjectRef) -> Option<&'a ManifestObject> {
    manifests.iter().find(|manifest| manifest.is(DEFINITION, Some(&wanted.namespace), &wanted.name))
}

/// Adds a file's objects to `all`, those of a list one by one.
pub(super) fn documents(file: &Path, text: &str, all: &mut Vec<ManifestObject>) -> Result<(), Error> {
    let whole: Arc<str> = text.into();
    for (document, result) in yaml::<Value>(&mut text.as_bytes()).enumerate() {
        let mut object = result.map_err(|error| broken(file, error))?;
        let manifest = |listed, object| ManifestObject {
            file: file.to_owned(),
            text: Arc::clone(&whole),
            document,
            listed,
            object,
        };
        if object.is_null() {
            continue;
        }
        let of_kind = object["kind"].as_str().and_then(|kind| kind.strip_suffix("List")).map(str::to_owned);
        match (of_kind, object.get_mut("items")) {
            (Some(kind), Some(Value::Array(items))) => {
                all.extend(items.drain(..).map(|item| manifest(true, with_kind(item, &kind))));
            }
            _ => all.push(manifest(false, object)),
        }
    }
    Ok(())
}

/// An item of a `PodList`, as the API returns it, names no kind.
fn with_kind(mut item: Value, kind: &str) -> Value {
    if let (Value::Object(keys), false) = (&mut item, kind.is_empty()) {
        keys.entry("kind").or_insert_with(|| kind.into());
    }
    item
}

fn yaml<'a, T: DeserializeOwned + 'a>(
    text: &'a mut &[u8],
) -> impl Iterator<Item = Result<T, serde_saphyr::Error>> + 'a {
    serde_saphyr::read_with_options(text, serde_saphyr::options! { with_snippet: false })
}

fn broken(file: &Path, cause: impl std::fmt::Display) -> Error {
    Error::new(Code::InvalidConfig, format!("manifest {}: {cause}", file.display()))
}
