//! The Events and the condition of a pod's policy.

use crate::cluster::{Event, PolicyCondition};
use crate::plugin::live_policy::{Assessment, Verdict};
use crate::printable::{cut, line};

/// The maximum length of a condition's message in bytes, as of an Event's.
const MAX_MESSAGE: usize = 1024;

/// Returns the Event for a change that was applied.
pub(super) fn changed(before: &str, after: &str, words: &str) -> Event {
    let of = |hash: &str| if hash.is_empty() { "no rules".to_owned() } else { format!("policy {hash}") };
    let message = format!("{} replaces {}: {words}", of(after), of(before));
    Event { warning: false, reason: "DetourPolicyChanged".into(), message }
}

/// Returns the Event for a policy that is refused. The pod keeps its rules.
pub(super) fn refused(assessment: &Assessment) -> Event {
    let message = format!("{}; {}", assessment.reason, kept(&assessment.applied));
    Event { warning: true, reason: "DetourPolicyRefused".into(), message }
}

/// Returns the Event for a policy of which a part needs a new pod.
pub(super) fn outdated(assessment: &Assessment) -> Event {
    let Assessment { applied, desired, reason, .. } = assessment;
    let message = format!("policy {applied} is not current, the current one is {desired}: {reason}");
    Event { warning: false, reason: "DetourPolicyOutdated".into(), message }
}

/// Returns the condition of a pod; `None` if it has no rules or no sidecar. Its message has the length and the
/// characters that the API server gets, so that it compares with the one that the API server returns.
pub(super) fn condition(assessment: &Assessment, has_sidecar: bool) -> Option<PolicyCondition> {
    let verdict = assessment.verdict.filter(|_| assessment.has_rules && has_sidecar)?;
    let reason = match verdict {
        Verdict::Current => "Current",
        Verdict::Refused => "Refused",
        Verdict::Older | Verdict::None => "Older",
    };
    let mut message = format!("policy {}", assessment.applied);
    if !assessment.reason.is_empty() {
        message += &format!(": {}", assessment.reason);
    }
    let message = cut(&line(&message), MAX_MESSAGE).into_owned();
    Some(PolicyCondition { is_current: verdict == Verdict::Current, reason: reason.into(), message })
}

fn kept(applied: &str) -> String {
    if applied.is_empty() { "the pod has no rules".to_owned() } else { format!("the pod keeps policy {applied}") }
}
