//! Native rules, in detour's own tables of family `inet`: the exclusions of every pod in `detour-exclusions`, and the
//! redirection in the rule format `nftables` in `detour-raw`, `detour-mangle` and `detour-nat`. The latter is for kernels
//! without `nft_compat` and for pods in their own user namespace; its chains have the same names as in the format
//! `iptables`.
//!
//! * `rule`: native tables and chains, and their text as `nft` prints it
//! * `translate`: the rules of a redirection as native ones
//! * `exclusions`: the rules of the table `detour-exclusions`
//! * `guard`: the rules of the guard, in the same table, whose sets of containers it looks up
//! * `wire`, with `nft_set`: native rules as nf_tables expressions and sets, and back
//! * `live`: the live tables, and the changes to the desired ones

mod exclusions;
mod guard;
pub(super) mod live;
mod nft_set;
pub mod rule;
mod translate;
pub(super) mod wire;

pub(crate) use exclusions::EXCLUSIONS;
pub(super) use guard::PREFIX as GUARD_PREFIX;
pub use guard::Rejected;
pub(super) use live::changes;
pub use live::{NativeLiveChain, NativeLiveTables};
pub use rule::{NativeTables, text};

use super::ruleset::Ruleset;
use rule::NativeTable;

/// Returns the native tables of a pod: its exclusions and, with `redirection`, its redirection in the rule format
/// `nftables`.
#[must_use]
pub fn tables(ruleset: &Ruleset, redirection: bool) -> NativeTables {
    let mut tables = if redirection { translate::redirection(ruleset) } else { NativeTables::new() };
    let mut chains = ruleset.excluded.as_ref().map(exclusions::chains).unwrap_or_default();
    chains.extend(ruleset.guarded.iter().flat_map(|guarded| guard::chains(guarded, ruleset.excluded.as_ref())));
    tables.extend((!chains.is_empty()).then_some((NativeTable::Exclusions, chains)));
    tables
}
