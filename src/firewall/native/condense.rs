//! Rules that do the same and differ in one list become one rule with a set, so that the number
//! of rules does not grow with the lists. No packet fares differently.

use super::rule::{Key, NativeRule};

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
    use super::super::rule::{NativeAction, Condition};
    use super::super::spans::{Span, Spans};
    use super::*;
    use proptest::prelude::*;

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
        let rules = vec![of(1, NativeAction::Accept), of(2, NativeAction::Drop), of(5, NativeAction::Accept), of(2, NativeAction::Accept)];
        let fewer: Vec<String> = condense(rules).iter().map(ToString::to_string).collect();
        let expected = ["th dport { 1, 5 } counter accept", "th dport 2 counter drop", "th dport 2 counter accept"];
        assert_eq!(fewer, expected);
    }
}
