//! Running pods, for the node's agent: their ADD is repeated, and their live state is read. No CNI call uses this module,
//! and it does not use the cluster.

mod bypassing;
pub mod containers;
mod repeated_add;
mod sandboxes;

pub use bypassing::bypassing;
pub use repeated_add::{Repeated, RepeatedAdd};
pub use sandboxes::{ContainerStatus, Sandbox, Sandboxes, container_status, forget_gone, lacks_of_ambient};
