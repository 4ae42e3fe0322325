//! Rules to walk through, whether a policy asks for them or the kernel holds them, in both dialects.

use crate::firewall::native::rule::{self as native, table_name};
use crate::firewall::rule::{Family, Rule, Table};
use crate::firewall::{LiveRuleset, LiveRule, Ruleset};
use crate::policy::{Interception, Policy};
use std::collections::BTreeMap;

/// A rule in one of the two vocabularies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Words {
    /// iptables'.
    Iptables(Rule),
    /// nft's own.
    Native(native::NativeRule),
    /// It is a foreign one that is not understood.
    Unknown,
}

/// A rule with its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RuleText {
    pub words: Words,
    /// As its dialect's tool prints it, without its chain.
    pub text: String,
}

/// A table as the kernel passes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TableListing {
    /// Ours of family `inet`: where it has iptables' priority or one less, it comes first.
    Native(Table),
    /// iptables', of one family.
    Iptables(Table, Family),
}

impl TableListing {
    /// The table's name in the kernel.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Native(table) => table_name(table),
            Self::Iptables(table, _) => table.name(),
        }
    }
}

/// Chains by where they stand and by name, built-in ones too.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rulebook {
    chains: BTreeMap<(TableListing, String), Vec<RuleText>>,
    /// What is not in it although packets pass it.
    pub(super) caveats: Vec<String>,
}

impl Rulebook {
    /// The rules that `policy` asks for, in both families.
    #[must_use]
    pub fn of_policy(policy: &Policy) -> Self {
        let ruleset = Ruleset::of(policy, &Family::ALL);
        let line = |rule: &Rule| RuleText { words: Words::Iptables(rule.clone()), text: rule.to_string() };
        let mut book = Self::default();
        for ((family, table), rules) in &ruleset.tables {
            let hooks = rules.hooks.iter().map(|(hook, rules)| (hook.chain(), rules));
            for (name, rules) in hooks.chain(rules.chains.iter().map(|(name, rules)| (name.as_str(), rules))) {
                book.add(TableListing::Iptables(*table, *family), name, rules.iter().map(line).collect());
            }
        }
        if policy.interception == Interception::Unsaid {
            let caveat =
                "this configuration does not redirect the pod: if somebody else does, those rules are not seen here";
            book.caveats.push(caveat.to_owned());
        }
        book
    }

    /// What the kernel holds.
    #[must_use]
    pub fn of_live(live: &LiveRuleset) -> Self {
        let mut book = Self::default();
        let line = |live: &LiveRule| {
            let words = live.rule.clone().map_or(Words::Unknown, Words::Iptables);
            RuleText { words, text: live.to_string() }
        };
        for (family, table, name, chain) in live.chains() {
            book.add(TableListing::Iptables(table, family), name, chain.rules.iter().map(line).collect());
        }
        let native = |rule: &Option<native::NativeRule>| match rule {
            Some(rule) => RuleText { words: Words::Native(rule.clone()), text: rule.to_string() },
            None => RuleText { words: Words::Unknown, text: "(a foreign rule)".to_owned() },
        };
        for (table, chains) in &live.native {
            for (name, chain) in chains {
                book.add(TableListing::Native(*table), name, chain.rules.iter().map(native).collect());
            }
        }
        if live.native_istio.is_some() {
            book.caveats.push("tables inet istio-proxy-* redirect the pod too, and are not understood here".to_owned());
        }
        book
    }

    /// Says that packets pass something else, too.
    pub fn beware(&mut self, of: String) {
        self.caveats.push(of);
    }

    fn add(&mut self, book: TableListing, chain: &str, lines: Vec<RuleText>) {
        self.chains.insert((book, chain.to_owned()), lines);
    }

    /// A chain's rules; none where there is no such chain.
    pub(super) fn chain(&self, book: TableListing, name: &str) -> &[RuleText] {
        self.chains.get(&(book, name.to_owned())).map_or(&[], Vec::as_slice)
    }
}
