//! The CNI protocol as values: request, configuration, result, versions, errors and their codes.

mod block;
mod error;
mod list;
mod netconf;

pub use block::{Block, Reader};
pub use error::{Code, Error};
pub use list::List;
pub use netconf::{Dialect, Kubernetes, LogLevel, NetConf, ValidAttachment};
