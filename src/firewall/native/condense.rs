//! Rules that do the same and differ in one list become one rule with a set, so that the number
//! of rules does not grow with the lists. No packet fares differently.

use super::rule::{Key, Rule};

/// The same as `rules`, in fewer.
pub(super) fn condense(rules: Vec<Rule>) -> Vec<Rule> {
    let mut out: Vec<Rule> = Vec::new();
    for mut rule in rules {
        // As long as an earlier rule takes it in, that one may now fit in another one.
        let mut behind = out.len();
        loop {
            let host = (0..behind).rev().take_while(|at| may_stand_before(&rule, &out[at + 1..behind]));
            let found = host.filter_map(|at| Some((at, united(&out[at], &rule)?))).next();
            match found {
                Some((at, union)) => {
                    out.remove(at);
                    (rule, behind) = (union, at);
                }
                None => break,
            }
        }
        out.insert(behind, rule);
    }
    out
}

/// Whether it makes no difference to have `rule` in front of `others` instead of behind them.
fn may_stand_before(rule: &Rule, others: &[Rule]) -> bool {
    others.iter().all(|other| other.action == rule.action || are_disjoint(other, rule))
}

/// Whether no packet meets both; marks don't count, for a rule can change them.
fn are_disjoint(a: &Rule, b: &Rule) -> bool {
    let families = a.family.is_some() && b.family.is_some() && a.family != b.family;
    let apart = |key: Key| match (a.condition(key), b.condition(key)) {
        (Some(a), Some(b)) => !a.not && !b.not && a.values.is_disjoint_from(&b.values),
        _ => false,
    };
    let settled = |key: &Key| !matches!(key, Key::CtState | Key::Mark | Key::CtMark);
    families || a.conditions.iter().map(|condition| condition.key).filter(settled).any(apart)
}

/// The rule that catches what either of the two does, where one rule can.
fn united(a: &Rule, b: &Rule) -> Option<Rule> {
    if a.action != b.action || a.family != b.family || a.conditions.len() != b.conditions.len() {
        return None;
    }
    let mut differing = a.conditions.iter().zip(&b.conditions).enumerate().filter(|(_, (a, b))| a != b);
    let Some((at, (one, other))) = differing.next() else { return Some(a.clone()) };
    let is_list = one.key == other.key && !one.not && !other.not && one.key != Key::CtState;
    if differing.next().is_some() || !is_list {
        return None;
    }
    let mut union = a.clone();
    union.conditions[at].values.extend(&other.values);
    Some(union)
}
