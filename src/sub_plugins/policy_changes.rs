//! The difference between two policies of a pod in words, for Events and reports.

use super::settings::setting_values;
use crate::policy::{ContainerExclusion, Exclusion, Interception, Policy, TrafficOwner};
use crate::printable::cut;
use serde_json::Value;
use std::collections::BTreeSet;

/// Limit of the differences that are named; the rest is counted.
const MAX_NAMED: usize = 8;
/// The maximum length of a value, in bytes.
const MAX_VALUE: usize = 120;

/// Returns the differences between two policies in words: first the redirection, then the settings by their keys, then
/// the exclusions. The list is short; its last element counts the other differences.
#[must_use]
pub fn policy_changes(from: &Policy, to: &Policy) -> Vec<String> {
    let (mut named, mut count) = (Vec::new(), 0);
    let all = interception(from, to)
        .into_iter()
        .chain(settings(from, to))
        .chain(set(&from.exclusions, &to.exclusions, exclusion))
        .chain(set(&from.containers, &to.containers, container));
    for change in all {
        count += 1;
        if count <= MAX_NAMED {
            named.push(change());
        }
    }
    if count > MAX_NAMED {
        named.push(format!("{} more differences", count - MAX_NAMED));
    }
    named
}

/// A difference, whose text is only made if it is named.
type Change<'a> = Box<dyn Fn() -> String + 'a>;

fn interception<'a>(from: &Policy, to: &Policy) -> Option<Change<'a>> {
    let kind = |policy: &Policy| match policy.interception {
        Interception::Unset => "not redirected",
        Interception::Off => "interception mode NONE",
        Interception::On(_) => "redirected",
    };
    let (from, to) = (kind(from), kind(to));
    (from != to).then(|| -> Change<'a> { Box::new(move || format!("{from} → {to}")) })
}

fn settings<'a>(from: &Policy, to: &Policy) -> Vec<Change<'a>> {
    let (Some(from), Some(to)) = (from.redirect(), to.redirect()) else { return Vec::new() };
    let both = setting_values(from).zip(setting_values(to));
    let differing = both.filter(|((_, from), (_, to))| from != to);
    differing
        .map(|((key, from), (_, to))| -> Change<'a> {
            Box::new(move || format!("{key}: {} → {}", shown(&from), shown(&to)))
        })
        .collect()
}

fn set<'a, T: Ord>(from: &'a BTreeSet<T>, to: &'a BTreeSet<T>, text: fn(&T) -> String) -> Vec<Change<'a>> {
    let added = to.difference(from).map(|one| -> Change<'a> { Box::new(move || format!("excludes {}", text(one))) });
    let removed =
        from.difference(to).map(|one| -> Change<'a> { Box::new(move || format!("no longer excludes {}", text(one))) });
    added.chain(removed).collect()
}

fn shown(value: &Value) -> String {
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let text = match value {
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(","),
        other => plain(other),
    };
    cut(&text, MAX_VALUE).into_owned()
}

fn exclusion(exclusion: &Exclusion) -> String {
    let Exclusion { owner, destination, protocol, ports } = exclusion;
    let owner = match owner {
        TrafficOwner::Any => "every process".to_owned(),
        TrafficOwner::Uid(range) => format!("uid {range}"),
        TrafficOwner::Gid(range) => format!("gid {range}"),
    };
    let protocol = protocol.map(|protocol| protocol.to_string());
    let ports = ports.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let ports = (!ports.is_empty()).then(|| format!("ports {}", cut(&ports, MAX_VALUE)));
    let destination = destination.map(|net| format!("to {net}"));
    [Some(owner), protocol, ports, destination].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

fn container(exclusion: &ContainerExclusion) -> String {
    let ContainerExclusion { name, scope, until } = exclusion;
    format!("container {} (traffic: {scope}, until: {until})", cut(name, MAX_VALUE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{BypassEnd, ContainerScope, IdRange, PortRange, Ports, Protocol, Redirect};

    fn policy(change: impl FnOnce(&mut Redirect)) -> Policy {
        let mut redirect = Redirect::default();
        change(&mut redirect);
        Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
    }

    fn uid(uid: u32) -> Exclusion {
        Exclusion { owner: TrafficOwner::Uid(IdRange::one(uid)), destination: None, protocol: None, ports: Vec::new() }
    }

    #[test]
    fn equal_policies_have_no_difference() {
        assert_eq!(policy_changes(&policy(|_| ()), &policy(|_| ())), [""; 0]);
        assert_eq!(policy_changes(&Policy::default(), &Policy::default()), [""; 0]);
    }

    #[test]
    fn each_difference_names_its_key_and_both_values() {
        let from = Policy { exclusions: [uid(7)].into(), ..policy(|_| ()) };
        let dns = Exclusion {
            protocol: Some(Protocol::Udp),
            ports: vec![PortRange::one(53)],
            destination: Some("10.0.0.0/8".parse().expect("a range")),
            ..uid(8)
        };
        let vault = ContainerExclusion {
            name: "vault".to_owned(),
            scope: ContainerScope::All,
            until: BypassEnd::ContainerExit,
        };
        let changed = policy(|redirect| {
            redirect.outbound_ports_exclude = Ports::List(vec![PortRange::one(15020), PortRange::one(3306)]);
            redirect.drop_invalid = true;
        });
        let to = Policy { exclusions: [dns].into(), containers: [vault].into(), ..changed };
        let expected = [
            "outbound_ports_exclude: 15020 → 15020,3306",
            "drop_invalid: false → true",
            "excludes uid 8 udp ports 53 to 10.0.0.0/8",
            "no longer excludes uid 7",
            "excludes container vault (traffic: all, until: container-exit)",
        ];
        assert_eq!(policy_changes(&from, &to), expected);
        assert_eq!(policy_changes(&policy(|_| ()), &Policy::default()), ["redirected → not redirected"]);
    }

    #[test]
    fn many_or_long_differences_are_short() {
        let many = Policy { exclusions: (0..10_000).map(uid).collect(), ..policy(|_| ()) };
        let changes = policy_changes(&policy(|_| ()), &many);
        assert_eq!(changes.len(), MAX_NAMED + 1);
        assert_eq!(changes[MAX_NAMED], "9992 more differences");
        let long = policy(|redirect| {
            redirect.outbound_ports_exclude = Ports::List((1..5000).map(PortRange::one).collect());
        });
        let changes = policy_changes(&policy(|_| ()), &long);
        assert!(changes.len() == 1 && changes[0].len() < 300, "{changes:?}");
    }
}
