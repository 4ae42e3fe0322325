//! The netlink protocol of netfilter: dumps and transactions of nf_tables, and tracked connections. It knows nothing
//! about rules.
//!
//! The encoding is our own code: no library encodes the expressions `redir`, `match` and `target`, unless it links C or
//! starts `nft`.

mod conntrack;
pub(crate) mod nfta;
mod socket;

pub use conntrack::Connection;
pub(crate) use socket::retry_changed;
pub use socket::{Batch, NLM_F_APPEND, NfError, NfSocket, Verb};
