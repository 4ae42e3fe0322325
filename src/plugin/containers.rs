//! Excluded containers of a running pod: adds a container's control group to the sets in the pod's network namespace
//! when the container starts, and removes it when the bypass ends. The node's agent and the OCI hook call it.

use crate::cni::{Code, Error};
use crate::host_path::HostRoot;
use crate::netns::NetNs;
use crate::policy::{ContainerScope, Policy};

/// A running container, or one that the runtime is about to start.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunningContainer {
    /// Its name in the pod.
    pub name: String,
    /// Its ID.
    pub id: String,
    /// The ID of its control group.
    pub cgroup: u64,
}

/// The excluded containers of one pod sandbox, from saved state.
#[derive(Debug)]
pub struct ExcludedContainers {
    netns: NetNs,
    policy: Policy,
}

/// What is known about the pod's containers.
#[derive(Debug, Clone, Copy, Default)]
pub struct ObservedContainers<'a> {
    /// Containers that run. Excluded ones get an element.
    pub running: &'a [RunningContainer],
    /// The IDs of containers that have exited. Their elements are removed.
    pub exited: &'a [String],
    /// Whether `running` lists all running containers of the pod. Then all other elements are removed.
    pub complete: bool,
    /// Whether the proxy is known to have accepted connections before in this sandbox. Otherwise it is checked.
    pub proxy_ready: bool,
}

/// The changes of one call, by name of the container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerChanges {
    /// The containers whose traffic now bypasses the sidecar.
    pub exempted: Vec<(String, ContainerScope)>,
    /// The running containers whose bypass ended or narrowed because the proxy accepts connections.
    pub ended: Vec<String>,
    /// The number of removed elements of containers that have exited.
    pub removed: usize,
    /// Whether the proxy accepts connections, or did before.
    pub proxy_ready: bool,
}

impl ExcludedContainers {
    /// Reads the excluded containers of a pod sandbox (`CNI_CONTAINERID`) and opens its network namespace; `None` if
    /// its attachments exclude no container. `root` is where the node's file system is mounted.
    ///
    /// # Errors
    /// The saved state can't be read, or the network namespace can't be opened.
    pub fn find(_sandbox_id: &str, _root: &HostRoot) -> Result<Option<Self>, Error> {
        Err(Error::new(Code::Internal, "not implemented"))
    }

    /// Returns the union of the policies of the sandbox's attachments.
    #[must_use]
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Makes the sets match the observed containers and the state of the proxy. Takes no lock: it never waits for a
    /// call of the plugin.
    ///
    /// # Errors
    /// The network namespace can't be entered, or the kernel refuses the change.
    pub fn reconcile(&self, _observed: ObservedContainers<'_>) -> Result<ContainerChanges, Error> {
        Err(Error::new(Code::Internal, format!("not implemented: {}", self.netns.path().display())))
    }
}
