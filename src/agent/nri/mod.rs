//! The agent as a plugin of the container runtime: the runtime reports each container before its first instruction
//! (Node Resource Interface, NRI). The messages of NRI are here, with only the fields that the agent uses
//! (github.com/containerd/nri, `pkg/api/api.proto`, 0.6 to 0.12). NRI never changes the meaning of a field number.

pub(crate) mod session;
mod ttrpc;

pub(super) use session::START_TIMEOUT;
pub use session::run;

use crate::cni::is_identifier;
use prost::{DecodeError, Message};
use std::collections::BTreeMap;
use tokio::sync::oneshot;

/// What the runtime reports, in the order in which it reports it.
#[derive(Debug)]
pub enum NriReport {
    /// The runtime reports no containers, for this reason and with this next step: sent after the first attempt to
    /// register, and when the reason changes.
    Disconnected(String),
    /// The runtime reports containers from now on.
    Registered {
        /// The name of the runtime, such as `containerd`.
        runtime: String,
        /// Its version.
        version: String,
        /// All pods of the node.
        pods: Vec<NriPod>,
        /// All containers of the node.
        containers: Vec<NriContainer>,
    },
    /// A container is about to start: its control group exists. The runtime delays the first instruction until the
    /// sender is used or dropped, for at most 1 s.
    Start(NriPod, NriContainer, oneshot::Sender<()>),
    /// A container has started.
    Started(NriPod, NriContainer),
    /// A container stops, or has ended.
    Stopped(NriPod, NriContainer),
    /// A container is removed. None of its processes runs.
    Removed(NriPod, NriContainer),
}

/// A pod sandbox, as the runtime reports it.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NriPod {
    /// The ID of the sandbox (`CNI_CONTAINERID`).
    #[prost(string, tag = "1")]
    pub id: String,
    /// The pod's name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The pod's namespace.
    #[prost(string, tag = "4")]
    pub namespace: String,
    /// The pod's UID.
    #[prost(string, tag = "3")]
    pub uid: String,
}

/// A container, as the runtime reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NriContainer {
    /// The container's ID.
    pub id: String,
    /// The ID of its pod sandbox.
    pub pod_id: String,
    /// Its name in the pod; empty if the runtime does not report it.
    pub name: String,
    /// Whether it runs. False in [`NriReport::Start`], which precedes its first instruction.
    pub running: bool,
    /// Its control group: a path, or `SLICE:PREFIX:NAME` of the systemd driver.
    pub cgroups_path: String,
    /// Its first process; 0 if the runtime does not report it (CRI-O).
    pub pid: u32,
}

/// The service of the runtime.
const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";
/// The service of plugins.
const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";
/// The label with a container's name, which the kubelet sets.
const NAME_LABEL: &str = "io.kubernetes.container.name";
/// The states of a running container. A paused container has sockets as well.
const PAUSED: i32 = 2;
const RUNNING: i32 = 3;
/// The events that the plugin subscribes to: the number in the enumeration `Event`, and the method.
const START: (i32, &str) = (6, "StartContainer");
const STARTED: (i32, &str) = (7, "PostStartContainer");
const STOPPED: (i32, &str) = (10, "StopContainer");
const REMOVED: (i32, &str) = (11, "RemoveContainer");
const EVENTS: [(i32, &str); 4] = [START, STARTED, STOPPED, REMOVED];
/// The answer to `Configure` that subscribes to them: a bit for each.
const SUBSCRIPTION: i32 = 1 << (START.0 - 1) | 1 << (STARTED.0 - 1) | 1 << (STOPPED.0 - 1) | 1 << (REMOVED.0 - 1);

/// The argument of `RegisterPlugin`.
#[derive(Clone, PartialEq, Eq, Message)]
struct RegisterPlugin {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    index: String,
}

/// The argument of `Configure`.
#[derive(Clone, PartialEq, Eq, Message)]
struct Configure {
    #[prost(string, tag = "2")]
    runtime: String,
    #[prost(string, tag = "3")]
    version: String,
    /// How long the runtime waits for an answer, in milliseconds; 0 if it does not report this.
    #[prost(int64, tag = "5")]
    request_timeout: i64,
}

/// The answer to `Configure`: a bit for each event that the plugin subscribes to; and to `Synchronize`: 1 if more parts
/// are expected.
#[derive(Clone, PartialEq, Eq, Message)]
struct Answer {
    #[prost(int32, tag = "2")]
    number: i32,
}

/// The argument of `Synchronize`. The runtime splits a list that exceeds the limit of a message, and sets `more` in each
/// part except the last one.
#[derive(Clone, PartialEq, Message)]
struct Synchronize {
    #[prost(message, repeated, tag = "1")]
    pods: Vec<NriPod>,
    #[prost(message, repeated, tag = "2")]
    containers: Vec<Container>,
    #[prost(bool, tag = "3")]
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
struct Container {
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
    #[prost(message, optional, tag = "11")]
    linux: Option<LinuxContainer>,
    #[prost(uint32, tag = "12")]
    pid: u32,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct LinuxContainer {
    #[prost(string, tag = "5")]
    cgroups_path: String,
}

impl From<Container> for NriContainer {
    fn from(container: Container) -> Self {
        let Container { id, pod_id, name, state, mut labels, linux, pid } = container;
        let name = if name.is_empty() { labels.remove(NAME_LABEL).unwrap_or_default() } else { name };
        let cgroups_path = linux.unwrap_or_default().cgroups_path;
        Self { id, pod_id, name, running: matches!(state, PAUSED | RUNNING), cgroups_path, pid }
    }
}

/// Returns the event that a call reports; `None` if the method reports no events. The event is `None` if the plugin did not
/// subscribe to it, or if an ID is not an identifier: IDs become parts of paths. At a start, the runtime waits for `answer`.
fn event(method: &str, message: &[u8], answer: oneshot::Sender<()>) -> Option<Result<Option<NriReport>, DecodeError>> {
    let own = EVENTS.into_iter().find(|(_, name)| *name == method);
    let decoded = match own {
        Some(event) => ContainerEvent::decode(message).map(|it| (Some(event), it.pod, it.container)),
        None if method == "StateChange" => StateChange::decode(message).map(|it| {
            let event = EVENTS.into_iter().find(|(number, _)| *number == it.event);
            (event, it.pod, it.container)
        }),
        None => return None,
    };
    Some(decoded.map(|(event, pod, container)| {
        let (pod, container) = (pod.unwrap_or_default(), NriContainer::from(container.unwrap_or_default()));
        match event.filter(|_| is_identifier(&pod.id) && is_identifier(&container.id))? {
            START => Some(NriReport::Start(pod, container, answer)),
            STARTED => Some(NriReport::Started(pod, container)),
            STOPPED => Some(NriReport::Stopped(pod, container)),
            _ => Some(NriReport::Removed(pod, container)),
        }
    }))
}

#[cfg(test)]
mod tests;
