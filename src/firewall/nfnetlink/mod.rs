//! The netlink protocol of netfilter: dumps and transactions of nf_tables, and tracked connections. It knows nothing
//! about rules.
//!
//! The encoding is our own code: no library encodes the expressions `redir`, `match` and `target`, unless it links C or
//! starts `nft`.

mod conntrack;
mod socket;

pub use conntrack::Connection;
pub(crate) use socket::retry_changed;
pub use socket::{Batch, NLM_F_APPEND, NfError, NfSocket, Verb};

/// The attribute types of tables, chains, rules and sets (`NFTA_…`, linux/netfilter/nf_tables.h).
pub(crate) mod nfta {
    /// `NFTA_TABLE_NAME`, `NFTA_CHAIN_TABLE`, `NFTA_RULE_TABLE`, `NFTA_SET_TABLE`, `NFTA_SET_ELEM_LIST_TABLE`.
    pub(crate) const TABLE: u16 = 1;

    /// `NFTA_TABLE_FLAGS`, and its flag `NFT_TABLE_F_DORMANT`: the table has no effect.
    pub(crate) const TABLE_FLAGS: u16 = 2;
    pub(crate) const DORMANT: u32 = 1;

    /// `NFTA_CHAIN_…`.
    pub(crate) const CHAIN_NAME: u16 = 3;
    pub(crate) const CHAIN_HOOK: u16 = 4;
    pub(crate) const CHAIN_POLICY: u16 = 5;
    pub(crate) const CHAIN_TYPE: u16 = 7;
    /// `NFTA_HOOK_…`, within `CHAIN_HOOK`.
    pub(crate) const HOOK_NUMBER: u16 = 1;
    pub(crate) const HOOK_PRIORITY: u16 = 2;

    /// `NFTA_RULE_…`; `RULE_POSITION` is the handle of the rule before which another one is inserted.
    pub(crate) const RULE_CHAIN: u16 = 2;
    pub(crate) const RULE_HANDLE: u16 = 3;
    pub(crate) const RULE_EXPRESSIONS: u16 = 4;
    pub(crate) const RULE_COMPAT: u16 = 5;
    pub(crate) const RULE_POSITION: u16 = 6;

    /// `NFTA_SET_…`.
    pub(crate) const SET_NAME: u16 = 2;
    pub(crate) const SET_FLAGS: u16 = 3;
    pub(crate) const SET_KEY_TYPE: u16 = 4;
    pub(crate) const SET_KEY_LENGTH: u16 = 5;
    pub(crate) const SET_DESCRIPTION: u16 = 9;
    pub(crate) const SET_ID: u16 = 10;
    pub(crate) const SET_USER_DATA: u16 = 13;
    /// `NFTA_SET_DESC_SIZE`, within `SET_DESCRIPTION`.
    pub(crate) const SET_SIZE: u16 = 1;
    /// `NFTA_SET_ELEM_LIST_…`.
    pub(crate) const ELEMENTS_SET: u16 = 2;
    pub(crate) const ELEMENTS: u16 = 3;
    pub(crate) const ELEMENTS_SET_ID: u16 = 4;
    /// `NFTA_LIST_ELEM`.
    pub(crate) const LIST_ELEMENT: u16 = 1;
    /// `NFTA_SET_ELEM_…`; `ELEMENT_VALUE` is `NFTA_DATA_VALUE`, within `ELEMENT_KEY`.
    pub(crate) const ELEMENT_KEY: u16 = 1;
    pub(crate) const ELEMENT_VALUE: u16 = 1;
    pub(crate) const ELEMENT_FLAGS: u16 = 3;
    pub(crate) const ELEMENT_USER_DATA: u16 = 6;

    /// Type and length of `NFTNL_UDATA_SET_KEYBYTEORDER` (libnftnl, udata.h), which `nft` stores with a set. Without it,
    /// `nft` prints interface names as empty strings and UIDs in the wrong byte order.
    pub(crate) const KEY_BYTE_ORDER: [u8; 2] = [0, 4];
    pub(crate) const HOST_ENDIAN: u32 = 1;
    pub(crate) const BIG_ENDIAN: u32 = 2;
}
