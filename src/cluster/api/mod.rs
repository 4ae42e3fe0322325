//! The Kubernetes API: as a source of facts, and for the changes that plugin and agent make to the cluster.

mod objects;
mod request;
mod server;
mod session;

pub(crate) use request::{Collection, Failure, Kind};
pub use server::Api;
pub(super) use server::WRITE_TIMEOUT;
