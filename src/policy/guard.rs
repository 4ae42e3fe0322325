//! The guard: rejects new connections and captured DNS queries that neither the redirection nor an exclusion explains, so
//! that a pod whose redirection is missing fails closed.

use super::redirect::Redirect;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::IpAddr;

/// What the guard rejects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Guard {
    /// What a redirection to the sidecar with these settings captures. If the pod's attachments redirect it, their settings
    /// apply instead.
    Sidecar(Box<Redirect>),
    /// What istio-cni's rules for the ambient mesh capture.
    Ambient(AmbientGuard),
}

/// What istio-cni's rules for the ambient mesh capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AmbientGuard {
    /// Whether they capture DNS over UDP.
    pub dns: bool,
    /// Whether they capture inbound connections.
    pub inbound: bool,
    /// The addresses of the kubelet's probes, to which istio-cni translates the node's.
    pub probes: BTreeSet<IpAddr>,
}
