//! The messages of NRI that the plugin needs, with only the fields that it uses (github.com/containerd/nri,
//! `pkg/api/api.proto`, 0.6 to 0.12). A field number never changes its meaning.

use super::{NriContainer, NriPod, NriReport};
use crate::cni::is_identifier;
use prost::{DecodeError, Message};
use std::collections::BTreeMap;
use tokio::sync::oneshot;

/// The service of the runtime.
pub(super) const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";
/// The service of plugins.
pub(super) const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";
/// The label with a container's name, which the kubelet sets.
const NAME_LABEL: &str = "io.kubernetes.container.name";
/// The states of a container in which it runs. A paused container has sockets as well.
const PAUSED: i32 = 2;
const RUNNING: i32 = 3;
/// The events that the plugin subscribes to: the number in the enumeration `Event`, and the method.
const START: (i32, &str) = (6, "StartContainer");
const STARTED: (i32, &str) = (7, "PostStartContainer");
const STOPPED: (i32, &str) = (10, "StopContainer");
const REMOVED: (i32, &str) = (11, "RemoveContainer");
const EVENTS: [(i32, &str); 4] = [START, STARTED, STOPPED, REMOVED];

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
    pub(super) runtime: String,
    #[prost(string, tag = "3")]
    pub(super) version: String,
    /// How long the runtime waits for an answer, in milliseconds; 0 if it does not report this.
    #[prost(int64, tag = "5")]
    pub(super) request_timeout: i64,
}

/// The answer to `Configure`, a bit for each event that the plugin subscribes to, and to `Synchronize`, 1 if it expects more.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Answer {
    #[prost(int32, tag = "2")]
    pub(super) number: i32,
}

/// Returns the answer that subscribes to all events that the plugin handles.
pub(super) fn subscription() -> Answer {
    Answer { number: EVENTS.into_iter().map(|(number, _)| 1 << (number - 1)).sum() }
}

/// The argument of `Synchronize`. The runtime splits a list that exceeds the limit of a message, and sets `more` in each
/// part except the last one.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Synchronize {
    #[prost(message, repeated, tag = "1")]
    pub(super) pods: Vec<NriPod>,
    #[prost(message, repeated, tag = "2")]
    pub(super) containers: Vec<Container>,
    #[prost(bool, tag = "3")]
    pub(super) more: bool,
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
        let Container { id, pod_id, name, state, mut labels, linux, pid } = container;
        let name = if name.is_empty() { labels.remove(NAME_LABEL).unwrap_or_default() } else { name };
        let cgroups_path = linux.unwrap_or_default().cgroups_path;
        Self { id, pod_id, name, running: matches!(state, PAUSED | RUNNING), cgroups_path, pid }
    }
}

/// Returns the event that a call reports; `None` if the method reports no events. There is no event if the plugin did not
/// subscribe to it, or if an ID is not an identifier: IDs become parts of paths. The runtime waits for `answer` at a start.
pub(super) fn event(
    method: &str,
    message: &[u8],
    answer: oneshot::Sender<()>,
) -> Option<Result<Option<NriReport>, DecodeError>> {
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
