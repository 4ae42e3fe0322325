//! The Kubernetes API: as a source of facts, and for the changes that plugin and agent make to the cluster.
//!
//! | file | contents |
//! |---|---|
//! | `server` | [`Api`]: an API server with its credentials; the session with it |
//! | `request` | the requests, one constructor each |
//! | `call` | one request to one server: attempts, responses, errors |
//! | `retry` | retries, backoff, deadline |
//! | `certificate` | next steps for TLS errors |
//! | `facts` | [`Api`] as a source of facts |
//! | `writes` | changes to pods and nodes, Events, tokens |
//! | `pages` | the sizes of pages (pure) |
//! | `lists` | lists of the command line, page by page |
//! | `collection` | [`Collection`]: lists and watches of the agent |
//! | `daemon_set` | getting and watching the agent's DaemonSet |
//! | `service_account` | [`ServiceAccount`]: the agent's requests |
//! | `probe` | [`ApiProbe`]: what the doctor asks |
//! | `user` | [`UserApi`]: requests of the command line about agents, with the kubeconfig of a user |
//! | `exec` | commands in the containers of agents |

mod call;
mod certificate;
mod collection;
mod daemon_set;
mod exec;
mod facts;
mod lists;
mod pages;
mod probe;
mod request;
mod retry;
mod server;
mod service_account;
mod user;
mod writes;

pub(crate) use collection::{Collection, CollectionError};
pub use exec::CommandOutput;
pub use probe::ApiProbe;
pub(super) use server::Api;
pub use service_account::ServiceAccount;
pub use user::UserApi;
pub use writes::PodWriter;
pub(super) use writes::WRITE_TIMEOUT;
