//! The messages of NRI that the plugin needs, with only the fields that it uses (github.com/containerd/nri,
//! `pkg/api/api.proto`, 0.6 to 0.12). A field number never changes its meaning.

use super::ttrpc::short_text;
use super::{NriContainer, NriPod};
use crate::cni::is_identifier;
use prost::{DecodeError, Message};
use std::collections::BTreeMap;

/// The service of the runtime.
pub(super) const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";
/// The service of plugins.
pub(super) const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";

/// The label with a container's name, which the kubelet sets.
const NAME_LABEL: &str = "io.kubernetes.container.name";
/// CRI-O's annotation with the name and attempt of a container, as JSON.
const METADATA_ANNOTATION: &str = "io.kubernetes.cri-o.Metadata";
/// The states of a container in which it runs. A paused container has sockets as well.
const PAUSED: i32 = 2;
const RUNNING: i32 = 3;

/// The argument of `RegisterPlugin`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct RegisterPlugin {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) index: String,
}

/// The argument of `Configure`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Configure {
    #[prost(string, tag = "2")]
    runtime: String,
    #[prost(string, tag = "3")]
    version: String,
    /// How long the runtime waits for an answer, in milliseconds; 0 if it does not report this.
    #[prost(int64, tag = "5")]
    pub(super) request_timeout: i64,
}

impl Configure {
    /// Returns the name of the runtime, and its version.
    pub(super) fn runtime(&self) -> (String, String) {
        (short_text(&self.runtime), short_text(&self.version))
    }
}

/// The answer to `Configure`: a bit for each event that the plugin subscribes to.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Subscription {
    #[prost(int32, tag = "2")]
    events: i32,
}

impl Subscription {
    /// Subscribes to all kinds of events that the plugin handles.
    pub(super) fn to_all() -> Self {
        Self { events: EventKind::ALL.into_iter().map(|kind| 1 << (kind as i32 - 1)).sum() }
    }
}

/// The argument of `Synchronize`. The runtime splits a list that exceeds the limit
/// of a message, and sets `more` in each part except the last one.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Synchronize {
    #[prost(message, repeated, tag = "1")]
    pods: Vec<NriPod>,
    #[prost(message, repeated, tag = "2")]
    containers: Vec<Container>,
    #[prost(bool, tag = "3")]
    more: bool,
}

/// The answer to `Synchronize`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct SynchronizeAnswer {
    #[prost(bool, tag = "2")]
    more: bool,
}

/// The argument of a method that reports one kind of events.
#[derive(Clone, PartialEq, Message)]
struct ContainerEvent {
    #[prost(message, optional, tag = "1")]
    pod: Option<NriPod>,
    #[prost(message, optional, tag = "2")]
    container: Option<Container>,
}

/// The argument of `StateChange`, which reports several kinds of events to plugins of NRI before 0.12.
#[derive(Clone, PartialEq, Message)]
struct StateChange {
    #[prost(int32, tag = "1")]
    event: i32,
    #[prost(message, optional, tag = "2")]
    pod: Option<NriPod>,
    #[prost(message, optional, tag = "3")]
    container: Option<Container>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Container {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    pod_id: String,
    #[prost(string, tag = "3")]
    name: String,
    #[prost(int32, tag = "4")]
    state: i32,
    #[prost(btree_map = "string, string", tag = "5")]
    labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "6")]
    annotations: BTreeMap<String, String>,
    #[prost(message, optional, tag = "11")]
    linux: Option<LinuxContainer>,
    #[prost(uint32, tag = "12")]
    pid: u32,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct LinuxContainer {
    #[prost(string, tag = "5")]
    cgroups_path: String,
}

impl From<Container> for NriContainer {
    fn from(container: Container) -> Self {
        let Container { id, pod_id, name, state, mut labels, annotations, linux, pid } = container;
        let in_metadata = || {
            let metadata: serde_json::Value = serde_json::from_str(annotations.get(METADATA_ANNOTATION)?).ok()?;
            Some(metadata.get("name")?.as_str()?.to_owned())
        };
        let in_labels = labels.remove(NAME_LABEL);
        let given = [Some(name), in_labels].into_iter().flatten().find(|name| !name.is_empty());
        Self {
            id,
            pod_id,
            name: given.or_else(in_metadata).unwrap_or_default(),
            running: matches!(state, PAUSED | RUNNING),
            cgroups_path: linux.unwrap_or_default().cgroups_path,
            pid,
        }
    }
}

/// The kind of an event of a container, with its number in the enumeration `Event`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventKind {
    /// The container is about to start.
    Start = 6,
    /// It has started.
    Started = 7,
    /// It stops, or has ended.
    Stop = 10,
    /// It is removed.
    Remove = 11,
}

impl EventKind {
    const ALL: [Self; 4] = [Self::Start, Self::Started, Self::Stop, Self::Remove];

    /// Returns the kind that a method reports.
    pub(super) fn of_method(method: &str) -> Option<Self> {
        match method {
            "StartContainer" => Some(Self::Start),
            "PostStartContainer" => Some(Self::Started),
            "StopContainer" => Some(Self::Stop),
            "RemoveContainer" => Some(Self::Remove),
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
    /// Reads the argument of a method that reports one kind of events.
    pub(super) fn of_method(kind: EventKind, message: &[u8]) -> Result<Self, DecodeError> {
        let ContainerEvent { pod, container } = ContainerEvent::decode(message)?;
        Ok(Self::new(Some(kind), pod, container))
    }

    /// Reads the argument of `StateChange`.
    pub(super) fn of_state_change(message: &[u8]) -> Result<Self, DecodeError> {
        let StateChange { event, pod, container } = StateChange::decode(message)?;
        Ok(Self::new(EventKind::ALL.into_iter().find(|kind| *kind as i32 == event), pod, container))
    }

    fn new(kind: Option<EventKind>, pod: Option<NriPod>, container: Option<Container>) -> Self {
        Self { kind, pod: pod.unwrap_or_default(), container: container.unwrap_or_default().into() }
    }

    /// Returns whether the IDs are identifiers, so that they can be parts of paths.
    pub(super) fn is_valid(&self) -> bool {
        is_identifier(&self.pod.id) && is_identifier(&self.container.id)
    }
}

/// The pods and containers of the node, from all parts of a list.
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
    pub(super) fn add(&mut self, message: &[u8]) -> Result<(), DecodeError> {
        let Synchronize { pods, containers, more } = Synchronize::decode(message)?;
        self.more = more;
        self.pods.extend(pods.into_iter().filter(|pod| is_identifier(&pod.id)));
        let is_valid = |it: &NriContainer| is_identifier(&it.id) && is_identifier(&it.pod_id);
        self.containers.extend(containers.into_iter().map(NriContainer::from).filter(is_valid));
        Ok(())
    }

    /// Returns how many bytes the parts occupy in memory.
    pub(super) fn size(&self) -> usize {
        let of_pod =
            |pod: &NriPod| size_of::<NriPod>() + pod.id.len() + pod.name.len() + pod.namespace.len() + pod.uid.len();
        let of_container = |it: &NriContainer| {
            size_of::<NriContainer>() + it.id.len() + it.pod_id.len() + it.name.len() + it.cgroups_path.len()
        };
        self.pods.iter().map(of_pod).chain(self.containers.iter().map(of_container)).sum()
    }

    /// Returns the answer.
    pub(super) const fn answer(&self) -> SynchronizeAnswer {
        SynchronizeAnswer { more: self.more }
    }
}
