//! Netlink to nf_tables: messages, dumps and transactions. It knows nothing of rules.

mod conntrack;
mod socket;

pub use crate::netlink::{NLM_F_CREATE, attributes};
pub use conntrack::Connection;
pub use socket::{Message, NLM_F_APPEND, Verb};
pub use socket::{NfError, NfSocket};
