//! The `nftables` dialect: the same rules in tables of family `inet` that are this plugin's own,
//! `detour-raw`, `detour-mangle` and `detour-nat`, for kernels without `nft_compat` and for pods
//! in a user namespace of their own. Tables and chains are called as in the other dialect.

pub(super) mod live;
pub mod rule;
pub mod set;
mod translate;
mod wire;

pub use live::drift;
pub use live::{NativeChange, changes, messages};
pub use live::{NativeLiveChain, NativeLiveTables};
pub use rule::NativeTables;
pub use rule::text;
pub use translate::translate;
