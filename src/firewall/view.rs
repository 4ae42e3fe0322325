//! The rules of a pod in one form for both rule formats: native conditions and targets, with the text that the format's
//! tool prints. The rules are live ones, with those of other tools in the tables of iptables, or desired ones.

use super::expression::Counter;
use super::foreign::LiveRule;
use super::live::LiveRuleset;
use super::native::rule::{BaseHook, EXCLUSIONS_NAT_PRIORITY, NativeTable, TableId};
use super::redirections::{AMBIENT_PREROUTING, AmbientRedirection, Diversion, DivertingChain};
use super::rule::{Family, Hook, Rule, Table};
use super::ruleset::Ruleset;
use crate::cni::RuleFormat;
use crate::policy::{Interception, Policy};
use std::collections::BTreeMap;

/// The caveats for a native redirection of Istio's own tools.
const NATIVE_AMBIENT: &str = "tables inet istio-ambient-* also redirect the pod, but their rules are not evaluated";
const NATIVE_SIDECAR: &str = "tables inet istio-proxy-* also redirect the pod, but their rules are not evaluated";

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleView {
    /// The rule; `None` for one that detour would not write.
    pub rule: Option<Rule>,
    /// The packets and bytes that matched it; zero for a desired rule.
    pub counter: Counter,
    /// The rule as `iptables-save` or `nft` prints it, without the chain.
    pub text: String,
}

impl RuleView {
    fn live(table: TableId, live: &LiveRule) -> Self {
        Self { rule: live.rule.as_ref().ok().cloned(), counter: live.counter, text: live.text(table) }
    }

    fn desired(table: TableId, rule: &Rule) -> Self {
        Self { rule: Some(rule.clone()), counter: Counter::default(), text: table.text_of(rule) }
    }
}

/// A chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainView {
    /// Where it is attached; `None` for a chain that is entered by jumps only, or that is attached elsewhere than
    /// detour's chains are.
    pub base: Option<BaseHook>,
    /// The rules in order.
    pub rules: Vec<RuleView>,
}

/// The rules of a pod by table and chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RulesetView {
    chains: BTreeMap<TableId, BTreeMap<String, ChainView>>,
    /// The redirection to ztunnel, if the pod has one.
    pub(super) to_ztunnel: Option<AmbientRedirection>,
    /// Rules that apply, but are not in the view, in words.
    pub caveats: Vec<String>,
    /// Redirections behind the exclusions that are not in the view, in words. They do not matter for a packet whose
    /// destination is fixed before.
    pub unread_redirections: Vec<String>,
}

impl RulesetView {
    /// Returns the rules of a policy, for both families, with the redirection in `format`.
    #[must_use]
    pub fn of_policy(policy: &Policy, format: RuleFormat) -> Self {
        let mut view = Self::desired(&Ruleset::of(policy, &Family::ALL), format);
        if policy.ambient {
            // istio-cni's default format.
            let captures_dns = policy.dns_captured_elsewhere.unwrap_or(true);
            let format = RuleFormat::Iptables;
            view = view.with_ambient(AmbientRedirection { format, captures_dns, captures_inbound: true });
        } else if policy.interception == Interception::Unset {
            let caveat = "this configuration does not redirect the pod; rules of other programs are not evaluated";
            view.caveats.push(caveat.to_owned());
        }
        view
    }

    /// Adds istio-cni's redirection to ztunnel in place of its rules.
    #[must_use]
    pub fn with_ambient(mut self, redirection: AmbientRedirection) -> Self {
        self.to_ztunnel = Some(redirection);
        let is_istios = |name: &str| [AMBIENT_PREROUTING, "ISTIO_OUTPUT"].contains(&name);
        self.retain_chains(|table, name| !(matches!(table, TableId::Iptables(..)) && is_istios(name)));
        self.unread_redirections.retain(|caveat| caveat != NATIVE_AMBIENT);
        let place = redirection.place();
        self.caveats.push(format!("the rules of istio-cni ({place}) are recognized, but not evaluated one by one"));
        self
    }

    /// Removes the capture of inbound connections, which istio-cni does not write for a pod whose annotation
    /// `ambient.istio.io/bypass-inbound-capture` is true.
    #[must_use]
    pub const fn without_ambient_inbound(mut self) -> Self {
        if let Some(redirection) = &mut self.to_ztunnel {
            redirection.captures_inbound = false;
        }
        self
    }
}

impl RulesetView {
    /// Returns the rules in the kernel.
    #[must_use]
    pub fn live(live: &LiveRuleset) -> Self {
        let mut view = Self::default();
        for (family, table, name, chain) in live.chains() {
            let base = if chain.built_in { base_of(table, name) } else { None };
            let id = TableId::Iptables(family, table);
            view.add(id, name, base, chain.rules.iter().map(|rule| RuleView::live(id, rule)));
        }
        for (table, chains) in &live.native {
            for (name, chain) in chains {
                let id = TableId::Native(*table);
                let rules = chain.rules.iter().map(|rule| RuleView::live(id, rule));
                view.add(id, name, chain.hook.ok().flatten(), rules);
            }
            if chains.values().any(|chain| chain.hook.is_err()) {
                view.caveats.push(format!(
                    "table inet {} is switched off, or has a netfilter chain with another hook or priority than \
                     desired: such chains are not evaluated",
                    table.name()
                ));
            }
        }
        if let Some(istio) = live.native_istio() {
            let caveat = if istio.ambient { NATIVE_AMBIENT } else { NATIVE_SIDECAR };
            view.unread_redirections.push(caveat.to_owned());
        }
        let has_exclusions = live.native.contains_key(&NativeTable::Exclusions);
        for DivertingChain { at, diversion, text } in live.diverting_chains() {
            let which = if at.hook == Hook::Output { "outbound" } else { "inbound" };
            let caveat = format!("{text} can {} {which} connections; it is not evaluated", diversion.verb());
            // The exclusions fix the destination of outbound connections.
            let is_first = has_exclusions && at.hook == Hook::Output && at.priority <= EXCLUSIONS_NAT_PRIORITY;
            let may_decide = diversion == Diversion::Redirects && !is_first;
            let list = if may_decide { &mut view.unread_redirections } else { &mut view.caveats };
            list.push(caveat);
        }
        let unread = live.unread_tables().into_iter();
        let caveat = |table| format!("table {table} of another tool has too many rules; it is not evaluated");
        view.unread_redirections.extend(unread.map(caveat));
        view
    }

    /// Returns the rules of `ruleset` with the redirection in `format`.
    #[must_use]
    pub fn desired(ruleset: &Ruleset, format: RuleFormat) -> Self {
        let mut view = Self::default();
        if format == RuleFormat::Iptables {
            for ((family, table), rules) in &ruleset.tables {
                let id = TableId::Iptables(*family, *table);
                let line = |rule| RuleView::desired(id, rule);
                for (hook, rules) in &rules.hooks {
                    view.add(id, hook.chain(), base_of(*table, hook.chain()), rules.iter().map(line));
                }
                for (name, rules) in &rules.chains {
                    view.add(id, name, None, rules.iter().map(line));
                }
            }
        }
        for (table, chains) in &format.native(ruleset) {
            for (name, chain) in chains {
                let id = TableId::Native(*table);
                view.add(id, name, chain.hook, chain.rules.iter().map(|rule| RuleView::desired(id, rule)));
            }
        }
        view
    }

    fn add(&mut self, table: TableId, name: &str, base: Option<BaseHook>, rules: impl Iterator<Item = RuleView>) {
        let chain = ChainView { base, rules: rules.collect() };
        self.chains.entry(table).or_default().insert(name.to_owned(), chain);
    }

    /// Removes the chains for which `keeps` is false.
    pub(super) fn retain_chains(&mut self, keeps: impl Fn(TableId, &str) -> bool) {
        for (table, chains) in &mut self.chains {
            chains.retain(|name, _| keeps(*table, name));
        }
    }

    /// Returns the tables with their chains by name: those of iptables first.
    pub fn tables(&self) -> impl Iterator<Item = (TableId, &BTreeMap<String, ChainView>)> {
        self.chains.iter().map(|(table, chains)| (*table, chains))
    }

    /// Returns the rules of a chain; empty if the chain does not exist.
    #[must_use]
    pub fn chain(&self, table: TableId, name: &str) -> &[RuleView] {
        let chain = self.chains.get(&table).and_then(|chains| chains.get(name));
        chain.map_or(&[], |chain| chain.rules.as_slice())
    }

    /// Returns the names of the base chains of a table that are attached to `base`.
    pub(super) fn base_chains(&self, table: TableId, base: BaseHook) -> impl Iterator<Item = &str> {
        let chains = self.chains.get(&table).into_iter().flatten();
        chains.filter(move |(_, chain)| chain.base == Some(base)).map(|(name, _)| name.as_str())
    }
}

/// Returns where the built-in chain of this name is attached.
fn base_of(like: Table, name: &str) -> Option<BaseHook> {
    Hook::of_chain(name).map(|hook| BaseHook { like, hook })
}
