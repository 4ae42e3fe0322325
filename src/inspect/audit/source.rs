//! What requests the exclusions of a pod: the configurations of the node and the pod's annotations, as they are now.

use super::bypass::{Cause, FoundBypass};
use crate::cluster::Cluster;
use crate::cni::Error;
use crate::firewall::native::addresses;
use crate::firewall::native::rule::{Condition, Key};
use crate::firewall::native::set::Spans;
use crate::firewall::rule::{Family, protocol_number};
use crate::inspect::explain::{evaluate, has_redirect};
use crate::inspect::subject::{AppliedConf, Subject};
use crate::pod::{Facts, Pod};
use crate::policy::{ContainerExclusion, Exclusion, TrafficOwner};
use crate::sub_plugins::setting_annotations;
use ipnet::IpNet;
use std::collections::BTreeSet;

const OTHER_TOOL: &str = "the rules of another tool, such as istio-init";
const NO_LONGER: &str = "requested earlier, but no longer by the pod, its namespace or this node's configuration";
const UNKNOWN: &str = "unknown";

/// What the node's configurations and the pod's annotations request for a pod.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// Whether one of the configurations redirects the pod.
    pub redirects: bool,
    /// Whether and why they redirect the pod, in one line.
    pub decision: String,
    exclusions: Vec<(Exclusion, String)>,
    containers: Vec<(ContainerExclusion, String)>,
    settings: Vec<(&'static str, String)>,
    is_known: bool,
}

impl Requests {
    /// Evaluates all configurations of the node.
    ///
    /// # Errors
    /// An ADD of the pod would fail.
    pub(super) fn of(configurations: &[AppliedConf], facts: &Facts, cluster: &dyn Cluster) -> Result<Self, Error> {
        let mut requests = Self { is_known: true, ..Self::default() };
        let mut decisive = None;
        for conf in configurations {
            let subject = Subject::of(conf.clone(), facts.clone(), Some(cluster))?;
            for evaluation in evaluate(&subject)? {
                let redirects = evaluation.policy().redirect().is_some();
                requests.redirects |= redirects;
                let rank = (redirects, evaluation.result.is_ok(), has_redirect(&evaluation.conf.chain));
                if decisive.as_ref().is_none_or(|(best, _)| *best < rank) {
                    decisive = Some((rank, evaluation.decision()));
                }
                let named = |source: String| match source.strip_prefix("configuration, ") {
                    Some(path) if configurations.len() > 1 => format!("network {}, {path}", conf.conf.name),
                    _ => source,
                };
                let exclusions = evaluation.exclusions();
                requests.exclusions.extend(exclusions.map(|(exclusion, source)| (exclusion.clone(), named(source))));
                let containers = evaluation.containers();
                requests.containers.extend(containers.map(|(exclusion, source)| (exclusion.clone(), named(source))));
                requests.settings.extend(evaluation.settings().map(|(key, source)| (key, named(source))));
            }
        }
        requests.decision = decisive.map_or_else(
            || "not redirected: no configuration on this node calls the plugin".to_owned(),
            |(_, decision)| decision,
        );
        Ok(requests)
    }

    /// Returns what requests the exclusion, in words. `by_detour`: whether detour's redirection has the rule.
    pub(super) fn source(&self, found: &FoundBypass, pod: &Pod, by_detour: bool) -> String {
        let sources: BTreeSet<&str> = match &found.cause {
            Cause::OtherProgram(rule) => return format!("a rule of another program: {rule}"),
            Cause::NoRules => return "no redirection rules for this IP family".to_owned(),
            Cause::Exclusion => {
                let matching = self.exclusions.iter().filter(|(one, _)| overlaps(one, &found.conditions));
                matching.map(|(_, source)| source.as_str()).collect()
            }
            Cause::Setting(key) if by_detour => {
                let own = self.settings.iter().filter(|(other, _)| other == key);
                own.map(|(_, source)| source.as_str()).collect()
            }
            Cause::Setting(key) => {
                let annotation = setting_annotations(key).iter().find(|name| pod.annotations.contains_key(**name));
                return annotation.map_or_else(|| OTHER_TOOL.to_owned(), |name| format!("pod, {name}"));
            }
        };
        self.joined(sources)
    }

    /// Returns what requests the exclusion of a container, in words.
    pub(super) fn source_of_container(&self, exclusion: &ContainerExclusion) -> String {
        let matching = self.containers.iter().filter(|(one, _)| one == exclusion);
        self.joined(matching.map(|(_, source)| source.as_str()).collect())
    }

    fn joined(&self, sources: BTreeSet<&str>) -> String {
        match (sources.is_empty(), self.is_known) {
            (true, true) => NO_LONGER.to_owned(),
            (true, false) => UNKNOWN.to_owned(),
            _ => sources.into_iter().collect::<Vec<_>>().join("; "),
        }
    }
}

/// Returns whether a rule with these conditions applies to traffic of the exclusion. Rules of several exclusions may
/// be merged into one.
fn overlaps(exclusion: &Exclusion, conditions: &[Condition]) -> bool {
    let values = |key: Key| conditions.iter().find(|condition| condition.key == key).map(|condition| &condition.values);
    let meets = |values: &Spans, first: u128, last: u128| !values.is_disjoint_from(&Spans::of(first, last));
    let owner = match (exclusion.owner, values(Key::Uid), values(Key::Gid)) {
        (TrafficOwner::Any, None, None) => true,
        (TrafficOwner::Uid(range), Some(values), None) | (TrafficOwner::Gid(range), None, Some(values)) => {
            meets(values, range.first.into(), range.last.into())
        }
        _ => false,
    };
    let protocol = match (exclusion.protocol, values(Key::Protocol)) {
        (Some(protocol), Some(values)) => !values.is_disjoint_from(&Spans::one(protocol_number(protocol))),
        (Some(_), None) => false,
        (None, _) => true,
    };
    let ports = match values(Key::DestinationPort) {
        None => exclusion.ports.is_empty(),
        Some(values) => exclusion.ports.iter().any(|range| meets(values, range.first.into(), range.last.into())),
    };
    let destination =
        match (exclusion.destination, values(Key::Destination(Family::Ip)), values(Key::Destination(Family::Ip6))) {
            (None, None, None) => true,
            (Some(net @ IpNet::V4(_)), Some(values), _) | (Some(net @ IpNet::V6(_)), _, Some(values)) => {
                !values.is_disjoint_from(&addresses(net))
            }
            _ => false,
        };
    owner && protocol && ports && destination
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exclusion_without_request_may_have_come_after_the_start_of_the_pod() {
        let source = |is_known| Requests { is_known, ..Requests::default() }.joined(BTreeSet::new());
        assert!(source(true).starts_with("requested earlier, but no longer"));
        assert_eq!(source(false), UNKNOWN);
    }
}
