//! How the native tables in the kernel differ from what they should be, in words.

use super::live::{NativeLiveChain, NativeLiveTables};
use super::rule::{NativeChain, NativeTables, table_name};
use crate::firewall::drift::{Difference, Drift, pair};
use crate::firewall::rule::Table;
use std::collections::BTreeMap;

/// Every chain and rule of the tables is this plugin's own, so whatever differs is drift.
#[must_use]
pub fn drift(live: &NativeLiveTables, desired: &NativeTables) -> Vec<Drift> {
    let (no_live, nothing) = (BTreeMap::new(), BTreeMap::new());
    let mut found = Vec::new();
    for table in Table::ALL {
        let (live, desired) = (live.get(&table).unwrap_or(&no_live), desired.get(&table).unwrap_or(&nothing));
        let place = format!("inet {}", table_name(table));
        found.extend(differences(live, desired).into_iter().map(|what| Drift { place: place.clone(), what }));
    }
    found
}

fn differences(live: &BTreeMap<String, NativeLiveChain>, desired: &BTreeMap<String, NativeChain>) -> Vec<Difference> {
    let mut found = Vec::new();
    for (name, wanted) in desired {
        match live.get(name) {
            Some(there) => found.extend(differences_of_chain(name, there, wanted)),
            None => found.push(Difference::NoChain(name.clone())),
        }
    }
    found.extend(live.keys().filter(|name| !desired.contains_key(*name)).cloned().map(Difference::ExtraChain));
    found
}

fn differences_of_chain(name: &str, live: &NativeLiveChain, wanted: &NativeChain) -> Vec<Difference> {
    let mut found = Vec::new();
    if live.hook != Ok(wanted.hook) {
        found.push(Difference::OtherHook(name.to_owned()));
    }
    let text = |rule: &dyn ToString| format!("{name} {}", rule.to_string());
    let rules = live.rules.iter();
    let there = rules.map(|rule| rule.as_ref().map_or_else(|| format!("{name} (a foreign rule)"), |rule| text(rule)));
    let wanted = wanted.rules.iter().map(|rule| text(rule));
    let (paired, extra) = pair(wanted.collect(), there.collect());
    let (there, missing): (Vec<_>, Vec<_>) = paired.into_iter().partition(|(_, is_there)| *is_there);
    let there: Vec<String> = there.into_iter().map(|(rule, _)| rule).collect();
    found.extend(missing.into_iter().map(|(rule, _)| Difference::Missing(rule)));
    let in_order: Vec<String> = live.rules.iter().flatten().map(|rule| text(rule)).collect();
    let is_out_of_order = found.is_empty() && extra.is_empty() && in_order != there;
    found.extend(extra.into_iter().map(Difference::Extra));
    if is_out_of_order {
        let moved = in_order.into_iter().zip(there).filter(|(live, wanted)| live != wanted);
        found.extend(moved.map(|(_, wanted)| Difference::Moved(wanted)));
    }
    found
}
