//! What the agent keeps of a pod of its node.

use crate::pod::Pod;
use std::net::IpAddr;

/// A pod of the node, as the watch saw it last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedPod {
    /// What decides about its traffic.
    pub pod: Pod,
    /// `metadata.resourceVersion`: a precondition for what is done to it.
    pub resource_version: String,
    /// Whether somebody makes a new one in its place (`metadata.ownerReferences` with `controller: true`,
    /// a node's mirror of a static pod excepted).
    pub owned: bool,
    /// Whether it has ended or is being deleted.
    pub ending: bool,
    /// `status.podIPs`.
    pub addresses: Vec<IpAddr>,
    /// `status.initContainerStatuses`, as far as they have ended once.
    pub ended_init_containers: Vec<EndedContainer>,
}

/// How an init container ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EndedContainer {
    /// Its name.
    pub name: String,
    /// Whether it has succeeded by now (`state.terminated.exitCode` 0).
    pub succeeded: bool,
    /// The exit code of its last failure: `state.terminated`, else `lastState.terminated`.
    pub last_failure: Option<i32>,
    /// That failure's `message`.
    pub message: String,
}
