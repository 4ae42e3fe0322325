//! The traffic policy of a pod as values: the redirection to the sidecar, the traffic that bypasses it, and the guard.
//!
//! Sub-plugins contribute to a policy and [`crate::firewall`] turns it into rules. This module depends neither on
//! Kubernetes nor on the kernel.

mod exclusion;
mod owners;
mod redirect;
mod traffic_policy;
mod union;

pub use exclusion::{ContainerExclusion, ContainerScope, Exclusion, IdRange, Protocol, TrafficOwner};
pub use redirect::{DnsCapture, Groups, InterceptionMode, Ipv6, ListOrAll, PortRange, Ports, Ranges, Redirect};
pub use traffic_policy::{AmbientGuard, Guard, Interception, Policy};
pub use union::{Combine, Conflict, Contradiction, united};
