//! From rules in iptables' vocabulary to native ones: both families of a chain in one, lists as
//! sets. Chains keep their names.
//!
//! Three rules are not written word for word:
//!
//! * What is exempt from redirection is not accepted but keeps its destination by a NAT of its own
//!   (chain `DETOUR_DIRECT`). An `accept` holds for one base chain only; a NAT that is settled, for
//!   every table behind (`nf_nat_inet_fn`), so an exemption holds whoever redirects, and however.
//! * For the same reason a query over lo that must be in no zone is put in zone 0, which is none:
//!   the first zone stays (`nft_ct_set_zone_eval`, `xt_ct_target`).
//! * xtables' TPROXY drops where nobody listens, the native one goes on: so a `drop` follows.
//!
//! Rules that do the same and differ in one list become one rule with a set, so that the number
//! of rules does not grow with the lists. No packet fares differently.

use super::rule::{Condition, Key, NativeAction, NativeChain, NativeRule, NativeTables};
use super::set::{Span, Spans};
use crate::firewall::exclusions::OUTPUT as EXEMPT;
use crate::firewall::rule;
use crate::firewall::rule::{CtState, Family, Hook, Is, Match, Ruleset, Table, TableRules, Target};
use crate::policy::{IdRange, PortRange, Protocol};
use ipnet::IpNet;
use std::net::IpAddr;

/// The chain that settles that a connection goes where it goes to.
const DIRECT: &str = "DETOUR_DIRECT";
/// The zone of what is in no zone.
const NO_ZONE: u16 = 0;
/// `NF_CT_STATE_BIT` of established, related and of none (linux/netfilter/nf_conntrack_common.h).
const INVALID: u32 = 1;
const ESTABLISHED_OR_RELATED: u32 = 2 | 4;

/// So many pairs of two families' rules are compared.
const MOST_PAIRS: usize = 250_000;

/// The native tables that say what `ruleset` says.
#[must_use]
pub fn translate(ruleset: &Ruleset) -> NativeTables {
    let both = Family::ALL.iter().all(|family| ruleset.tables.keys().any(|(other, _)| other == family));
    let mut tables = NativeTables::new();
    for table in Table::ALL {
        let of = |family| ruleset.tables.get(&(family, table));
        let families: Vec<(Family, &TableRules)> = Family::ALL.into_iter().filter_map(|f| Some((f, of(f)?))).collect();
        if !families.is_empty() {
            tables.insert(table, chains(table, &families, both).into_iter().collect());
        }
    }
    tables
}

fn chains(table: Table, families: &[(Family, &TableRules)], both: bool) -> Vec<(String, NativeChain)> {
    let mut chains: Vec<(String, NativeChain)> = Vec::new();
    for hook in Hook::ALL {
        let name = hook.chain();
        let rules = |rules: &TableRules| rules.hooks.get(&hook).cloned();
        if let Some(rules) = merged(table, name, families, rules, true) {
            chains.push((name.to_owned(), NativeChain { hook: Some(hook), rules }));
        }
    }
    for (_, rules) in families {
        for (name, _) in &rules.chains {
            if !chains.iter().any(|(other, _)| other == name) {
                let rules = |rules: &TableRules| rules.chains.iter().find(|(n, _)| n == name).map(|(_, r)| r.clone());
                // Where there is one family only, nothing of the other one gets here.
                let rules = merged(table, name, families, rules, both).unwrap_or_default();
                chains.push((name.clone(), NativeChain { hook: None, rules }));
            }
        }
    }
    if table == Table::Nat && chains.iter().any(|(name, _)| name == EXEMPT) {
        let rules = Family::ALL.map(|f| NativeRule {
            family: Some(f),
            conditions: Vec::new(),
            action: NativeAction::KeepDestination,
        });
        chains.push((DIRECT.to_owned(), NativeChain { hook: None, rules: rules.into() }));
    }
    chains
}

/// A chain's rules of all families; `None` where none of them has it. With `named`, the rules of a
/// chain that one family alone has say which.
fn merged(
    table: Table,
    chain: &str,
    families: &[(Family, &TableRules)],
    rules: impl Fn(&TableRules) -> Option<Vec<rule::Rule>>,
    named: bool,
) -> Option<Vec<NativeRule>> {
    let native = |family: Family, rules: Vec<rule::Rule>| {
        condense(rules.iter().flat_map(|rule| native(rule, family, table, chain)).collect())
    };
    let mut lists = families.iter().filter_map(|(f, table_rules)| Some((*f, native(*f, rules(table_rules)?))));
    match (lists.next()?, lists.next()) {
        ((a, rules_of_a), Some((b, rules_of_b))) => Some(zip(&rules_of_a, a, &rules_of_b, b)),
        ((_, rules), None) if !named => Some(rules),
        ((family, rules), None) => Some(rules.iter().map(|rule| only(rule, family)).collect()),
    }
}

fn only(rule: &NativeRule, family: Family) -> NativeRule {
    NativeRule { family: Some(family), ..rule.clone() }
}

/// Two families' rules in one list: a rule of both, in the same order, is in it once. Where
/// there are too many to find that out, only at both ends.
fn zip(a: &[NativeRule], family_of_a: Family, b: &[NativeRule], family_of_b: Family) -> Vec<NativeRule> {
    let head = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let (a, b, mut zipped) = (&a[head..], &b[head..], a[..head].to_vec());
    let tail = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
    let (a, b, tail) = (&a[..a.len() - tail], &b[..b.len() - tail], &a[a.len() - tail..]);
    if a.len() * b.len() <= MOST_PAIRS {
        zipped.extend(zip_each(a, family_of_a, b, family_of_b));
    } else {
        let of = |rules: &[NativeRule], family| rules.iter().map(|rule| only(rule, family)).collect::<Vec<_>>();
        zipped.extend(of(a, family_of_a).into_iter().chain(of(b, family_of_b)));
    }
    zipped.extend_from_slice(tail);
    zipped
}

/// As [`zip`], by the longest common subsequence.
fn zip_each(a: &[NativeRule], family_of_a: Family, b: &[NativeRule], family_of_b: Family) -> Vec<NativeRule> {
    let mut lengths = vec![vec![0_u32; b.len() + 1]; a.len() + 1];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            lengths[i][j] =
                if a[i] == b[j] { lengths[i + 1][j + 1] + 1 } else { lengths[i + 1][j].max(lengths[i][j + 1]) };
        }
    }
    let mut zipped = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < a.len() || j < b.len() {
        if i < a.len() && j < b.len() && a[i] == b[j] {
            zipped.push(a[i].clone());
            (i, j) = (i + 1, j + 1);
        } else if j == b.len() || (i < a.len() && lengths[i + 1][j] >= lengths[i][j + 1]) {
            zipped.push(only(&a[i], family_of_a));
            i += 1;
        } else {
            zipped.push(only(&b[j], family_of_b));
            j += 1;
        }
    }
    zipped
}

/// One rule; TPROXY is two.
fn native(rule: &rule::Rule, family: Family, table: Table, chain: &str) -> Vec<NativeRule> {
    let conditions = conditions(rule, family);
    let has_address = rule.source.is_some() || rule.destination.is_some();
    let of = |action| NativeRule { family: has_address.then_some(family), conditions: conditions.clone(), action };
    let action = match &rule.target {
        Target::Accept if chain == EXEMPT && table == Table::Nat => NativeAction::Jump(DIRECT.to_owned()),
        Target::Accept if chain == EXEMPT && table == Table::Raw => NativeAction::Zone(NO_ZONE),
        Target::Tproxy { .. } => return vec![of(NativeAction::from(&rule.target)), of(NativeAction::Drop)],
        other => NativeAction::from(other),
    };
    vec![of(action)]
}

fn conditions(rule: &rule::Rule, family: Family) -> Vec<Condition> {
    let mut all: Vec<Condition> = Vec::new();
    let mut add = |key: Key, not: bool, values: Spans| {
        // None of these and none of those is none of all of them.
        match all.iter_mut().find(|other| other.key == key && other.not && not) {
            Some(other) => other.values.extend(&values),
            None => all.push(Condition { key, not, values }),
        }
    };
    let name = |name: &Is<String>| interface(&name.value);
    rule.in_interface.iter().for_each(|n| add(Key::InInterface, n.not, name(n)));
    rule.out_interface.iter().for_each(|n| add(Key::OutInterface, n.not, name(n)));
    rule.source.iter().for_each(|net| add(Key::Source(family), net.not, addresses(net.value)));
    rule.destination.iter().for_each(|net| add(Key::Destination(family), net.not, addresses(net.value)));
    if let Some(protocol) = rule.protocol {
        add(Key::Protocol, false, Spans::one(protocol_number(protocol)));
    }
    for condition in &rule.matches {
        match condition {
            Match::DestinationPort(p) => add(Key::DestinationPort, p.not, ports(&[p.value])),
            Match::SourcePort(p) => add(Key::SourcePort, p.not, ports(&[p.value])),
            Match::DestinationPorts(list) => add(Key::DestinationPort, list.not, ports(&list.value)),
            Match::Uid(id) => add(Key::Uid, id.not, ids(id.value)),
            Match::Gid(id) => add(Key::Gid, id.not, ids(id.value)),
            Match::CtState(CtState::Invalid) => add(Key::CtState, false, Spans::one(INVALID)),
            Match::CtState(CtState::RelatedOrEstablished) => {
                add(Key::CtState, false, Spans::one(ESTABLISHED_OR_RELATED));
            }
            Match::Mark(mark) => add(Key::Mark, mark.not, Spans::one(mark.value)),
            Match::Connmark(mark) => add(Key::CtMark, false, Spans::one(*mark)),
        }
    }
    all.sort_by_key(|condition| condition.key);
    all
}

const fn protocol_number(protocol: Protocol) -> u8 {
    match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
    }
}

fn ports(list: &[PortRange]) -> Spans {
    list.iter().map(|range| Span { first: range.first.into(), last: range.last.into() }).collect()
}

fn ids(range: IdRange) -> Spans {
    Spans::of(range.first, range.last)
}

fn addresses(net: IpNet) -> Spans {
    let number = |address| match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => u128::from(address),
    };
    Spans::of(number(net.network()), number(net.broadcast()))
}

/// A name, or every name that starts like it where it ends in `+`.
fn interface(name: &str) -> Spans {
    let filled = |text: &str, with: u8| {
        let mut bytes = [with; 16];
        bytes.iter_mut().zip(text.bytes()).for_each(|(place, byte)| *place = byte);
        u128::from_be_bytes(bytes)
    };
    match name.strip_suffix('+') {
        Some(prefix) => Spans::of(filled(prefix, 0), filled(prefix, u8::MAX)),
        None => Spans::one(filled(name, 0)),
    }
}

/// So many earlier rules are looked at for one that takes a rule in: enough for what a redirection has,
/// and as many as keep the work in proportion where nothing can be united.
const LOOKED_AT: usize = 64;

/// The same as `rules`, in fewer.
pub(super) fn condense(rules: Vec<NativeRule>) -> Vec<NativeRule> {
    let mut out: Vec<NativeRule> = Vec::with_capacity(rules.len().min(LOOKED_AT));
    for mut rule in rules {
        // As long as an earlier rule takes it in, that one may now fit in another one.
        let mut behind = out.len();
        while let Some((at, differs_in)) = host(&rule, &out[..behind]) {
            let mut union = out.remove(at);
            if let Some(condition) = differs_in {
                union.conditions[condition].values.extend(&rule.conditions[condition].values);
            }
            (rule, behind) = (union, at);
        }
        out.insert(behind, rule);
    }
    out
}

/// The last of `earlier` that can take `rule` in, which must not pass a rule that it matters to stand
/// behind; and the condition in which the two differ.
fn host(rule: &NativeRule, earlier: &[NativeRule]) -> Option<(usize, Option<usize>)> {
    for (at, other) in earlier.iter().enumerate().rev().take(LOOKED_AT) {
        if let Some(differs_in) = can_be_one(other, rule) {
            return Some((at, differs_in));
        }
        if other.action != rule.action && !are_disjoint(other, rule) {
            return None;
        }
    }
    None
}

/// Whether no packet meets both; marks don't count, for a rule can change them.
fn are_disjoint(a: &NativeRule, b: &NativeRule) -> bool {
    let families = a.family.is_some() && b.family.is_some() && a.family != b.family;
    let apart = |key: Key| match (a.condition(key), b.condition(key)) {
        (Some(a), Some(b)) => !a.not && !b.not && a.values.is_disjoint_from(&b.values),
        _ => false,
    };
    let settled = |key: &Key| !matches!(key, Key::CtState | Key::Mark | Key::CtMark);
    families || a.conditions.iter().map(|condition| condition.key).filter(settled).any(apart)
}

/// Whether one rule can catch what either of the two does, and the condition to widen for that.
fn can_be_one(a: &NativeRule, b: &NativeRule) -> Option<Option<usize>> {
    if a.action != b.action || a.family != b.family || a.conditions.len() != b.conditions.len() {
        return None;
    }
    let mut differing = a.conditions.iter().zip(&b.conditions).enumerate().filter(|(_, (a, b))| a != b);
    let Some((at, (one, other))) = differing.next() else { return Some(None) };
    let is_list = one.key == other.key && !one.not && !other.not && one.key != Key::CtState;
    (is_list && differing.next().is_none()).then_some(Some(at))
}

#[cfg(test)]
mod tests {
    use super::super::rule::{Condition, NativeAction};
    use super::super::set::{Span, Spans};
    use super::*;
    use proptest::prelude::*;

    fn rules(ports: &[u16]) -> Vec<NativeRule> {
        let rule = |port: &u16| NativeRule {
            family: None,
            conditions: vec![Condition { key: Key::DestinationPort, not: false, values: Spans::one(*port) }],
            action: NativeAction::Accept,
        };
        ports.iter().map(rule).collect()
    }

    /// What one family sees of a list.
    fn seen(zipped: &[NativeRule], family: Family) -> Vec<NativeRule> {
        let seen = zipped.iter().filter(|rule| rule.family.is_none_or(|own| own == family));
        seen.map(|rule| NativeRule { family: None, ..rule.clone() }).collect()
    }

    proptest! {
        #[test]
        fn each_family_sees_its_own_rules_in_their_order(
            a in prop::collection::vec(0..6u16, 0..12), b in prop::collection::vec(0..6u16, 0..12),
        ) {
            let zipped = zip(&rules(&a), Family::Ip, &rules(&b), Family::Ip6);
            prop_assert_eq!(seen(&zipped, Family::Ip), rules(&a));
            prop_assert_eq!(seen(&zipped, Family::Ip6), rules(&b));
        }
    }

    #[test]
    fn too_many_to_compare_stand_one_family_behind_the_other_between_what_both_have() {
        let list =
            |own: u16| rules(&[&[1, 2][..], &(0..5000).map(|i| 10 + own + 2 * i).collect::<Vec<_>>(), &[3]].concat());
        let (a, b) = (list(0), list(1));
        let started = std::time::Instant::now();
        let zipped = zip(&a, Family::Ip, &b, Family::Ip6);
        assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
        assert_eq!((seen(&zipped, Family::Ip), seen(&zipped, Family::Ip6)), (a, b));
        assert_eq!(zipped.len(), 2 + 5000 + 5000 + 1);
    }

    const KEYS: [Key; 3] = [Key::DestinationPort, Key::Uid, Key::Gid];

    /// The first rule that `values`, one for each key, meet.
    fn decides(rules: &[NativeRule], values: [u128; 3]) -> Option<&NativeAction> {
        let holds = |condition: &Condition| {
            let value = values[KEYS.iter().position(|key| *key == condition.key).expect("one of these")];
            condition.values.as_slice().iter().any(|s| s.first <= value && value <= s.last) != condition.not
        };
        rules.iter().find(|rule| rule.conditions.iter().all(holds)).map(|rule| &rule.action)
    }

    fn rule() -> impl Strategy<Value = NativeRule> {
        let condition = |key: Key| {
            let span = (0_u128..4, 0_u128..2).prop_map(|(first, more)| Span { first, last: first + more });
            (span, prop::bool::weighted(0.2)).prop_map(move |(span, not)| Condition {
                key,
                not,
                values: Spans::of(span.first, span.last),
            })
        };
        let conditions = KEYS.map(|key| prop::option::of(condition(key)));
        let action = prop::sample::select(vec![NativeAction::Accept, NativeAction::Drop]);
        (conditions, action).prop_map(|(conditions, action)| NativeRule {
            family: None,
            conditions: conditions.into_iter().flatten().collect(),
            action,
        })
    }

    proptest! {
        #[test]
        fn the_same_rule_decides_or_one_that_does_the_same(rules in prop::collection::vec(rule(), 0..10)) {
            let fewer = condense(rules.clone());
            prop_assert!(fewer.len() <= rules.len());
            for values in (0..6 * 6 * 6).map(|n| [n % 6, n / 6 % 6, n / 36]) {
                prop_assert_eq!(decides(&fewer, values), decides(&rules, values), "{:?}", values);
            }
        }
    }

    /// Neither what becomes one rule nor what can't be united takes more than in proportion.
    #[test]
    fn many_rules_are_condensed_fast() {
        let of = |uid: u32, port: u32| NativeRule {
            family: None,
            conditions: [(Key::DestinationPort, port), (Key::Uid, uid)]
                .map(|(key, value)| Condition { key, not: false, values: Spans::one(value) })
                .into(),
            action: NativeAction::Accept,
        };
        let started = std::time::Instant::now();
        assert_eq!(condense((0..20_000).map(|i| of(2 * i, 2 * i)).collect()).len(), 20_000);
        assert_eq!(condense((0..20_000).map(|i| of(2 * i, 53)).collect()).len(), 1);
        assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
    }

    #[test]
    fn a_rule_moves_past_others_that_no_packet_of_its_own_meets() {
        let of = |port: u16, action: NativeAction| NativeRule {
            family: None,
            conditions: vec![Condition { key: Key::DestinationPort, not: false, values: Spans::one(port) }],
            action,
        };
        let rules = vec![
            of(1, NativeAction::Accept),
            of(2, NativeAction::Drop),
            of(5, NativeAction::Accept),
            of(2, NativeAction::Accept),
        ];
        let fewer: Vec<String> = condense(rules).iter().map(ToString::to_string).collect();
        let expected = ["th dport { 1, 5 } counter accept", "th dport 2 counter drop", "th dport 2 counter accept"];
        assert_eq!(fewer, expected);
    }
}
