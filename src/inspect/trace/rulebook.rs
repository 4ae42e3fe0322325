//! Rules in other forms: the [`Rulebook`], which `trace` evaluates, and the input for `iptables-restore` and
//! `ip6tables-restore`.

use crate::firewall::native::rule as native;
use crate::firewall::native::rule::{BaseHook, NativeTable};
use crate::firewall::rule::{Family, Hook, Rule, Table};
use crate::firewall::{LiveRule, LiveRuleset, RuleFormat, Ruleset};
use crate::policy::{Interception, Policy};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// A rule in a form that a trace can evaluate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RuleBody {
    /// An iptables rule.
    Iptables(Rule),
    /// A native nftables rule.
    Native(native::NativeRule),
    /// A foreign rule that can't be evaluated.
    Unknown,
}

/// A rule in a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RuleText {
    pub body: RuleBody,
    /// The rule as `iptables-save` or `nft` prints it, without the chain.
    pub text: String,
}

/// A table, in the order in which packets pass tables with the same priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TableListing {
    /// A table of detour in family `inet`. Its priority is equal to that of the iptables table or one lower.
    Native(NativeTable),
    /// An iptables table of one family.
    Iptables(Table, Family),
}

impl TableListing {
    /// Returns the table's name in the kernel.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Native(table) => table.name(),
            Self::Iptables(table, _) => table.name(),
        }
    }
}

/// Rules by table and chain, as a trace evaluates them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rulebook {
    chains: BTreeMap<(TableListing, String), Vec<RuleText>>,
    /// The base chains of native tables; those of iptables tables have the hook's name.
    bases: BTreeMap<(NativeTable, Table, Hook), Vec<String>>,
    /// Rules that apply, but are not in the rulebook, in words.
    pub(super) caveats: Vec<String>,
}

impl Rulebook {
    fn add_base(&mut self, table: NativeTable, base: BaseHook, chain: &str) {
        self.bases.entry((table, base.like, base.hook)).or_default().push(chain.to_owned());
    }

    /// Returns the base chains of a table at a hook, with the type and priority of iptables table `like`.
    pub(super) fn base_chains(&self, table: TableListing, like: Table, hook: Hook) -> Vec<String> {
        match table {
            TableListing::Native(table) => self.bases.get(&(table, like, hook)).cloned().unwrap_or_default(),
            TableListing::Iptables(..) => vec![hook.chain().to_owned()],
        }
    }

    /// Returns the rules of a policy, for both families, with the redirection in `format`.
    #[must_use]
    pub fn of_policy(policy: &Policy, format: RuleFormat) -> Self {
        let ruleset = Ruleset::of(policy, &Family::ALL);
        let line = |rule: &Rule| RuleText { body: RuleBody::Iptables(rule.clone()), text: rule.to_string() };
        let mut book = Self::default();
        for ((family, table), rules) in ruleset.tables.iter().filter(|_| format == RuleFormat::Iptables) {
            let hooks = rules.hooks.iter().map(|(hook, rules)| (hook.chain(), rules));
            for (name, rules) in hooks.chain(rules.chains.iter().map(|(name, rules)| (name.as_ref(), rules))) {
                book.add(TableListing::Iptables(*table, *family), name, rules.iter().map(line).collect());
            }
        }
        for (table, chains) in &format.native(&ruleset) {
            for (name, chain) in chains {
                let rules = chain.rules.iter().map(|rule| native_text(Some(rule)));
                book.add(TableListing::Native(*table), name, rules.collect());
                chain.hook.into_iter().for_each(|base| book.add_base(*table, base, name));
            }
        }
        if policy.interception == Interception::Unset {
            let caveat = "this configuration does not redirect the pod; rules of other programs are not evaluated";
            book.caveats.push(caveat.to_owned());
        }
        book
    }

    /// Returns the rules in the kernel.
    #[must_use]
    pub fn of_live(live: &LiveRuleset) -> Self {
        let mut book = Self::default();
        let line = |live: &LiveRule| {
            let body = live.rule.clone().map_or(RuleBody::Unknown, RuleBody::Iptables);
            RuleText { body, text: live.to_string() }
        };
        for (family, table, name, chain) in live.chains() {
            book.add(TableListing::Iptables(table, family), name, chain.rules.iter().map(line).collect());
        }
        for (table, chains) in &live.native {
            for (name, chain) in chains {
                let rules = chain.rules.iter().map(|rule| native_text(rule.as_ref()));
                book.add(TableListing::Native(*table), name, rules.collect());
                chain.hook.into_iter().flatten().for_each(|base| book.add_base(*table, base, name));
            }
            if chains.values().any(|chain| chain.hook.is_err()) {
                let table = table.name();
                book.caveats.push(format!(
                    "table inet {table} is switched off, or has a netfilter chain with another hook or priority than \
                     desired: such chains are not evaluated"
                ));
            }
        }
        if live.native_istio.is_some() {
            book.caveats
                .push("tables inet istio-proxy-* also redirect the pod, but their rules are not evaluated".to_owned());
        }
        book
    }

    /// Adds a note about rules that apply, but are not in the rulebook.
    pub fn add_caveat(&mut self, caveat: String) {
        self.caveats.push(caveat);
    }

    fn add(&mut self, table: TableListing, chain: &str, lines: Vec<RuleText>) {
        self.chains.insert((table, chain.to_owned()), lines);
    }

    /// Returns the rules of a chain; empty if the chain does not exist.
    pub(super) fn chain(&self, table: TableListing, name: &str) -> &[RuleText] {
        self.chains.get(&(table, name.to_owned())).map_or(&[], Vec::as_slice)
    }
}

fn native_text(rule: Option<&native::NativeRule>) -> RuleText {
    match rule {
        Some(rule) => RuleText { body: RuleBody::Native(rule.clone()), text: rule.to_string() },
        None => RuleText { body: RuleBody::Unknown, text: "(a foreign rule)".to_owned() },
    }
}

/// Returns the rules as text that `iptables-restore` and `ip6tables-restore` both accept.
///
/// A rule for only one of them starts with `-4` or `-6`, and the other tool skips it (iptables(8)). A rule for both is
/// listed once.
#[must_use]
pub fn restore_text(ruleset: &Ruleset) -> String {
    let tables: BTreeSet<Table> = ruleset.tables.keys().map(|(_, table)| *table).collect();
    let mut text = String::new();
    for table in tables {
        let mut chains: Vec<(String, bool)> = Vec::new();
        let mut add = |name: &str, built_in| {
            if !chains.iter().any(|(known, _)| known == name) {
                chains.push((name.to_owned(), built_in));
            }
        };
        let both = || Family::ALL.into_iter().filter_map(|family| ruleset.tables.get(&(family, table)));
        both().for_each(|rules| rules.hooks.keys().for_each(|hook| add(hook.chain(), true)));
        both().for_each(|rules| rules.chains.iter().for_each(|(name, _)| add(name, false)));
        let _ = writeln!(text, "*{}", table.name());
        for (name, built_in) in &chains {
            let _ = writeln!(text, ":{name} {} [0:0]", if *built_in { "ACCEPT" } else { "-" });
        }
        for (name, _) in &chains {
            let rules = |family| chain_rules(ruleset, family, table, name);
            chain_text(&mut text, name, rules(Family::Ip), rules(Family::Ip6));
        }
        text += "COMMIT\n";
    }
    text
}

fn chain_rules<'a>(ruleset: &'a Ruleset, family: Family, table: Table, chain: &str) -> &'a [Rule] {
    let Some(rules) = ruleset.tables.get(&(family, table)) else { return &[] };
    let hook = Hook::ALL.into_iter().find(|hook| hook.chain() == chain).and_then(|hook| rules.hooks.get(&hook));
    let own = || rules.chains.iter().find(|(name, _)| name == chain).map(|(_, rules)| rules);
    hook.or_else(own).map_or(&[], Vec::as_slice)
}

/// Writes a chain: rule by rule if both families have the same number of rules, otherwise family by family.
fn chain_text(text: &mut String, chain: &str, v4: &[Rule], v6: &[Rule]) {
    let mut line = |prefix: &str, rule: &Rule| {
        let _ = writeln!(text, "{prefix}-A {chain} {rule}");
    };
    if v4.len() != v6.len() {
        v4.iter().for_each(|rule| line("-4 ", rule));
        v6.iter().for_each(|rule| line("-6 ", rule));
        return;
    }
    for (four, six) in v4.iter().zip(v6) {
        if four == six {
            line("", four);
        } else {
            line("-4 ", four);
            line("-6 ", six);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_both_families_are_listed_once() {
        let on = Policy { interception: Interception::On(Box::default()), ..Policy::default() };
        let text = restore_text(&Ruleset::of(&on, &Family::ALL));
        let lines = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!(lines("-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN"), 1);
        assert_eq!((lines("-4 -A ISTIO_OUTPUT -d 127.0.0.1/32"), lines("-6 -A ISTIO_OUTPUT -d ::1/128")), (1, 1));
        assert_eq!(lines("-4"), lines("-6"));
        assert!(text.starts_with("*nat\n:PREROUTING ACCEPT [0:0]\n") && text.ends_with("COMMIT\n"), "{text}");
        let one = restore_text(&Ruleset::of(&on, &[Family::Ip]));
        assert!(one.lines().all(|line| !line.starts_with("-6") && !line.starts_with("-A")), "{one}");
    }
}
