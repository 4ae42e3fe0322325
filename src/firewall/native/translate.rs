//! Translates iptables rules to native ones. Chains keep their names; a native chain covers both families, and lists
//! become sets.
//!
//! Two rules are translated by effect, not literally:
//!
//! * Without a listener, TPROXY of xtables drops the packet, whereas native evaluation continues: a `drop` follows.
//! * A mark is saved only on lo, where the proxy's marked packets arrive. During a change, a packet can pass old chains in
//!   one table and new ones in the next one. The old ones mark packets of any connection.
//!
//! Rules with the same target that differ in one list are merged into one rule with a set, so that the number of rules
//! does not grow with the lists. Merging changes the outcome for no packet.

use super::rule::{BaseHook, NativeChain, NativeTable, NativeTables};
use crate::firewall::rule::{Condition, Family, Hook, Key, Name, Rule, Table, Target};
use crate::firewall::ruleset::{Ruleset, TableRules, common_subsequence};

/// The maximum number of pairs of rules that are compared to merge two families.
const MAX_COMPARED_PAIRS: usize = 250_000;
/// How many earlier rules are examined for one that can absorb a rule: enough for a redirection, and few enough to
/// keep the cost linear if no rules can be merged.
const MAX_EXAMINED: usize = 64;

/// Translates the redirection of `ruleset` to native tables.
pub(super) fn redirection(ruleset: &Ruleset) -> NativeTables {
    let both = Family::ALL.iter().all(|family| ruleset.tables.keys().any(|(other, _)| other == family));
    let mut tables = NativeTables::new();
    for table in Table::ALL {
        let of = |family| ruleset.tables.get(&(family, table));
        let families: Vec<(Family, &TableRules)> = Family::ALL.into_iter().filter_map(|f| Some((f, of(f)?))).collect();
        if !families.is_empty() {
            tables.insert(NativeTable::Of(table), chains(table, &families, both).into_iter().collect());
        }
    }
    tables
}

fn chains<'a>(table: Table, families: &[(Family, &'a TableRules)], both: bool) -> Vec<(Name, NativeChain)> {
    let mut chains: Vec<(Name, NativeChain)> = Vec::new();
    for hook in Hook::ALL {
        let name = hook.chain();
        let rules = |rules: &'a TableRules| rules.hooks.get(&hook).map(Vec::as_slice);
        if let Some(rules) = merged(families, rules, true) {
            chains.push((name.into(), NativeChain { hook: Some(BaseHook { like: table, hook }), rules }));
        }
    }
    for (_, rules) in families {
        for (name, _) in &rules.chains {
            if !chains.iter().any(|(other, _)| other == name) {
                let rules = |rules: &'a TableRules| {
                    rules.chains.iter().find(|(n, _)| n == name).map(|(_, rules)| rules.as_slice())
                };
                // If the ruleset has one family only, its base chains admit no packet of the other one.
                let rules = merged(families, rules, both).unwrap_or_default();
                chains.push((name.clone(), NativeChain { hook: None, rules }));
            }
        }
    }
    chains
}

/// Merges the rules of a chain of all families; `None` if no family has the chain. With `named`, the rules of a chain
/// that only one family has are restricted to it.
fn merged<'a>(
    families: &[(Family, &'a TableRules)],
    rules: impl Fn(&'a TableRules) -> Option<&'a [Rule]>,
    named: bool,
) -> Option<Vec<Rule>> {
    let native = |family: Family, rules: &[Rule]| condense(rules.iter().flat_map(|rule| native(rule, family)));
    let mut lists = families.iter().filter_map(|&(family, of)| Some((family, rules(of)?)));
    match (lists.next()?, lists.next()) {
        ((family, a), Some((_, b))) if a == b && !a.iter().any(Rule::has_address) => Some(native(family, a)),
        ((a, rules_of_a), Some((b, rules_of_b))) => Some(zip(native(a, rules_of_a), a, native(b, rules_of_b), b)),
        ((family, rules), None) if !named => Some(native(family, rules)),
        ((family, rules), None) => Some(native(family, rules).into_iter().map(|rule| only(rule, family)).collect()),
    }
}

fn only(rule: Rule, family: Family) -> Rule {
    Rule { family: Some(family), ..rule }
}

/// Merges two families' rules into one list that contains common rules once. If there are too many to compare, only
/// the common beginning and end are merged.
fn zip(a: Vec<Rule>, family_of_a: Family, b: Vec<Rule>, family_of_b: Family) -> Vec<Rule> {
    let common = common_subsequence(a.len(), b.len(), MAX_COMPARED_PAIRS, |i, j| a[i] == b[j]);
    let mut zipped = Vec::with_capacity(a.len() + b.len() - common.len());
    let (mut next_of_a, mut next_of_b) = (0, 0);
    let (mut a, mut b) = (a.into_iter(), b.into_iter());
    for (i, j) in common {
        zipped.extend(a.by_ref().take(i - next_of_a).map(|rule| only(rule, family_of_a)));
        zipped.extend(b.by_ref().take(j - next_of_b).map(|rule| only(rule, family_of_b)));
        zipped.extend(a.next());
        b.next();
        (next_of_a, next_of_b) = (i + 1, j + 1);
    }
    zipped.extend(a.map(|rule| only(rule, family_of_a)));
    zipped.extend(b.map(|rule| only(rule, family_of_b)));
    zipped
}

/// Translates a rule; TPROXY becomes two.
fn native(rule: &Rule, family: Family) -> impl Iterator<Item = Rule> + use<> {
    let mut conditions: Vec<Condition> = Vec::with_capacity(rule.conditions.len());
    for condition in &rule.conditions {
        // "Not in A" and "not in B" together are "not in A or B".
        match conditions.iter_mut().find(|other| other.key == condition.key && other.not && condition.not) {
            Some(other) => other.values.extend(&condition.values),
            None => conditions.push(condition.clone()),
        }
    }
    let only_lo = (rule.target == Target::SaveMark).then(|| Condition::interface(Key::InInterface, "lo"));
    let family = rule.has_address().then_some(family);
    let first = Rule { family, conditions, ..Rule::new(rule.target.clone()) }.with(only_lo);
    let drop = matches!(rule.target, Target::Tproxy { .. }).then(|| Rule { target: Target::Drop, ..first.clone() });
    std::iter::once(first).chain(drop)
}

/// Merges rules where that changes the outcome for no packet.
pub(super) fn condense(rules: impl IntoIterator<Item = Rule>) -> Vec<Rule> {
    let mut out: Vec<Rule> = Vec::new();
    for rule in rules {
        let Some((mut at, differing)) = absorbing_rule(&rule, &out) else {
            out.push(rule);
            continue;
        };
        absorb(&mut out[at], &rule, differing);
        // A merged rule may itself be absorbed by an earlier one.
        while let Some((earlier, differing)) = absorbing_rule(&out[at], &out[..at]) {
            let rule = out.remove(at);
            absorb(&mut out[earlier], &rule, differing);
            at = earlier;
        }
    }
    out
}

/// Adds to `union` the values of the condition in which `rule` differs.
fn absorb(union: &mut Rule, rule: &Rule, differing: Option<usize>) {
    if let Some(condition) = differing {
        union.conditions[condition].values.extend(&rule.conditions[condition].values);
    }
}

/// Returns the index of the last rule in `earlier` that can absorb `rule`, and the condition in which the two differ.
/// `rule` must not move before a rule with another action that may match the same packets.
fn absorbing_rule(rule: &Rule, earlier: &[Rule]) -> Option<(usize, Option<usize>)> {
    for (at, other) in earlier.iter().enumerate().rev().take(MAX_EXAMINED) {
        if let Some(differing) = can_merge(other, rule) {
            return Some((at, differing));
        }
        if other.target != rule.target && !are_disjoint(other, rule) {
            return None;
        }
    }
    None
}

/// Reports whether no packet matches both rules. Conditions on marks and state don't count: rules can change marks, and
/// a state condition accepts several bits.
fn are_disjoint(a: &Rule, b: &Rule) -> bool {
    let families = a.family.is_some() && b.family.is_some() && a.family != b.family;
    let apart = |key: Key| match (a.condition(key), b.condition(key)) {
        (Some(a), Some(b)) => !a.not && !b.not && a.values.is_disjoint_from(&b.values),
        _ => false,
    };
    let is_stable = |key: &Key| !matches!(key, Key::CtState | Key::Mark | Key::CtMark);
    families || a.conditions.iter().map(|condition| condition.key).filter(is_stable).any(apart)
}

/// Returns whether one rule can match exactly the packets of both (`Some`), and the condition to extend for that; an
/// inner `None` if the rules are equal.
fn can_merge(a: &Rule, b: &Rule) -> Option<Option<usize>> {
    if a.target != b.target || a.family != b.family || a.conditions.len() != b.conditions.len() {
        return None;
    }
    let mut differing = a.conditions.iter().zip(&b.conditions).enumerate().filter(|(_, (a, b))| a != b);
    let Some((at, (one, other))) = differing.next() else { return Some(None) };
    let is_list = one.key == other.key && !one.not && !other.not && one.key != Key::CtState;
    (is_list && differing.next().is_none()).then_some(Some(at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::set::{Span, Spans};
    use proptest::prelude::*;

    fn rules(ports: &[u16]) -> Vec<Rule> {
        let rule = |port: &u16| Rule {
            conditions: vec![Condition { key: Key::DestinationPort, not: false, values: Spans::one(*port) }],
            ..Rule::new(Target::Accept)
        };
        ports.iter().map(rule).collect()
    }

    /// Returns the rules that apply to one family.
    fn seen(zipped: &[Rule], family: Family) -> Vec<Rule> {
        let seen = zipped.iter().filter(|rule| rule.family.is_none_or(|own| own == family));
        seen.map(|rule| Rule { family: None, ..rule.clone() }).collect()
    }

    proptest! {
        #[test]
        fn the_order_of_each_familys_rules_is_preserved(
            a in prop::collection::vec(0..6u16, 0..12), b in prop::collection::vec(0..6u16, 0..12),
        ) {
            let zipped = zip(rules(&a), Family::Ip, rules(&b), Family::Ip6);
            prop_assert_eq!(seen(&zipped, Family::Ip), rules(&a));
            prop_assert_eq!(seen(&zipped, Family::Ip6), rules(&b));
        }
    }

    #[test]
    fn families_with_too_many_rules_to_compare_are_concatenated_between_their_common_ends() {
        let list =
            |own: u16| rules(&[&[1, 2][..], &(0..5000).map(|i| 10 + own + 2 * i).collect::<Vec<_>>(), &[3]].concat());
        let (a, b) = (list(0), list(1));
        let started = std::time::Instant::now();
        let zipped = zip(a.clone(), Family::Ip, b.clone(), Family::Ip6);
        assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
        assert_eq!((seen(&zipped, Family::Ip), seen(&zipped, Family::Ip6)), (a, b));
        assert_eq!(zipped.len(), 2 + 5000 + 5000 + 1);
    }

    const KEYS: [Key; 3] = [Key::DestinationPort, Key::Uid, Key::Gid];

    /// Returns the action of the first rule that matches `values`, one for each key.
    fn decides(rules: &[Rule], values: [u128; 3]) -> Option<&Target> {
        let holds = |condition: &Condition| {
            let value = values[KEYS.iter().position(|key| *key == condition.key).expect("one of these")];
            condition.values.as_slice().iter().any(|s| s.first <= value && value <= s.last) != condition.not
        };
        rules.iter().find(|rule| rule.conditions.iter().all(holds)).map(|rule| &rule.target)
    }

    fn rule() -> impl Strategy<Value = Rule> {
        let condition = |key: Key| {
            let span = (0_u128..4, 0_u128..2).prop_map(|(first, more)| Span { first, last: first + more });
            (span, prop::bool::weighted(0.2)).prop_map(move |(span, not)| Condition {
                key,
                not,
                values: Spans::of(span.first, span.last),
            })
        };
        let conditions = KEYS.map(|key| prop::option::of(condition(key)));
        let target = prop::sample::select(vec![Target::Accept, Target::Drop]);
        (conditions, target).prop_map(|(conditions, target)| Rule {
            conditions: conditions.into_iter().flatten().collect(),
            ..Rule::new(target)
        })
    }

    proptest! {
        #[test]
        fn condensed_rules_have_the_same_outcome(rules in prop::collection::vec(rule(), 0..10)) {
            let fewer = condense(rules.clone());
            prop_assert!(fewer.len() <= rules.len());
            for values in (0..6 * 6 * 6).map(|n| [n % 6, n / 6 % 6, n / 36]) {
                prop_assert_eq!(decides(&fewer, values), decides(&rules, values), "{:?}", values);
            }
        }
    }

    /// The cost is linear both for rules that can be merged and for rules that can't.
    #[test]
    fn many_rules_are_condensed_fast() {
        let of = |uid: u32, port: u32| Rule {
            conditions: [(Key::DestinationPort, port), (Key::Uid, uid)]
                .map(|(key, value)| Condition { key, not: false, values: Spans::one(value) })
                .into(),
            ..Rule::new(Target::Accept)
        };
        let started = std::time::Instant::now();
        assert_eq!(condense((0..20_000).map(|i| of(2 * i, 2 * i))).len(), 20_000);
        assert_eq!(condense((0..20_000).map(|i| of(2 * i, 53))).len(), 1);
        assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
    }

    #[test]
    fn a_rule_moves_only_past_rules_that_match_none_of_its_packets() {
        let of = |port: u16, target: Target| Rule {
            conditions: vec![Condition { key: Key::DestinationPort, not: false, values: Spans::one(port) }],
            ..Rule::new(target)
        };
        let rules = vec![of(1, Target::Accept), of(2, Target::Drop), of(5, Target::Accept), of(2, Target::Accept)];
        let fewer: Vec<String> = condense(rules).iter().map(ToString::to_string).collect();
        let expected = ["th dport { 1, 5 } counter accept", "th dport 2 counter drop", "th dport 2 counter accept"];
        assert_eq!(fewer, expected);
    }
}
