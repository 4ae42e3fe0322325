//! The netlink protocol of netfilter: dumps and transactions of nf_tables, and tracked connections. It knows nothing
//! about rules.
//!
//! The encoding is our own code: the libraries on crates.io either link libnftnl (C), start `nft`, or lack what the
//! plugin depends on: compat expressions, transactions bound to a generation, and limits on dumps.

mod conntrack;
mod socket;

pub use conntrack::Connection;
pub use socket::{Message, NLM_F_APPEND, NfError, NfSocket, Verb};
