//! Rules to walk through, whether a policy asks for them or the kernel holds them.

use crate::firewall::rule::{Family, Rule, Table};
use crate::firewall::{Live, Ruleset};
use std::collections::BTreeMap;

/// A rule with its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// What it is; `None` where it is a foreign one that is not understood.
    pub rule: Option<Rule>,
    /// As `iptables-save` prints it, without `-A CHAIN`.
    pub text: String,
}

/// Chains by where they stand and by name, built-in ones too.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rulebook {
    chains: BTreeMap<(Family, Table, String), Vec<Line>>,
}

impl Rulebook {
    /// The rules of a policy.
    #[must_use]
    pub fn of_ruleset(ruleset: &Ruleset) -> Self {
        let line = |rule: &Rule| Line { rule: Some(rule.clone()), text: rule.to_string() };
        let lines = |rules: &[Rule]| rules.iter().map(line).collect::<Vec<_>>();
        let mut chains = BTreeMap::new();
        for ((family, table), rules) in &ruleset.tables {
            for (hook, rules) in &rules.hooks {
                chains.insert((*family, *table, hook.chain().to_owned()), lines(rules));
            }
            for (name, rules) in &rules.chains {
                chains.insert((*family, *table, name.clone()), lines(rules));
            }
        }
        Self { chains }
    }

    /// What the kernel holds.
    #[must_use]
    pub fn of_live(live: &Live) -> Self {
        let chains = live.chains().map(|(family, table, name, chain)| {
            let line = |live: &crate::firewall::LiveRule| Line { rule: live.rule.clone().ok(), text: live.to_string() };
            ((family, table, name.to_owned()), chain.rules.iter().map(line).collect())
        });
        Self { chains: chains.collect() }
    }

    /// A chain's rules; none where there is no such chain.
    pub(super) fn chain(&self, family: Family, table: Table, name: &str) -> &[Line] {
        self.chains.get(&(family, table, name.to_owned())).map_or(&[], Vec::as_slice)
    }
}
