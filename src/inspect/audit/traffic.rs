//! Traffic in words, from the conditions of a rule.

use crate::firewall::native::rule::{Condition, Key};
use crate::firewall::rule::Family;
use crate::inspect::terminal::first_of;
use std::fmt;

/// Limit for the values of one condition that are listed; the rest is counted.
const MAX_VALUES: usize = 10;

/// The direction of a connection, as seen from the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Direction {
    Outbound,
    Inbound,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Outbound => "outbound",
            Self::Inbound => "inbound",
        })
    }
}

/// Returns the traffic that meets all conditions, in words.
pub(super) fn traffic(direction: Direction, conditions: &[Condition]) -> String {
    let mut words = vec![direction.to_string()];
    let with = |wanted: &'static [Key]| conditions.iter().filter(|condition| wanted.contains(&condition.key));
    words.push(match with(&[Key::Protocol]).next() {
        Some(protocol) => protocol.value_texts().join(" and "),
        None => "traffic".to_owned(),
    });
    let destinations: &'static [Key] = &[Key::Destination(Family::Ip), Key::Destination(Family::Ip6)];
    let order: [&'static [Key]; 6] = [
        &[Key::Uid],
        &[Key::Gid],
        &[Key::Source(Family::Ip), Key::Source(Family::Ip6)],
        destinations,
        &[Key::SourcePort, Key::DestinationPort],
        &[Key::InInterface, Key::OutInterface],
    ];
    let has_destination = conditions.iter().any(|condition| destinations.contains(&condition.key));
    for condition in order.into_iter().flat_map(with) {
        words.extend(phrase(condition, has_destination));
    }
    words.extend(with(&[Key::Mark, Key::CtMark]).map(|condition| format!("with mark {}", values(condition))));
    words.join(" ")
}

/// Returns a condition in words; `None` if it is redundant: traffic that leaves the pod is not over `lo`.
fn phrase(condition: &Condition, has_destination: bool) -> Option<String> {
    let values = values(condition);
    let (preposition, kind) = match condition.key {
        Key::Uid => ("of", "uid"),
        Key::Gid => ("of", "gid"),
        Key::Source(_) => ("from", "address"),
        Key::Destination(_) => ("to", "address"),
        Key::SourcePort => ("from", "port"),
        Key::DestinationPort if has_destination => ("", "port"),
        Key::DestinationPort => ("to", "port"),
        Key::InInterface | Key::OutInterface if condition.not && values == "lo" => return None,
        Key::InInterface | Key::OutInterface => ("over", "interface"),
        Key::Protocol | Key::CtState | Key::Mark | Key::CtMark => return None,
    };
    let text = match (condition.not, kind) {
        (true, _) => format!("{preposition} any {kind} except {values}"),
        (false, "uid" | "gid" | "port") => format!("{preposition} {kind} {values}"),
        (false, _) => format!("{preposition} {values}"),
    };
    Some(text.trim_start().to_owned())
}

fn values(condition: &Condition) -> String {
    first_of(condition.value_texts(), MAX_VALUES, ", ")
}
