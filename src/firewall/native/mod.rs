//! The rule format `nftables`: the same rules in detour's own tables `detour-raw`, `detour-mangle` and `detour-nat` of
//! family `inet`, for kernels without `nft_compat` and for pods in their own user namespace. Tables and chains have
//! the same names as in the format `iptables`.
//!
//! * `rule`: the model of native rules, and their text as `nft` prints it
//! * `set`: sets of numbers, the values of a condition
//! * `translate`: iptables rules as native ones
//! * `containers`: the rules of the table `detour-containers`, which exists in both rule formats
//! * `wire`, with `nft_set`: native rules as nf_tables expressions and sets, and back
//! * `live`: the live state, and the changes to the desired state

mod containers;
pub(super) mod live;
mod nft_set;
pub mod rule;
pub mod set;
mod translate;
mod wire;

pub use containers::table as container_table;
pub use live::{NativeChange, NativeLiveChain, NativeLiveTables, changes};
pub use rule::{NativeTables, text};
pub use translate::{conditions, translate};
