//! Tables of the older iptables, which are no part of nf_tables.

use super::rule::Family;
use crate::trusted_file::read_text;
use std::path::Path;

/// There is a handful of tables, each with a name of at most 32 bytes.
const LARGEST: u64 = 64 << 10;

/// The tables of `iptables-legacy` that are active in the calling thread's namespace; a kernel
/// without them has none. The kernel tells their names, not what is in them
/// (net/netfilter/x_tables.c, `xt_table_seq_ops`).
#[must_use]
pub fn legacy_tables() -> Vec<(Family, String)> {
    let names = |family: Family| {
        let file = match family {
            Family::Ip => "/proc/thread-self/net/ip_tables_names",
            Family::Ip6 => "/proc/thread-self/net/ip6_tables_names",
        };
        let text = read_text(Path::new(file), LARGEST).unwrap_or_default();
        text.lines().map(|name| (family, name.to_owned())).collect::<Vec<_>>()
    };
    Family::ALL.into_iter().flat_map(names).collect()
}
