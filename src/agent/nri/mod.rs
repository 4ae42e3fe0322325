//! The agent as a plugin of the container runtime: the runtime reports each container before its first instruction
//! (Node Resource Interface, NRI). The messages of NRI are here, with only the fields that the agent uses
//! (github.com/containerd/nri, `pkg/api/api.proto`, 0.6 to 0.12). NRI never changes the meaning of a field number.

pub(crate) mod session;
mod ttrpc;

pub(super) use session::START_TIMEOUT;
pub use session::run;

use crate::cni::is_identifier;
use prost::Message;
use std::collections::BTreeMap;
use std::mem::take;
use tokio::sync::oneshot;

/// What the runtime reports, in the order in which it reports it.
#[derive(Debug)]
pub enum NriReport {
    /// The runtime reports no containers, for this reason and with this next step: sent after the first attempt to
    /// register, and when the reason changes.
    Disconnected(String),
    /// The runtime reports containers from now on.
    Registered {
        /// Its name and version, such as `containerd v2.2.0`.
        runtime: String,
        /// All running containers of the node.
        running: Vec<NriContainer>,
    },
    /// A container has reached another stage of its life.
    Container(Stage, NriContainer),
}

/// The stages of a container's life.
#[derive(Debug)]
pub enum Stage {
    /// It is about to start: its control group exists. The runtime delays the first instruction until the sender is used
    /// or dropped, for at most 1 s.
    Start(oneshot::Sender<()>),
    /// It has started.
    Started,
    /// It stops, or has ended.
    Stopped,
    /// It is removed. None of its processes runs.
    Removed,
}

/// A container, as the runtime reports it.
#[derive(Clone, PartialEq, Message)]
pub struct NriContainer {
    /// The container's ID.
    #[prost(string, tag = "1")]
    pub id: String,
    /// The ID of its pod sandbox (`CNI_CONTAINERID`).
    #[prost(string, tag = "2")]
    pub pod_id: String,
    /// Its name in the pod; empty if the runtime does not report it.
    #[prost(string, tag = "3")]
    pub name: String,
    #[prost(int32, tag = "4")]
    state: i32,
    #[prost(btree_map = "string, string", tag = "5")]
    labels: BTreeMap<String, String>,
    #[prost(message, optional, tag = "11")]
    linux: Option<LinuxContainer>,
    /// Its first process; 0 if the runtime does not report it (CRI-O).
    #[prost(uint32, tag = "12")]
    pub pid: u32,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct LinuxContainer {
    #[prost(string, tag = "5")]
    cgroups_path: String,
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

/// The argument of `Synchronize`, and of the methods that report an event of one container. The runtime splits a list that
/// exceeds the limit of a message, and sets `more` in each part except the last one.
#[derive(Clone, PartialEq, Message)]
struct Containers {
    #[prost(message, repeated, tag = "2")]
    containers: Vec<NriContainer>,
    #[prost(bool, tag = "3")]
    more: bool,
}

/// The argument of `StateChange`, which reports several kinds of events to plugins of NRI before 0.12.
#[derive(Clone, PartialEq, Message)]
struct StateChange {
    #[prost(int32, tag = "1")]
    event: i32,
    #[prost(message, optional, tag = "3")]
    container: Option<NriContainer>,
}

impl NriContainer {
    /// Returns its control group: a path, or `SLICE:PREFIX:NAME` of the systemd driver.
    #[must_use]
    pub fn cgroups_path(&self) -> &str {
        self.linux.as_ref().map_or("", |linux| &linux.cgroups_path)
    }

    /// Returns the container with the name from its label if the field is empty; `None` if an ID is not an identifier:
    /// IDs become parts of paths.
    fn checked(mut self) -> Option<Self> {
        let label = take(&mut self.labels).remove(NAME_LABEL);
        if self.name.is_empty() {
            self.name = label.unwrap_or_default();
        }
        (is_identifier(&self.id) && is_identifier(&self.pod_id)).then_some(self)
    }
}

/// Returns the event that a call reports; `None` if the method reports no events. The event is `None` if it can't be read,
/// or if the plugin did not subscribe to it. At a start, the runtime waits for `answer`.
fn event(method: &str, message: &[u8], answer: oneshot::Sender<()>) -> Option<Option<NriReport>> {
    let own = EVENTS.into_iter().find(|(_, name)| *name == method);
    let decoded = match own {
        Some(event) => Containers::decode(message).map(|mut it| (Some(event), it.containers.pop())),
        None if method == "StateChange" => StateChange::decode(message)
            .map(|it| (EVENTS.into_iter().find(|(number, _)| *number == it.event), it.container)),
        None => return None,
    };
    // With an error as the answer, containerd would not start the container.
    let log =
        |error| tracing::warn!(%error, "can't read an event of the container runtime; the container starts captured");
    Some(decoded.map_err(log).ok().and_then(|(event, container)| {
        let stage = match event? {
            START => Stage::Start(answer),
            STARTED => Stage::Started,
            STOPPED => Stage::Stopped,
            _ => Stage::Removed,
        };
        Some(NriReport::Container(stage, container?.checked()?))
    }))
}

#[cfg(test)]
mod tests;
