//! The pod's rules as the real tools `iptables` and `nft` show them.

use super::place::Place;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::process::Command;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) const BOTH: [Self; 2] = [Self::V4, Self::V6];

    fn program(self, suffix: &str) -> Command {
        let name = match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        };
        Command::new(format!("{name}{suffix}"))
    }
}

/// The output of `iptables-save` without comments, counters, and the content of an unused table. Chains are sorted by
/// name; rules keep their order.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Ruleset {
    tables: BTreeMap<String, BTreeMap<String, Vec<String>>>,
}

impl Ruleset {
    /// Parses the output; drops `[…]` counters, `#` lines and policies.
    pub(crate) fn parse(save: &str) -> Self {
        let mut tables: BTreeMap<String, BTreeMap<String, Vec<String>>> = BTreeMap::new();
        let mut table = String::new();
        for line in save.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = name.to_owned();
            } else if let Some(chain) = line.strip_prefix(':') {
                let (chain, policy) = chain.split_once(' ').expect("a chain has a policy, or `-`");
                let rules = tables.entry(table.clone()).or_default().entry(chain.to_owned()).or_default();
                assert!(rules.is_empty() && !policy.starts_with("DROP"), "{line}");
            } else if let Some(rule) = line.strip_prefix("-A ") {
                let chain = rule.split(' ').next().expect("split yields at least one");
                let chains = tables.get_mut(&table).expect("a rule is in a table");
                chains.get_mut(chain).expect("chains come first").push(rule.to_owned());
            }
        }
        for chains in tables.values_mut() {
            chains.retain(|chain, rules| !rules.is_empty() || !is_built_in(chain));
        }
        tables.retain(|_, chains| !chains.is_empty());
        Self { tables }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// Returns the rules of a chain, without `-A CHAIN`.
    pub(crate) fn chain(&self, table: &str, chain: &str) -> Vec<&str> {
        let rules = self.tables.get(table).and_then(|chains| chains.get(chain));
        rules.into_iter().flatten().map(|rule| rule[chain.len()..].trim_start()).collect()
    }
}

fn is_built_in(chain: &str) -> bool {
    ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"].contains(&chain)
}

/// Formats the rules for `iptables-restore`, one per line, so that failed assertions are readable.
impl fmt::Display for Ruleset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (table, chains) in &self.tables {
            writeln!(f, "*{table}")?;
            for chain in chains.keys() {
                let policy = if is_built_in(chain) { "ACCEPT" } else { "-" };
                writeln!(f, ":{chain} {policy} [0:0]")?;
            }
            for rule in chains.values().flatten() {
                writeln!(f, "-A {rule}")?;
            }
            writeln!(f, "COMMIT")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Ruleset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n{self}")
    }
}

pub(super) fn save(pod: &Place, family: Family) -> Ruleset {
    let output = pod.run(&mut family.program("-save"), "");
    assert!(output.status.success(), "{output:?}");
    Ruleset::parse(&String::from_utf8_lossy(&output.stdout))
}

pub(super) fn restore(pod: &Place, family: Family, text: &str) {
    restore_with(pod, &mut family.program("-restore"), text);
}

pub(super) fn legacy_restore(pod: &Place, family: Family, text: &str) {
    restore_with(pod, &mut family.program("-legacy-restore"), text);
}

fn restore_with(pod: &Place, program: &mut Command, text: &str) {
    let output = pod.run(program.arg("--noflush"), text);
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
}

pub(super) fn run(pod: &Place, family: Family, arguments: &[&str]) -> (bool, String) {
    let output = pod.run(family.program("").args(arguments), "");
    let printed = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&printed).into_owned())
}

pub(super) fn tables(pod: &Place) -> Vec<String> {
    let output = pod.run(Command::new("nft").args(["--stateless", "list", "ruleset", "inet"]), "");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut tables: Vec<String> =
        text.split("table inet ").skip(1).map(|table| format!("table inet {table}")).collect();
    tables.sort();
    tables
}

pub(super) fn load(pod: &Place, text: &str) {
    let output = pod.run(Command::new("nft").args(["-f", "-"]), text);
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
}

/// Returns how many packets matched an exclusion, counted in all chains that exclusions lead to.
pub(super) fn matched_exclusions(pod: &Place) -> u64 {
    let output = pod.run(Command::new("nft").args(["-j", "list", "table", "inet", "detour-exclusions"]), "");
    assert!(output.status.success(), "{output:?}");
    let listing: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rules = listing["nftables"].as_array().expect("an array").iter().filter_map(|object| object.get("rule"));
    let exclusions = rules.filter(|rule| ["DETOUR_DIRECT", "DETOUR_ZONE"].iter().any(|chain| rule["chain"] == *chain));
    let counters = exclusions.flat_map(|rule| rule["expr"].as_array().into_iter().flatten());
    counters.filter_map(|expression| expression["counter"]["packets"].as_u64()).sum()
}
