//! Running pods, for the node's agent and `doctor`: their live state, their current policies, and changes of both. No CNI
//! call uses this module, and it does not use the cluster.

mod bypassing;
mod container_status;
pub mod containers;
pub mod live_policy;

pub use bypassing::bypassing;
pub use container_status::{ContainerStatus, container_status, forget_gone, restore};
