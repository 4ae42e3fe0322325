//! The state of a pod's network namespace as a comparable value.

use super::netns_pod::Pod;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Runs programs in a pod's network namespace.
pub(crate) trait Tools {
    /// Runs a program with `input` on stdin and returns its stdout.
    fn tool(&self, name: &str, args: &[&str], input: &str) -> String;
}

impl Tools for Pod {
    fn tool(&self, name: &str, args: &[&str], input: &str) -> String {
        Self::tool(self, name, args, input)
    }
}

/// The rules, addresses and routes of a network namespace: everything that a plugin can change.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Kernel {
    /// Rules by `FAMILY TABLE CHAIN`, as iptables-save and ip6tables-save print them.
    pub(crate) rules: BTreeMap<String, Vec<String>>,
    /// All tables and netfilter chains of nf_tables with their hooks, including empty ones, and all native rules.
    chains: BTreeSet<String>,
    /// Addresses, policy rules and routes.
    rest: String,
}

/// One shell runs all tools, because starting processes takes most of the time.
const LOOK: &str = "echo '#ip'; iptables-save; echo '#ip6'; ip6tables-save; echo '#chains'; \
    nft --stateless list ruleset; echo '#rest'; ip addr show lo; \
    ip rule; ip -6 rule; ip route show table all dev lo; ip -6 route show table all dev lo";

impl Kernel {
    pub(crate) fn of(pod: &impl Tools) -> Self {
        let text = pod.tool("sh", &["-c", LOOK], "");
        let (rules_text, rest) = text.split_once("#chains\n").expect("printed");
        let (chains_text, rest) = rest.split_once("#rest\n").expect("printed");
        Self { rules: rules(rules_text), chains: chains(chains_text), rest: settled(rest) }
    }

    /// Returns whether there is any rule.
    pub(crate) fn has_rules(&self) -> bool {
        self.rules.values().any(|rules| !rules.is_empty()) || self.has_exclusions()
    }

    /// Returns whether detour's table of exclusions exists.
    pub(crate) fn has_exclusions(&self) -> bool {
        self.chains.iter().any(|line| line.starts_with("table inet detour-exclusions "))
    }

    /// Returns whether the table of exclusions has a rule with this text.
    pub(crate) fn excludes(&self, text: &str) -> bool {
        self.chains.iter().any(|line| line.starts_with("table inet detour-exclusions ") && line.contains(text))
    }

    /// Returns whether tables, netfilter chains and rules are equal; addresses and routes may differ.
    pub(crate) fn has_same_rules(&self, other: &Self) -> bool {
        (&self.rules, &self.chains) == (&other.rules, &other.chains)
    }
}

/// A new address is tentative at first, also on lo, and its route does not exist yet.
fn settled(rest: &str) -> String {
    let lines = rest.lines().filter(|line| !line.starts_with("local ::6 "));
    lines.map(|line| line.replace(" tentative", "") + "\n").collect()
}

fn rules(text: &str) -> BTreeMap<String, Vec<String>> {
    let (mut family, mut table) = ("", "");
    let mut rules = BTreeMap::<String, Vec<String>>::new();
    for line in text.lines() {
        let chain = |text: &str| format!("{family} {table} {}", text.split(' ').next().expect("a chain"));
        match line.split_at_checked(1) {
            Some(("#", name)) if !name.starts_with(' ') => family = name,
            Some(("*", name)) => table = name,
            Some((":", declared)) => drop(rules.entry(chain(declared)).or_default()),
            Some(("-", rule)) => {
                let rule = rule.strip_prefix("A ").expect("a rule is appended");
                rules.entry(chain(rule)).or_default().push(rule.to_owned());
            }
            _ => {}
        }
    }
    rules
}

fn chains(text: &str) -> BTreeSet<String> {
    let (mut table, mut chain) = ("", "");
    let mut found = BTreeSet::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with("table ") {
            (table, chain) = (line.trim_end_matches(" {"), "");
        } else if line.starts_with("chain ") {
            chain = line;
        }
        if !line.is_empty() && line != "}" {
            found.insert(format!("{table} {chain} {line}"));
        }
    }
    found
}

impl Kernel {
    /// Fails if `self` is not `expected`, and prints only the differences.
    #[track_caller]
    pub(crate) fn assert_is(&self, expected: &Self, when: &str) {
        assert!(self == expected, "{when}:\n{}", difference(&self.lines(), &expected.lines()));
    }

    fn lines(&self) -> BTreeSet<String> {
        let numbered = |(chain, rules): (&String, &Vec<String>)| {
            let lines = rules.iter().enumerate().map(|(at, rule)| format!("{chain} {at}: {rule}"));
            lines.chain([format!("{chain}:")]).collect::<Vec<_>>()
        };
        let rules = self.rules.iter().flat_map(numbered);
        rules.chain(self.chains.iter().cloned()).chain(self.rest.lines().map(str::to_owned)).collect()
    }
}

fn difference(found: &BTreeSet<String>, expected: &BTreeSet<String>) -> String {
    let extra = found.difference(expected).map(|line| format!("+ {line}\n"));
    extra.chain(expected.difference(found).map(|line| format!("- {line}\n"))).collect()
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines().iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

/// Returns the settings of all interfaces.
pub(crate) fn settings(pod: &impl Tools) -> String {
    pod.tool("sysctl", &["-a", "-r", r"^net\.ipv[46]\.conf\."], "")
}
