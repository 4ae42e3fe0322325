//! The agent as a plugin of the container runtime: the runtime reports each container before its first instruction
//! (Node Resource Interface, NRI).

mod connection;
mod messages;
pub(crate) mod session;
mod ttrpc;

pub use connection::run;

/// What the runtime reports, in the order in which it reports it. All calls come from the thread of [`run`].
///
/// The runtime handles one container of the node at a time, and waits for the plugin for at most 2 s. Therefore, no
/// method waits for the API server, or for work without a timeout.
pub trait NriHandler: Send {
    /// Called after each registration, with all pods and containers of the node. Returns at once.
    fn synchronize(&mut self, pods: Vec<NriPod>, containers: Vec<NriContainer>);

    /// Called when a container is about to start. Its control group exists, and the runtime delays the first instruction
    /// until this function returns.
    fn start(&mut self, pod: &NriPod, container: &NriContainer);

    /// Called after a container has started.
    fn started(&mut self, pod: &NriPod, container: &NriContainer);

    /// Called when a container stops or has ended.
    fn stopped(&mut self, pod: &NriPod, container: &NriContainer);

    /// Called when a container is removed. None of its processes runs.
    fn removed(&mut self, pod: &NriPod, container: &NriContainer);
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
    /// Whether it runs. False in [`NriHandler::start`], which precedes its first instruction.
    pub running: bool,
    /// Its control group: a path, or `SLICE:PREFIX:NAME` of the systemd driver.
    pub cgroups_path: String,
    /// Its first process; 0 if the runtime does not report it (CRI-O).
    pub pid: u32,
}

/// Whether the runtime reports containers to this plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NriStatus {
    /// The runtime reports no containers, with the cause and the next step.
    Disconnected(String),
    /// The runtime reports containers: [`NriHandler::synchronize`] has been called.
    Registered {
        /// The name of the runtime, such as `containerd`.
        runtime: String,
        /// Its version.
        version: String,
    },
}

#[cfg(test)]
mod tests;
