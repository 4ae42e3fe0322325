//! The `nftables` dialect: the same rules in tables of family `inet` that are this plugin's own,
//! `detour-raw`, `detour-mangle` and `detour-nat`, for kernels without `nft_compat` and for pods
//! in a user namespace of their own. Tables and chains are called as in the other dialect.

mod change;
mod condense;
mod decode;
mod drift;
mod encode;
pub(super) mod live;
pub mod rule;
mod set;
pub mod spans;
mod text;
mod translate;

pub use change::{NativeChange, changes, messages};
pub use drift::drift;
pub use live::{NativeLiveChain, NativeLiveTables};
pub use rule::NativeTables;
pub use text::text;
pub use translate::translate;
