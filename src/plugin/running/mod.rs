//! Running pods, for the node's agent: their ADD is repeated, and their live state is read. No CNI call uses this module,
//! and it does not use the cluster.

mod ambient;
mod bypassing;
mod container_status;
pub mod containers;
mod repeated_add;
mod sandboxes;
mod words;

pub use ambient::lacks_of_ambient;
pub use bypassing::bypassing;
pub use container_status::{ContainerStatus, container_status, forget_gone};
pub use repeated_add::{Repeated, RepeatedAdd};
pub use sandboxes::{Sandbox, Sandboxes, guarded_pods};
