//! The Kubernetes API: as a source of facts, and for the changes that plugin and agent make to the cluster.

mod account;
mod failure;
mod node_api;
mod request;
mod retry;
mod server;
mod session;

pub use account::{ApiConnection, ServiceAccount};
pub(crate) use failure::Failure;
pub use node_api::NodeApi;
pub(crate) use request::Kind;
pub(super) use retry::Deadline;
pub(super) use server::{Api, WRITE_TIMEOUT};
pub(crate) use session::Collection;
