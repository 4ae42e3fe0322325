//! The attribute types of tables, chains, rules and sets (`NFTA_…`, linux/netfilter/nf_tables.h).

/// `NFTA_TABLE_NAME`, `NFTA_CHAIN_TABLE`, `NFTA_RULE_TABLE`, `NFTA_SET_TABLE`, `NFTA_SET_ELEM_LIST_TABLE`.
pub(crate) const TABLE: u16 = 1;

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
