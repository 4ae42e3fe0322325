//! `rules`: compares the live rules of a network namespace with the desired ones.

use super::elements::ContainerSets;
use super::terminal::{Cell, Screen, TextReport, Tone};
use crate::cni::{Code, Error};
use crate::firewall::{
    AmbientRedirection, Counter, Drift, DriftKind, LiveRuleset, RuleAt, RulesetView, foreign_rules, legacy_tables,
};
use crate::netns::find::FoundNetns;
use crate::netns::{NetNs, own_addresses};
use crate::plugin::netns_state::NetnsState;
use crate::state::Store;
use serde::Serialize;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Timeout for the lock of the network namespace, which a plugin call may hold.
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// The live rules of a network namespace, and the desired state of its attachments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveRules {
    /// The path of the network namespace.
    pub netns: PathBuf,
    /// How it was found; `None` if the user gave the path.
    pub found_by: Option<String>,
    /// The rules in the kernel.
    pub live: LiveRuleset,
    /// The desired state; `None` without saved state of any attachment.
    pub desired: Option<NetnsState>,
    /// The namespace's addresses, except loopback and link-local ones.
    pub addresses: Vec<IpAddr>,
    /// Tables of `iptables-legacy`, whose rules can't be read.
    pub legacy: Vec<String>,
    /// Missing addresses, routes and policy rules of its attachments, one line each.
    pub unfixed: Vec<String>,
}

impl LiveRules {
    /// Reads the network namespace at `path`.
    ///
    /// # Errors
    /// The path is not a network namespace, or its rules or its saved state can't be read.
    pub fn read(path: &Path, store: &Store) -> Result<Self, Error> {
        let missing =
            || Error::new(Code::InvalidNetns, format!("{}: expected a network namespace, found none", path.display()));
        let netns = NetNs::open(path)?.ok_or_else(missing)?;
        Self::within(path, &netns, NetnsState::find(store, &netns)?)
    }

    /// Reads the network namespace of a pod, with the saved state of its container if that is known.
    ///
    /// # Errors
    /// The namespace is gone, or its rules or its saved state can't be read.
    pub fn of_found(found: &FoundNetns, store: &Store) -> Result<Self, Error> {
        let netns = found.open()?;
        let desired = match &found.container_id {
            Some(container_id) => NetnsState::of_sandbox(store, container_id, &netns)?,
            None => NetnsState::find(store, &netns)?,
        };
        let found_by = Some(found.evidence.clone());
        Ok(Self { found_by, ..Self::within(&found.netns, &netns, desired)? })
    }

    fn within(path: &Path, netns: &NetNs, desired: Option<NetnsState>) -> Result<Self, Error> {
        netns.enter(LOCK_TIMEOUT, || {
            let legacy = legacy_tables().iter().map(|(family, table)| format!("{} {table}", family.name())).collect();
            let unfixed = desired.as_ref().map_or_else(|| Ok(Vec::new()), |desired| desired.fixtures.drift())?;
            let (live, addresses) = (LiveRuleset::now()?, own_addresses()?);
            Ok(Self { netns: path.to_owned(), found_by: None, live, desired, addresses, legacy, unfixed })
        })
    }

    /// Returns the live rules for a trace.
    #[must_use]
    pub fn view(&self) -> RulesetView {
        let mut view = RulesetView::live(&self.live);
        if let Some(ambient) = AmbientRedirection::of(&self.live) {
            view = view.with_ambient(ambient);
        }
        if !self.legacy.is_empty() {
            let tables = self.legacy.join(", ");
            let caveat = format!("tables of iptables-legacy ({tables}) also apply, but their rules can't be read");
            view.unread_redirections.push(caveat);
        }
        view
    }

    /// Compares the live rules with the desired ones.
    #[must_use]
    pub fn report(&self) -> RulesReport {
        let state = self.desired.as_ref();
        let drift = state.map(|state| state.rule_format.drift(&self.live, &state.rules));
        let as_asked = drift.as_ref().map(|drift| drift.is_empty() && self.unfixed.is_empty());
        let foreign = state.map(|state| foreign_rules(&self.live, &state.rules)).unwrap_or_default();
        RulesReport {
            netns: self.netns.display().to_string(),
            found_by: self.found_by.clone(),
            attachments: state.iter().flat_map(|state| &state.attachments).map(ToString::to_string).collect(),
            dialect: state.filter(|state| state.policy.redirect().is_some()).map(|state| state.rule_format.name()),
            as_asked,
            ambient: AmbientRedirection::of(&self.live).map(AmbientRedirection::place),
            legacy: self.legacy.clone(),
            absent: self.unfixed.clone(),
            rules: compare(&RulesetView::live(&self.live), drift.unwrap_or_default(), foreign),
            containers: ContainerSets::of(&self.live.containers, state.map(|state| &state.policy)),
            all: false,
        }
    }
}

/// The report about a network namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RulesReport {
    /// The path of the network namespace.
    pub netns: String,
    /// How it was found; `None` if the user gave the path.
    pub found_by: Option<String>,
    /// The attachments with saved state.
    pub attachments: Vec<String>,
    /// The rule format of the redirection: `iptables` or `nftables`; `None` without a redirection in the saved state.
    pub dialect: Option<&'static str>,
    /// Whether the live state equals the desired state; `None` without saved state of any attachment.
    pub as_asked: Option<bool>,
    /// Where istio-cni's redirection to ztunnel is; `None` if the pod is not in the ambient mesh.
    pub ambient: Option<&'static str>,
    /// Tables of `iptables-legacy`, whose rules apply, but can't be read.
    pub legacy: Vec<String>,
    /// Missing addresses, routes and policy rules of its attachments, one line each.
    pub absent: Vec<String>,
    /// All live and missing rules.
    pub rules: Vec<RuleLine>,
    /// The elements of the sets of excluded containers; `None` if no container is excluded.
    pub containers: Option<ContainerSets>,
    /// Whether a table with differences also lists all rules.
    #[serde(skip)]
    pub all: bool,
}

impl RulesReport {
    /// Returns the rules of other programs that precede one of detour's in the same netfilter chain.
    pub(super) fn in_front(&self) -> Vec<&RuleLine> {
        let chains = self.rules.chunk_by(|a, b| (&a.table, &a.chain) == (&b.table, &b.chain));
        let before = chains.flat_map(|chain| {
            let last = chain.iter().rposition(|line| line.mark == Mark::Fine).unwrap_or(0);
            &chain[..last]
        });
        before.filter(|line| line.mark == Mark::Foreign).collect()
    }
}

/// A live or missing rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RuleLine {
    /// The table with its family: `ip nat`, `inet detour-nat`.
    pub table: String,
    /// The netfilter chain.
    pub chain: String,
    /// The rule as `iptables-save` or `nft` prints it, without the chain; empty for an extra chain.
    pub rule: String,
    /// The difference from the desired state.
    pub mark: Mark,
    /// Packets that matched it; `None` for a missing rule.
    pub packets: Option<u64>,
    /// Bytes of these packets.
    pub bytes: Option<u64>,
}

impl RuleLine {
    fn of(RuleAt { table, chain, rule }: RuleAt, mark: Mark, counter: Option<Counter>) -> Self {
        let (packets, bytes) = (counter.map(|counter| counter.packets), counter.map(|counter| counter.bytes));
        Self { table: table.place(), chain, rule, mark, packets, bytes }
    }

    /// Returns whether the rule differs from the desired state; foreign rules do not.
    pub(super) fn is_drift(&self) -> bool {
        !matches!(self.mark, Mark::Fine | Mark::Foreign)
    }

    fn row(&self) -> Vec<Cell> {
        let (label, tone) = self.mark.label();
        let count = |n: Option<u64>| Cell::of(n.map_or_else(|| "-".to_owned(), |n| n.to_string())).tone(Tone::Faint);
        let [label, chain, rule] = [label, &self.chain, &self.rule].map(|text| Cell::of(text).tone(tone));
        vec![label, count(self.packets), count(self.bytes), chain, rule]
    }

    /// Returns a rule that is not [`Mark::Fine`] with its place and its difference, in one line.
    pub(super) fn described(&self) -> String {
        format!("{}: {} {} {}", self.mark.label().0, self.table, self.chain, self.rule).trim_end().to_owned()
    }
}

/// The difference between a live rule and the desired state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mark {
    /// As desired, or the desired state is unknown.
    Fine,
    /// Desired, but not in the kernel.
    Missing,
    /// In a netfilter chain of detour or like one of its rules, but not desired.
    Extra,
    /// In the wrong position.
    Moved,
    /// From another program, in a built-in chain.
    Foreign,
}

impl Mark {
    const fn label(self) -> (&'static str, Tone) {
        match self {
            Self::Fine => (" ", Tone::Plain),
            Self::Missing => ("missing", Tone::Bad),
            Self::Extra => ("extra", Tone::Bad),
            Self::Moved => ("moved", Tone::Bad),
            Self::Foreign => ("foreign", Tone::Notable),
        }
    }
}

/// Marks the live rules, and adds the missing rules of each chain behind it.
pub(super) fn compare(live: &RulesetView, drift: Vec<Drift>, foreign: Vec<RuleAt>) -> Vec<RuleLine> {
    let mut lines = Vec::new();
    let (mut marks, mut absent) = marks_and_absent(drift);
    foreign.into_iter().for_each(|at| marks.entry(at).or_default().push_back(Mark::Foreign));
    for (table, chains) in live.tables() {
        for (name, chain) in chains {
            for rule in &chain.rules {
                let at = RuleAt { table, chain: name.clone(), rule: rule.text.clone() };
                let mark = marks.get_mut(&at).and_then(VecDeque::pop_front).unwrap_or(Mark::Fine);
                lines.push(RuleLine::of(at, mark, Some(rule.counter)));
            }
            let of_chain =
                absent.extract_if(.., |(at, _)| (at.table, &at.chain) == (table, name) && !at.rule.is_empty());
            lines.extend(of_chain.map(|(at, mark)| RuleLine::of(at, mark, None)));
        }
    }
    lines.extend(absent.into_iter().map(|(at, mark)| RuleLine::of(at, mark, None)));
    lines
}

/// The marks of live rules that differ; equal rules have one each.
type Marks = HashMap<RuleAt, VecDeque<Mark>>;

/// Returns the marks of live rules, and the missing rules and the differing chains. A missing chain is not listed if its
/// missing rules are.
fn marks_and_absent(drift: Vec<Drift>) -> (Marks, Vec<(RuleAt, Mark)>) {
    let place = |at: &RuleAt| (at.table, at.chain.clone());
    let missing = drift.iter().filter(|one| one.kind == DriftKind::Missing && !one.at.rule.is_empty());
    let with_missing_rules: HashSet<_> = missing.map(|one| place(&one.at)).collect();
    let (mut marks, mut absent) = (Marks::new(), Vec::new());
    for Drift { at, kind } in drift {
        let is_chain = at.rule.is_empty();
        match kind {
            DriftKind::Missing if is_chain && with_missing_rules.contains(&place(&at)) => {}
            DriftKind::Missing => absent.push((at, Mark::Missing)),
            DriftKind::Extra if is_chain => absent.push((at, Mark::Extra)),
            DriftKind::OtherHook | DriftKind::NotFirst(_) => absent.push((at, Mark::Moved)),
            DriftKind::Extra => marks.entry(at).or_default().push_back(Mark::Extra),
            DriftKind::Moved => marks.entry(at).or_default().push_back(Mark::Moved),
        }
    }
    (marks, absent)
}

/// Tables start with the differences, JSON and YAML contain everything.
impl TextReport for RulesReport {
    fn write(&self, screen: &mut Screen) {
        self.write_summary(screen);
        let (fine, different): (Vec<&RuleLine>, Vec<_>) = self.rules.iter().partition(|line| line.mark == Mark::Fine);
        let has_differences = self.as_asked == Some(false) && !different.is_empty();
        if has_differences {
            write_tables(screen, "Differences in ", &different);
        }
        if has_differences && !self.all {
            screen.line(&[Cell::of("")]);
            screen.text(format!("{} other rules are as desired; to list them, use --all", fine.len()), Tone::Faint);
        } else {
            write_tables(screen, "", &self.rules.iter().collect::<Vec<_>>());
        }
        self.containers.iter().for_each(|sets| sets.write(screen));
    }
}

impl RulesReport {
    fn write_summary(&self, screen: &mut Screen) {
        let (verdict, tone) = match self.as_asked {
            Some(true) => ("rules are as desired", Tone::Good),
            Some(false) => ("rules differ from the desired state", Tone::Bad),
            None => ("no saved state of any attachment: the desired rules are unknown", Tone::Notable),
        };
        screen.labeled(format!("{}:", self.netns), verdict, tone);
        let mut line = |text: &str, tone| screen.text(format!("  {text}"), tone);
        self.found_by.iter().for_each(|evidence| line(&format!("found by: {evidence}"), Tone::Faint));
        self.attachments.iter().for_each(|attachment| line(attachment, Tone::Faint));
        self.ambient
            .iter()
            .for_each(|place| line(&format!("istio-cni redirects the pod to ztunnel: {place}"), Tone::Faint));
        let legacy = |table| format!("iptables-legacy {table}: also applies, but its rules can't be read");
        self.legacy.iter().for_each(|table| line(&legacy(table), Tone::Notable));
        self.absent.iter().for_each(|absent| line(absent, Tone::Bad));
    }
}

/// Writes a table for each table of rules.
fn write_tables(screen: &mut Screen, heading: &str, rules: &[&RuleLine]) {
    for group in rules.chunk_by(|a, b| a.table == b.table) {
        screen.heading(&format!("{heading}{}", group[0].table));
        screen.titled_table(["", "packets", "bytes", "chain", "rule"], group.iter().map(|line| line.row()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::TableId;
    use crate::firewall::native::rule::NativeTable;
    use crate::firewall::rule::{Family, Table};

    fn drift(table: TableId, chain: &str, rule: &str) -> Drift {
        Drift { at: RuleAt { table, chain: chain.to_owned(), rule: rule.to_owned() }, kind: DriftKind::Missing }
    }

    /// Without a line for the chain, a deleted native table is a difference that neither `rules` nor `audit` names.
    #[test]
    fn a_missing_chain_is_listed_unless_its_missing_rules_are() {
        let nat = TableId::Iptables(Family::Ip, Table::Nat);
        let differences = vec![
            drift(TableId::Native(NativeTable::Exclusions), "NAT_OUTPUT", ""),
            drift(nat, "ISTIO_REDIRECT", ""),
            drift(nat, "ISTIO_REDIRECT", "-p tcp -j REDIRECT --to-ports 15001"),
        ];
        let lines = compare(&RulesetView::default(), differences, Vec::new());
        let described: Vec<_> = lines.iter().map(|line| (line.chain.as_str(), line.rule.as_str(), line.mark)).collect();
        let rule = "-p tcp -j REDIRECT --to-ports 15001";
        assert_eq!(described, [("NAT_OUTPUT", "", Mark::Missing), ("ISTIO_REDIRECT", rule, Mark::Missing)]);
        assert!(lines.iter().all(RuleLine::is_drift));
    }
}
