//! Netlink to nf_tables: attributes, messages, the socket. It knows nothing of rules.

pub mod attributes;
mod conntrack;
mod message;
mod socket;

pub use conntrack::Connection;
pub use message::{Message, NLM_F_APPEND, NLM_F_CREATE, Verb};
pub use socket::{Allowance, Error, Socket};
