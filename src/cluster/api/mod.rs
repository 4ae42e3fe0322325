//! The Kubernetes API: as a source of facts, and for the changes that plugin and agent make to the cluster.

mod call;
mod collection;
mod daemon_set;
mod facts;
mod node_api;
mod pages;
mod request;
mod retry;
mod server;
mod service_account;
mod session;
mod writes;

pub(crate) use collection::{Collection, CollectionError};
pub use node_api::NodeApi;
pub(super) use retry::Deadline;
pub(super) use server::Api;
pub use server::ApiConnection;
pub use service_account::ServiceAccount;
pub(super) use writes::WRITE_TIMEOUT;
