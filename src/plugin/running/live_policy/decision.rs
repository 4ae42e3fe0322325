//! Whether a running pod has its current policy, which policy it gets, and the change in words (pure).

use crate::cni::{Code, Error, excerpt};
use crate::plugin::running::live_policy::{AppliedPolicy, DesiredPolicies, RunningPod, policy_hash};
use crate::pod::Facts;
use crate::pod::well_known::LIVE_POLICY;
use crate::policy::{ContainerExclusion, Exclusion, Interception, LivePolicyScope, Policy, TrafficOwner};
use crate::printable::cut;
use crate::state::Attachment;
use crate::sub_plugins::{is_meshed, setting_values};
use serde_json::Value;
use std::collections::BTreeMap;

/// The policies of the attachments of a pod.
pub(crate) type Policies = Vec<(Attachment, Policy)>;

/// How the applied policy of a pod compares with the desired one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verdict {
    /// They are equal.
    Current,
    /// The applied policy is an earlier one.
    Older,
    /// The desired policy is invalid, or contradicts itself.
    Rejected,
    /// The pod has a sidecar and no rules, and would be redirected.
    None,
}

impl Verdict {
    /// All verdicts.
    pub(crate) const ALL: [Self; 4] = [Self::Current, Self::Older, Self::Rejected, Self::None];

    /// Returns the name in metrics and reports.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Older => "older",
            Self::Rejected => "rejected",
            Self::None => "none",
        }
    }
}

/// The comparison of a pod's applied policy with the desired one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Assessment {
    /// `None` if the pod has no rules and needs none.
    pub(crate) verdict: Option<Verdict>,
    /// Whether the pod has rules of its attachments.
    pub(crate) has_rules: bool,
    /// The hash of the applied policy; empty without rules.
    pub(crate) applied: String,
    /// The hash of the desired policy; empty if unknown.
    pub(crate) desired: String,
    /// Why the pod is not current.
    pub(crate) reason: String,
    /// Whether only a new pod gets all of the desired policy.
    pub(crate) needs_new_pod: bool,
    /// Whether it needs a new pod although it follows changes.
    pub(crate) is_outdated: bool,
    /// The policies to apply; `None` if the pod has those that it may get.
    pub(crate) change: Option<Policies>,
}

/// The inputs of a decision.
pub(crate) struct Input<'a> {
    /// The pod as it is in the saved state.
    pub(crate) running: &'a RunningPod,
    /// The facts of the pod and its namespace.
    pub(crate) facts: &'a Facts,
    /// The policies that an ADD would apply now.
    pub(crate) desired: &'a Result<DesiredPolicies, Error>,
    /// The scope of the agent.
    pub(crate) scope: LivePolicyScope,
}

/// Decides about a pod.
pub(crate) fn assess(input: &Input<'_>) -> Assessment {
    let Input { running, facts, desired, scope } = input;
    let has_rules = running.has_rules();
    let applied =
        if has_rules { policy_hash(running.attachments.iter().map(|one| &one.policy)) } else { String::new() };
    let known = Assessment { has_rules, applied, ..Assessment::default() };
    let with = |verdict: Verdict, reason: String| Assessment { verdict: Some(verdict), reason, ..known.clone() };
    if !running.has_inputs() {
        // ADD saves none if the policy is final.
        return known;
    }
    let is_meshed = is_meshed(&facts.pod, facts.namespace.as_ref()) || has_rules;
    let DesiredPolicies { policies, rejected, ignored } = match desired {
        Ok(desired) => desired,
        Err(error) if is_meshed => return with(Verdict::Rejected, error.to_string()),
        Err(_) => return known,
    };
    if !is_meshed && rejected.is_some() {
        return known;
    }
    // While a setting is invalid, a new pod would not start.
    let desired_hash =
        if rejected.is_none() { policy_hash(policies.iter().map(|(_, policy)| policy)) } else { String::new() };
    let with = |verdict, reason| Assessment { desired: desired_hash.clone(), ..with(verdict, reason) };
    if rejected.is_none() && !has_rules && policies.iter().all(|(_, policy)| policy.is_empty()) {
        return known;
    }
    let follows = follows_changes(facts);
    // An invalid value of the annotation is reported although the next change may be far off.
    let error = rejected.as_ref().or(follows.as_ref().err());
    // A pod that follows no changes does not keep a bypass that is no longer allowed.
    let next = match (follows.as_ref(), *scope) {
        (_, LivePolicyScope::Off) => None,
        (Ok(true), scope) => Some(running.following(facts, policies, scope)),
        (Ok(false) | Err(_), _) => Some(running.tightened(policies)),
    };
    let next = next.filter(|next| !running.has_applied(next));
    let older = if has_rules { Verdict::Older } else { Verdict::None };
    match (error, next) {
        (Some(error), change) => Assessment { change, ..with(Verdict::Rejected, error.to_string()) },
        (None, _) if running.has_applied(policies) => with(Verdict::Current, ignored.clone().unwrap_or_default()),
        (None, Some(next)) => {
            Assessment { change: Some(next), ..with(older, "the change is not applied yet".to_owned()) }
        }
        (None, None) => {
            let rest = changes(&applied_policy(running), &Policy::union_of(policies.iter().map(|(_, policy)| policy)));
            let needs_new_pod = |reason| Assessment { needs_new_pod: true, ..with(older, reason) };
            if follows == Ok(false) {
                needs_new_pod(format!("annotation {LIVE_POLICY:?} is false; only a new pod gets: {rest}"))
            } else if *scope == LivePolicyScope::Off {
                needs_new_pod(format!("the agent's flag --live-policy is off; only a new pod gets: {rest}"))
            } else {
                let reason = format!("only a new pod gets: {rest}; recreate the pod");
                Assessment { is_outdated: has_rules, ..needs_new_pod(reason) }
            }
        }
    }
}

/// Returns the assessment of the pod after its change was applied.
pub(crate) fn assess_changed(input: &Input<'_>, change: &Policies) -> Assessment {
    let mut running = input.running.clone();
    running.interrupted = false;
    for AppliedPolicy { attachment, policy, .. } in &mut running.attachments {
        if let Some((_, changed)) = change.iter().find(|(other, _)| other == attachment) {
            policy.clone_from(changed);
        }
    }
    // A remaining difference would be another change.
    Assessment { change: None, ..assess(&Input { running: &running, ..*input }) }
}

/// Returns the union of the applied policies of a pod.
pub(crate) fn applied_policy(running: &RunningPod) -> Policy {
    Policy::union_of(running.attachments.iter().map(|applied| &applied.policy))
}

/// Returns whether a pod follows changes of its policy. Its own annotation takes precedence over that of its namespace.
///
/// # Errors
/// The annotation is neither `true` nor `false`.
pub(crate) fn follows_changes(facts: &Facts) -> Result<bool, Error> {
    match facts.annotation(LIVE_POLICY) {
        None | Some((_, "true")) => Ok(true),
        Some((_, "false")) => Ok(false),
        Some((object, value)) => {
            let value = excerpt(value);
            let msg = format!("{object}: annotation {LIVE_POLICY:?}: invalid value {value:?}; expected true or false");
            Err(Error::new(Code::InvalidConfig, msg))
        }
    }
}

/// The maximum length of a change in words, in bytes: an Event contains it together with both hashes.
const MAX_WORDS: usize = 800;

/// Returns a policy by its hash, which is empty without rules.
pub(crate) fn policy_name(hash: &str) -> String {
    if hash.is_empty() { "no rules".to_owned() } else { format!("policy {hash}") }
}

/// Returns the differences between two policies in words; empty if none has an effect.
pub(crate) fn changes(before: &Policy, after: &Policy) -> String {
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
    let exclusions = |policy: &Policy| policy.exclusions_in_effect().iter().map(exclusion).collect::<Vec<_>>();
    let containers = |policy: &Policy| policy.containers.iter().map(container).collect::<Vec<_>>();
    for (old, new) in [(exclusions(before), exclusions(after)), (containers(before), containers(after))] {
        words.extend(listed("excluded", new.iter().filter(|one| !old.contains(one))));
        words.extend(listed("no longer excluded", old.iter().filter(|one| !new.contains(one))));
    }
    cut(&words.join("; "), MAX_WORDS).into_owned()
}

fn listed<'a>(title: &str, items: impl Iterator<Item = &'a String>) -> Option<String> {
    let items: Vec<&str> = items.map(String::as_str).collect();
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

fn container(ContainerExclusion { name, scope, until }: &ContainerExclusion) -> String {
    format!("container {name} ({scope} until {until})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::{Namespace, Pod};
    use crate::policy::{BypassEnd, ContainerScope, IdRange, PortRange, Ports, Protocol, Redirect};
    use std::collections::BTreeSet;

    fn follows(of_pod: Option<&str>, of_namespace: Option<&str>) -> Result<bool, String> {
        let annotations = |value: Option<&str>| value.map(|value| (LIVE_POLICY.to_owned(), value.to_owned()));
        let pod = Pod {
            namespace: "shop".into(),
            name: "web-0".into(),
            annotations: annotations(of_pod).into_iter().collect(),
            ..Pod::default()
        };
        let annotations = annotations(of_namespace).into_iter().collect();
        let namespace = Some(Namespace { name: "shop".into(), annotations, ..Namespace::default() });
        follows_changes(&Facts { pod, namespace }).map_err(|error| error.to_string())
    }

    #[test]
    fn the_annotation_of_the_pod_takes_precedence_over_that_of_its_namespace() {
        assert_eq!(follows(None, None), Ok(true));
        assert_eq!(follows(None, Some("false")), Ok(false));
        assert_eq!(follows(Some("true"), Some("false")), Ok(true));
        assert_eq!(follows(Some("false"), Some("true")), Ok(false));
        assert_eq!(follows(Some("true"), Some("maybe")), Ok(true));
        for (error, object) in [
            (follows(Some("no"), None), "pod shop/web-0: annotation \"detour.io/live-policy\": invalid value \"no\""),
            (follows(None, Some("")), "namespace shop: annotation \"detour.io/live-policy\": invalid value \"\""),
        ] {
            let error = error.expect_err("not a boolean");
            assert_eq!(error, format!("{object}; expected true or false"));
        }
    }

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
        after.containers = BTreeSet::from([ContainerExclusion {
            name: "vault".into(),
            scope: ContainerScope::All,
            until: BypassEnd::ProxyReady,
        }]);
        let words = changes(&before, &after);
        for part in [
            "outbound_ports_exclude: 3306, 1-9 (before: 15020)",
            "excluded: every process udp port 53 to 10.96.0.10/32, UID 1000-1999",
            "excluded: container vault (all until proxy-ready)",
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
