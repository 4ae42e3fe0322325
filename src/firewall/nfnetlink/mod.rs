//! Netlink to nf_tables: messages, dumps and transactions. It knows nothing of rules.

mod conntrack;
mod message;
mod socket;

pub use crate::netlink::{NLM_F_CREATE, attributes};
pub use conntrack::Connection;
pub use message::{Message, NLM_F_APPEND, Verb};
pub use socket::{NfError, NfSocket};
