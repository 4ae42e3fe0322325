//! The change of a policy in words, for Events and logs.

use crate::policy::{ContainerExclusion, Exclusion, Interception, Policy, TrafficOwner};
use crate::printable::cut;
use crate::sub_plugins::setting_values;
use serde_json::Value;
use std::collections::BTreeMap;

/// The maximum length of a change in words, in bytes.
const MAX_WORDS: usize = 800;

/// Returns the differences between two policies in words; empty if none has an effect.
pub(super) fn changes(before: &Policy, after: &Policy) -> String {
    let mut words = Vec::new();
    let kind = |policy: &Policy| match policy.interception {
        Interception::Unset => "not redirected",
        Interception::Off => "interception mode NONE",
        Interception::On(_) => "redirected",
    };
    if kind(before) != kind(after) {
        words.push(format!("{} (before: {})", kind(after), kind(before)));
    }
    let values = |policy: &Policy| policy.redirect().map(|it| setting_values(it).collect::<BTreeMap<_, _>>());
    if let (Some(before), Some(after)) = (values(before), values(after)) {
        for (key, value) in &after {
            let old = before.get(key).unwrap_or(&Value::Null);
            if old != value {
                words.push(format!("{key}: {} (before: {})", shown(value), shown(old)));
            }
        }
    }
    let (old, new) = (before.exclusions_in_effect(), after.exclusions_in_effect());
    words.extend(listed("excluded", new.difference(&old).map(exclusion)));
    words.extend(listed("no longer excluded", old.difference(&new).map(exclusion)));
    words.extend(listed("excluded", after.containers.difference(&before.containers).map(container)));
    words.extend(listed("no longer excluded", before.containers.difference(&after.containers).map(container)));
    cut(&words.join("; "), MAX_WORDS).into_owned()
}

fn listed(title: &str, items: impl Iterator<Item = String>) -> Option<String> {
    let items: Vec<String> = items.collect();
    (!items.is_empty()).then(|| format!("{title}: {}", items.join(", ")))
}

fn shown(value: &Value) -> String {
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match value {
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => plain(other),
    }
}

fn exclusion(Exclusion { owner, destination, protocol, ports }: &Exclusion) -> String {
    let mut words = vec![match owner {
        TrafficOwner::Any => "every process".to_owned(),
        TrafficOwner::Uid(range) => format!("UID {range}"),
        TrafficOwner::Gid(range) => format!("GID {range}"),
    }];
    words.extend(protocol.map(|protocol| protocol.to_string()));
    if !ports.is_empty() {
        words.push(format!("port {}", ports.iter().map(ToString::to_string).collect::<Vec<_>>().join("/")));
    }
    words.extend(destination.map(|destination| format!("to {destination}")));
    words.join(" ")
}

fn container(ContainerExclusion { name, scope }: &ContainerExclusion) -> String {
    format!("container {name} ({scope})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{ContainerScope, IdRange, PortRange, Ports, Protocol, Redirect};
    use std::collections::BTreeSet;

    fn redirected(change: impl FnOnce(&mut Redirect)) -> Policy {
        let mut redirect = Redirect::default();
        change(&mut redirect);
        Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
    }

    #[test]
    fn each_kind_of_change_is_named_with_both_values() {
        let before = redirected(|_| {});
        assert_eq!(changes(&before, &before), "");
        let mut after = redirected(|redirect| {
            redirect.outbound_ports_exclude = Ports::List(vec![PortRange::one(3306), PortRange { first: 1, last: 9 }]);
        });
        let uid = |first, last| Exclusion {
            owner: TrafficOwner::Uid(IdRange { first, last }),
            destination: None,
            protocol: None,
            ports: Vec::new(),
        };
        let dns = Exclusion {
            owner: TrafficOwner::Any,
            destination: Some("10.96.0.10/32".parse().expect("an address")),
            protocol: Some(Protocol::Udp),
            ports: vec![PortRange::one(53)],
        };
        after.exclusions = BTreeSet::from([uid(1000, 1999), dns]);
        after.containers = BTreeSet::from([ContainerExclusion { name: "vault".into(), scope: ContainerScope::All }]);
        let words = changes(&before, &after);
        for part in [
            "outbound_ports_exclude: 3306, 1-9 (before: 15020)",
            "excluded: every process udp port 53 to 10.96.0.10/32, UID 1000-1999",
            "excluded: container vault (all)",
        ] {
            assert!(words.contains(part), "{words}");
        }
        assert!(changes(&after, &before).contains("no longer excluded: container vault"), "the other way");
        assert_eq!(changes(&Policy::default(), &before), "redirected (before: not redirected)");
    }

    #[test]
    fn a_large_change_is_cut() {
        let ports = |range: std::ops::Range<u16>| Ports::List(range.map(PortRange::one).collect());
        let words =
            changes(&redirected(|_| {}), &redirected(|redirect| redirect.outbound_ports_exclude = ports(1..999)));
        assert!(words.len() <= MAX_WORDS && words.ends_with('…'), "{words}");
    }
}
