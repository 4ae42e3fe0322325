//! Containers whose traffic bypasses the sidecar, whatever UID they run as.

use super::traffic_policy::Policy;
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

impl Policy {
    /// Returns which traffic of the running container `name` bypasses the sidecar now; `None` if none does.
    /// `proxy_ready` is whether the proxy accepts connections, or did so before in this pod sandbox.
    #[must_use]
    pub fn container_scope(&self, name: &str, proxy_ready: bool) -> Option<ContainerScope> {
        let active = |exclusion: &&ContainerExclusion| {
            exclusion.name == name && !(proxy_ready && exclusion.until == BypassEnd::ProxyReady)
        };
        self.containers.iter().filter(active).map(|exclusion| exclusion.scope).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_widest_exclusion_that_has_not_ended_counts() {
        let exclusion = |scope, until| ContainerExclusion { name: "vault".to_owned(), scope, until };
        let containers = [
            exclusion(ContainerScope::All, BypassEnd::ProxyReady),
            exclusion(ContainerScope::Dns, BypassEnd::ContainerExit),
        ];
        let policy = Policy { containers: containers.into(), ..Policy::default() };
        assert_eq!(policy.container_scope("vault", false), Some(ContainerScope::All));
        assert_eq!(policy.container_scope("vault", true), Some(ContainerScope::Dns));
        assert_eq!(policy.container_scope("other", false), None);
    }
}
