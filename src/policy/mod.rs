//! The traffic policy of a pod as values: the redirection to the sidecar, and the traffic that bypasses it.
//!
//! Sub-plugins contribute to a policy and [`crate::firewall`] turns it into rules. This module depends neither on
//! Kubernetes nor on the kernel.
//!
//! | file | contents |
//! |---|---|
//! | `redirect` | settings of the redirection |
//! | `container` | containers whose traffic bypasses the sidecar |
//! | `exclusion`, `owners` | exclusions; many exclusions grouped by traffic |
//! | `traffic_policy`, `union` | the policy of an attachment; the union of several |
//! | `live` | which part of a changed policy a running pod follows |
//! | `tightened` | the part of a changed policy that only takes bypasses away |

mod container;
mod exclusion;
mod live;
mod owners;
mod redirect;
mod tightened;
mod traffic_policy;
mod union;

pub use container::{BypassEnd, ContainerExclusion, ContainerScope};
pub use exclusion::{Exclusion, IdRange, Protocol, TrafficOwner};
pub use live::LivePolicyScope;
pub use redirect::{DnsCapture, Groups, InterceptionMode, Ipv6, PortRange, Ports, Ranges, Redirect};
pub use traffic_policy::{Interception, Policy};
pub use union::{Combine, Conflict};
