//! Excluded containers: what requests them, whether they bypass the sidecar now, and the counters of their sets.

use super::report::{Bypass, CountedUnit};
use crate::firewall::native::EXCLUSIONS;
use crate::firewall::native::rule::{NativeRule, NativeTable};
use crate::firewall::{ContainerElement, Counter, RulesetView, TableId};
use crate::inspect::elements::{ElementLine, TABLE, scope_text};
use crate::policy::{ContainerExclusion, ContainerScope, Policy};

/// Limit for the foreign elements that are listed; the rest is counted.
const MAX_FOREIGN: usize = 10;

/// Returns the bypasses of the excluded containers of `policy`, and those of foreign elements. `source` returns what
/// requests an exclusion. Without `all`, containers that neither bypass the sidecar now nor were counted are omitted.
pub(super) fn bypasses(
    (view, elements): (&RulesetView, &[ContainerElement]),
    policy: Option<&Policy>,
    all: bool,
    source: impl Fn(&ContainerExclusion) -> String,
) -> Vec<Bypass> {
    let exclusions = || policy.into_iter().flat_map(|policy| &policy.containers);
    let mut bypasses = foreign(elements, policy);
    for exclusion in exclusions() {
        let ContainerExclusion { name, scope } = exclusion;
        let is_element = |element: &ContainerElement| {
            element.scope == *scope && element.container.as_ref().is_some_and(|label| label.name == *name)
        };
        let is_active = elements.iter().any(is_element);
        let counter = counter(view, *scope);
        if !all && !is_active && counter.is_none_or(|counter| counter.packets == 0) {
            continue;
        }
        let others = exclusions().filter(|other| other.scope == *scope && other.name != *name);
        let others: Vec<&str> = others.map(|other| &*other.name).collect();
        let mut note = if is_active { "now" } else { "not now" }.to_owned();
        if !others.is_empty() {
            note += &format!("; the numbers contain those of {}", others.join(", "));
        }
        bypasses.push(Bypass {
            traffic: format!("{} of container {name}", scope_text(*scope)),
            source: source(exclusion),
            packets: counter.map(|counter| counter.packets),
            bytes: counter.map(|counter| counter.bytes),
            counts: CountedUnit::Connections,
            note: Some(note),
            by_other_program: false,
            container: Some(name.clone()),
        });
    }
    bypasses
}

/// Returns what the rules of a set counted; `None` if they are missing.
fn counter(view: &RulesetView, scope: ContainerScope) -> Option<Counter> {
    let rules = view.chain(TableId::Native(NativeTable::Exclusions), EXCLUSIONS).iter();
    let is_of_set = |rule: &NativeRule| rule.cgroup.is_some_and(|cgroup| cgroup.set == scope);
    let counters = rules.filter(|rule| rule.rule.as_ref().is_some_and(is_of_set)).map(|rule| rule.counter);
    counters.reduce(Counter::plus)
}

fn foreign(elements: &[ContainerElement], policy: Option<&Policy>) -> Vec<Bypass> {
    let lines = elements.iter().map(|element| ElementLine::of(element, policy));
    let foreign: Vec<ElementLine> = lines.filter(|line| line.foreign).collect();
    let bypass = |traffic: String| Bypass {
        traffic,
        source: format!("an element of another program in the sets of table {TABLE}"),
        by_other_program: true,
        ..Bypass::default()
    };
    let listed = foreign.iter().take(MAX_FOREIGN);
    let mut bypasses: Vec<Bypass> = listed
        .map(|line| {
            let named = line.container.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
            bypass(format!("{} of control group {}{named}", scope_text(line.scope), line.cgroup))
        })
        .collect();
    let more = foreign.len().saturating_sub(MAX_FOREIGN);
    if more > 0 {
        bypasses.push(bypass(format!("traffic of {more} more control groups")));
    }
    bypasses
}
