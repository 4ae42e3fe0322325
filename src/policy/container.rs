//! Containers whose traffic bypasses the sidecar, even if others have the same UID.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Which traffic of an excluded container bypasses the sidecar, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContainerScope {
    /// DNS queries over UDP and TCP.
    Dns,
    /// All outbound traffic.
    All,
}

/// When the bypass of an excluded container ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BypassEnd {
    /// When the proxy accepts connections, or the container exits.
    ProxyReady,
    /// When the container exits.
    ContainerExit,
}

/// A container of the pod whose traffic bypasses the sidecar.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContainerExclusion {
    /// The name of the container.
    pub name: String,
    /// The traffic that bypasses the sidecar.
    pub scope: ContainerScope,
    /// When the bypass ends.
    pub until: BypassEnd,
}

impl fmt::Display for ContainerScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dns => "dns",
            Self::All => "all",
        })
    }
}

impl fmt::Display for BypassEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ProxyReady => "proxy-ready",
            Self::ContainerExit => "container-exit",
        })
    }
}
