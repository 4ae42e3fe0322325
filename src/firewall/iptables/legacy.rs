//! The active tables of iptables-legacy, which are not part of nf_tables: the kernel lists only their names.

use crate::firewall::rule::Family;
use crate::trusted_file::read_text;
use std::path::Path;

/// The most that is read of a list of table names. There are few tables, with names of at most 32 bytes.
const MAX_NAMES_FILE: u64 = 64 << 10;

/// Returns the tables of iptables-legacy that are active in the calling thread's network namespace; none if the
/// kernel does not support them. The kernel lists only their names (net/netfilter/x_tables.c, `xt_table_seq_ops`).
#[must_use]
pub fn legacy_tables() -> Vec<(Family, String)> {
    let names = |family: Family| {
        let file = match family {
            Family::Ip => "/proc/thread-self/net/ip_tables_names",
            Family::Ip6 => "/proc/thread-self/net/ip6_tables_names",
        };
        let text = read_text(Path::new(file), MAX_NAMES_FILE).unwrap_or_default();
        text.lines().map(|name| (family, name.to_owned())).collect::<Vec<_>>()
    };
    Family::ALL.into_iter().flat_map(names).collect()
}
