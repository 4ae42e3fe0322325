//! The agent as a plugin of the container runtime: the runtime reports each container before its first instruction
//! (Node Resource Interface, NRI).

mod messages;
pub(crate) mod session;
mod ttrpc;

pub(super) use session::START_TIMEOUT;
pub use session::run;
use tokio::sync::oneshot;

/// What the runtime reports, in the order in which it reports it.
#[derive(Debug)]
pub enum NriReport {
    /// The runtime reports no containers, with the cause and the next step: after the first attempt to register, and when
    /// the cause changes.
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

#[cfg(test)]
mod tests;
