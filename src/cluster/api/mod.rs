//! The Kubernetes API: as a source of facts, and for the changes that plugin and agent make to the cluster.

mod failure;
mod objects;
mod request;
mod retry;
mod server;
mod session;

pub(crate) use failure::Failure;
pub(crate) use request::{Collection, Kind};
pub(super) use retry::Deadline;
pub use server::Api;
pub(super) use server::WRITE_TIMEOUT;
