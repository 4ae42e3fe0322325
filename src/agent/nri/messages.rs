//! The messages of NRI that the plugin needs, with only the fields that it uses (github.com/containerd/nri,
//! `pkg/api/api.proto`, 0.6 to 0.12). A field number never changes its meaning.

use super::protobuf::{Fields, Malformed, Message, Value};
use super::ttrpc::short_text;
use super::{NriContainer, NriPod};
use crate::cni::is_identifier;
use std::path::PathBuf;

/// The service of the runtime.
pub(super) const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";
/// The service of plugins.
pub(super) const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";

/// The label with a container's name, which the kubelet sets.
const NAME_LABEL: &[u8] = b"io.kubernetes.container.name";
/// CRI-O's annotation with the name and attempt of a container, as JSON.
const METADATA_ANNOTATION: &[u8] = b"io.kubernetes.cri-o.Metadata";

/// The kind of an event of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventKind {
    /// The container is about to start.
    Start,
    /// It has started.
    Started,
    /// It stops, or has ended.
    Stop,
    /// It is removed.
    Remove,
}

impl EventKind {
    const ALL: [Self; 4] = [Self::Start, Self::Started, Self::Stop, Self::Remove];

    /// The number in the enumeration `Event`.
    const fn number(self) -> u64 {
        match self {
            Self::Start => 6,
            Self::Started => 7,
            Self::Stop => 10,
            Self::Remove => 11,
        }
    }

    /// Returns the kind that a method reports.
    pub(super) fn of_method(method: &[u8]) -> Option<Self> {
        match method {
            b"StartContainer" => Some(Self::Start),
            b"PostStartContainer" => Some(Self::Started),
            b"StopContainer" => Some(Self::Stop),
            b"RemoveContainer" => Some(Self::Remove),
            _ => None,
        }
    }
}

/// An event of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Event {
    /// The kind; `None` if the plugin did not subscribe to it.
    pub(super) kind: Option<EventKind>,
    /// The pod of the container.
    pub(super) pod: NriPod,
    /// The container.
    pub(super) container: NriContainer,
}

impl Event {
    /// Reads the argument of a method that reports one kind of events: {1 pod, 2 container}.
    pub(super) fn of_method(kind: EventKind, message: &[u8]) -> Result<Self, Malformed> {
        let mut event = Self { kind: Some(kind), ..Self::default() };
        for field in Fields::of(message) {
            match field? {
                (1, Value::Bytes(fields)) => event.pod = pod(fields)?,
                (2, Value::Bytes(fields)) => event.container = container(fields)?,
                _ => {}
            }
        }
        Ok(event)
    }

    /// Reads the argument of `StateChange`, which reports several kinds of events to plugins of NRI before 0.12:
    /// {1 event, 2 pod, 3 container}.
    pub(super) fn of_state_change(message: &[u8]) -> Result<Self, Malformed> {
        let mut event = Self::default();
        for field in Fields::of(message) {
            match field? {
                (1, Value::Number(number)) => {
                    event.kind = EventKind::ALL.into_iter().find(|kind| kind.number() == number);
                }
                (2, Value::Bytes(fields)) => event.pod = pod(fields)?,
                (3, Value::Bytes(fields)) => event.container = container(fields)?,
                _ => {}
            }
        }
        Ok(event)
    }

    /// Returns whether the IDs are identifiers, so that they can be parts of paths.
    pub(super) fn is_valid(&self) -> bool {
        is_identifier(&self.pod.id) && is_identifier(&self.container.id)
    }
}

/// The argument of `RegisterPlugin`: {1 plugin_name, 2 plugin_idx}.
pub(super) fn registration(name: &str, index: &str) -> Vec<u8> {
    Message::default().bytes(1, name.as_bytes()).bytes(2, index.as_bytes()).encoded()
}

/// The argument of `Configure`: {2 runtime_name, 3 runtime_version, 5 request_timeout in milliseconds}.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Configuration {
    /// The name of the runtime.
    pub(super) runtime: String,
    /// Its version.
    pub(super) version: String,
    /// How long the runtime waits for an answer, in milliseconds; 0 if it does not report this.
    pub(super) request_timeout: u64,
}

impl Configuration {
    /// Reads the argument.
    pub(super) fn read(message: &[u8]) -> Result<Self, Malformed> {
        let mut configuration = Self::default();
        for field in Fields::of(message) {
            match field? {
                (2, Value::Bytes(text)) => configuration.runtime = short_text(text),
                (3, Value::Bytes(text)) => configuration.version = short_text(text),
                (5, Value::Number(number)) => configuration.request_timeout = number,
                _ => {}
            }
        }
        Ok(configuration)
    }

    /// Returns the answer: {2 events}, a bit for each event that the plugin subscribes to.
    pub(super) fn answer() -> Message {
        Message::default().number(2, EventKind::ALL.into_iter().map(|kind| 1 << (kind.number() - 1)).sum())
    }
}

/// The argument of `Synchronize`: {1 pods, 2 containers, 3 more}. The runtime splits a list that exceeds the limit of a
/// message, and sets `more` in each part except the last one.
#[derive(Debug, Default)]
pub(super) struct Synchronization {
    /// The pods.
    pub(super) pods: Vec<NriPod>,
    /// The containers.
    pub(super) containers: Vec<NriContainer>,
    /// Whether another part follows.
    pub(super) more: bool,
}

impl Synchronization {
    /// Adds a part, without pods and containers whose ID is not an identifier.
    pub(super) fn add(&mut self, message: &[u8]) -> Result<(), Malformed> {
        self.more = false;
        for field in Fields::of(message) {
            match field? {
                (1, Value::Bytes(fields)) => self.pods.push(pod(fields)?),
                (2, Value::Bytes(fields)) => self.containers.push(container(fields)?),
                (3, Value::Number(more)) => self.more = more != 0,
                _ => {}
            }
        }
        self.pods.retain(|pod| is_identifier(&pod.id));
        self.containers.retain(|it| is_identifier(&it.id) && is_identifier(&it.pod_id));
        Ok(())
    }

    /// Returns how many bytes the parts occupy in memory.
    pub(super) fn size(&self) -> usize {
        let pods = self.pods.iter().map(|pod| {
            let netns = pod.netns.as_ref().map_or(0, |path| path.as_os_str().len());
            size_of::<NriPod>() + pod.id.len() + pod.name.len() + pod.namespace.len() + pod.uid.len() + netns
        });
        let containers = self.containers.iter().map(|it| {
            size_of::<NriContainer>() + it.id.len() + it.pod_id.len() + it.name.len() + it.cgroups_path.len()
        });
        pods.chain(containers).sum()
    }

    /// Returns the answer: {2 more}.
    pub(super) fn answer(&self) -> Message {
        Message::default().number(2, self.more.into())
    }
}

/// Reads a pod: {1 id, 2 name, 3 uid, 4 namespace, 8 linux {5 namespaces}, 9 pid}.
pub(super) fn pod(message: &[u8]) -> Result<NriPod, Malformed> {
    let mut pod = NriPod::default();
    for field in Fields::of(message) {
        match field? {
            (1, Value::Bytes(id)) => pod.id = text(id),
            (2, Value::Bytes(name)) => pod.name = text(name),
            (3, Value::Bytes(uid)) => pod.uid = text(uid),
            (4, Value::Bytes(namespace)) => pod.namespace = text(namespace),
            (8, Value::Bytes(linux)) => {
                for field in Fields::of(linux) {
                    if let (5, Value::Bytes(namespace)) = field? {
                        pod.netns = network_namespace(namespace)?.or(pod.netns);
                    }
                }
            }
            (9, Value::Number(pid)) => pod.pid = u32::try_from(pid).unwrap_or_default(),
            _ => {}
        }
    }
    Ok(pod)
}

/// Reads a namespace, {1 type, 2 path}, and returns the path of a network namespace.
fn network_namespace(message: &[u8]) -> Result<Option<PathBuf>, Malformed> {
    let (kind, path) = pair(message)?;
    Ok((kind == b"network" && !path.is_empty()).then(|| text(path).into()))
}

/// Reads a container: {1 id, 2 pod_sandbox_id, 3 name, 4 state, 5 labels, 6 annotations, 11 linux {5 cgroups_path}, 12
/// pid}.
pub(super) fn container(message: &[u8]) -> Result<NriContainer, Malformed> {
    let mut container = NriContainer::default();
    let (mut label, mut metadata) = (None, None);
    for field in Fields::of(message) {
        match field? {
            (1, Value::Bytes(id)) => container.id = text(id),
            (2, Value::Bytes(id)) => container.pod_id = text(id),
            (3, Value::Bytes(name)) => container.name = text(name),
            // Paused or running; a paused container has sockets as well.
            (4, Value::Number(state)) => container.running = matches!(state, 2 | 3),
            (5, Value::Bytes(entry)) => label = value_of(NAME_LABEL, entry)?.or(label),
            (6, Value::Bytes(entry)) => metadata = value_of(METADATA_ANNOTATION, entry)?.or(metadata),
            (11, Value::Bytes(linux)) => {
                for field in Fields::of(linux) {
                    if let (5, Value::Bytes(path)) = field? {
                        container.cgroups_path = text(path);
                    }
                }
            }
            (12, Value::Number(pid)) => container.pid = u32::try_from(pid).unwrap_or_default(),
            _ => {}
        }
    }
    if container.name.is_empty() {
        container.name = label.map(text).or_else(|| name_in(metadata?)).unwrap_or_default();
    }
    Ok(container)
}

fn name_in(metadata: &[u8]) -> Option<String> {
    let metadata: serde_json::Value = serde_json::from_slice(metadata).ok()?;
    Some(metadata.get("name")?.as_str()?.to_owned())
}

fn value_of<'a>(key: &[u8], entry: &'a [u8]) -> Result<Option<&'a [u8]>, Malformed> {
    let (name, value) = pair(entry)?;
    Ok((name == key && !value.is_empty()).then_some(value))
}

/// Reads a message of two texts: {1 first, 2 second}. The entries of a map have this form.
fn pair(message: &[u8]) -> Result<(&[u8], &[u8]), Malformed> {
    let (mut first, mut second): (&[u8], &[u8]) = (&[], &[]);
    for field in Fields::of(message) {
        match field? {
            (1, Value::Bytes(bytes)) => first = bytes,
            (2, Value::Bytes(bytes)) => second = bytes,
            _ => {}
        }
    }
    Ok((first, second))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
