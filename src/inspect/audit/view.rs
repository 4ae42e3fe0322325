//! The live rules of both rule formats in one form: native conditions and actions. Rules of other tools in the tables of
//! iptables are included.

use crate::firewall::native::conditions;
use crate::firewall::native::rule::{Condition, Key, NativeAction, NativeTable};
use crate::firewall::rule::{Family, Table};
use crate::firewall::{Counter, LiveRule, LiveRuleset};
use std::collections::BTreeMap;

/// The netfilter chain that Istio's and detour's rules enter first, at the hook `OUTPUT`.
pub(super) const OUTPUT: &str = "ISTIO_OUTPUT";
/// … and at the hook `PREROUTING`.
pub(super) const INBOUND: &str = "ISTIO_INBOUND";

/// A live rule.
#[derive(Debug, Clone)]
pub(super) struct RuleView {
    /// The family to which it applies; `None` for both.
    pub family: Option<Family>,
    /// Its conditions; empty if the rule is not understood.
    pub conditions: Vec<Condition>,
    /// Whether it also requires an excluded container.
    pub of_containers: bool,
    /// Its action; `None` if the rule is not understood.
    pub action: Option<NativeAction>,
    pub counter: Counter,
    /// The rule as `iptables-save` or `nft` prints it, without the chain.
    pub text: String,
}

impl RuleView {
    fn of_iptables(family: Family, live: &LiveRule) -> Self {
        let (conditions, action) = match &live.rule {
            Ok(rule) => (conditions(rule, family), Some(NativeAction::from(&rule.target))),
            Err(_) => (Vec::new(), None),
        };
        let (counter, text) = (live.counter, live.to_string());
        Self { family: Some(family), conditions, of_containers: false, action, counter, text }
    }

    /// Returns the chain that the rule jumps to.
    pub(super) fn jump_target(&self) -> Option<&str> {
        match &self.action {
            Some(NativeAction::Jump(chain)) => Some(chain),
            _ => None,
        }
    }

    pub(super) fn applies_to(&self, family: Family) -> bool {
        self.family.is_none_or(|own| own == family)
    }

    /// Returns whether the rule has a condition on `key`.
    pub(super) fn checks(&self, key: Key) -> bool {
        self.conditions.iter().any(|condition| condition.key == key)
    }

    /// Returns whether the rule applies only to traffic over `lo`.
    pub(super) fn is_local(&self) -> bool {
        let is_lo = |condition: &Condition| !condition.not && condition.value_texts() == ["lo"];
        let interface = |condition: &&Condition| matches!(condition.key, Key::OutInterface | Key::InInterface);
        self.conditions.iter().filter(interface).any(is_lo)
    }
}

/// A live table: one family of iptables, or a native one of both families.
#[derive(Debug)]
pub(super) struct TableView {
    pub table: Table,
    chains: BTreeMap<String, Vec<RuleView>>,
}

impl TableView {
    /// Returns a chain's rules; an empty slice if the chain does not exist.
    pub(super) fn chain(&self, name: &str) -> &[RuleView] {
        self.chains.get(name).map_or(&[], Vec::as_slice)
    }
}

/// Returns all live tables.
pub(super) fn tables(live: &LiveRuleset) -> Vec<TableView> {
    let iptables = live.tables.iter().map(|((family, table), chains)| TableView {
        table: *table,
        chains: chains
            .iter()
            .map(|(name, chain)| {
                let rules = chain.rules.iter().map(|rule| RuleView::of_iptables(*family, rule));
                (name.clone(), rules.collect())
            })
            .collect(),
    });
    let counterpart = |(table, chains)| match table {
        &NativeTable::Of(table) => Some((table, chains)),
        NativeTable::Exclusions => Some((Table::Nat, chains)),
    };
    let native = live.native.iter().filter_map(counterpart).map(|(table, chains)| TableView {
        table,
        chains: chains
            .iter()
            .map(|(name, chain)| {
                let rules = chain.rules.iter().zip(&chain.counters).map(|(rule, counter)| match rule {
                    Some(rule) => RuleView {
                        family: rule.family,
                        conditions: rule.conditions.clone(),
                        of_containers: rule.cgroup.is_some(),
                        action: Some(rule.action.clone()),
                        counter: *counter,
                        text: rule.to_string(),
                    },
                    None => RuleView {
                        family: None,
                        conditions: Vec::new(),
                        of_containers: false,
                        action: None,
                        counter: *counter,
                        text: "(a foreign rule)".to_owned(),
                    },
                });
                (name.clone(), rules.collect())
            })
            .collect(),
    });
    iptables.chain(native).collect()
}
