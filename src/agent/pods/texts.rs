//! The Events and the condition of a pod.

use super::repair::RepairOutcome;
use super::suspicion::Cause;
use crate::cluster::{Event, PolicyCondition};
use crate::cni::Error;
use crate::plugin::running::live_policy::{Assessment, Verdict, policy_name};
use crate::printable::{cut, line};

/// The maximum length of a condition's message in bytes, as of an Event's.
const MAX_MESSAGE: usize = 1024;

/// Returns the Event for a pod whose rules can't be read.
pub(super) fn unreadable_rules(error: &Error) -> Event {
    let message = format!("can't read the pod's rules, so drift is not repaired: {error}");
    Event { warning: true, reason: "DetourRulesUnreadable".into(), message }
}

/// Returns the Event for the outcome of a repair; `None` if nothing happened.
pub(super) fn repaired(cause: Cause, outcome: &RepairOutcome) -> Option<Event> {
    let (warning, reason, message) = match outcome {
        RepairOutcome::NothingToDo => return None,
        RepairOutcome::Repaired => {
            (false, "DetourRepaired", format!("traffic is redirected to the sidecar again: {cause}"))
        }
        RepairOutcome::RepairedForNew { older } => {
            let (connections, bypass, they) = if *older == 1 {
                ("connection", "bypasses", "it closes")
            } else {
                ("connections", "bypass", "they close")
            };
            let message = format!(
                "new connections are captured again: {cause}; {older} TCP {connections} that existed \
                 before still {bypass} the sidecar until {they}; recreate the pod to capture them"
            );
            (true, "DetourRepaired", message)
        }
        RepairOutcome::Deleted => (true, "DetourDeleted", format!("deleted, so that a new pod is redirected: {cause}")),
        RepairOutcome::Labelled => (true, "DetourLabelled", format!("labeled, not repaired: {cause}")),
        RepairOutcome::Failed(error) => (true, "DetourRepairFailed", format!("repair failed: {cause}; {error}")),
    };
    Some(Event { warning, reason: reason.into(), message })
}

/// Returns the Event for a change that was applied.
pub(super) fn changed(before: &str, after: &str, words: &str) -> Event {
    let message = format!("{} replaces {}: {words}", policy_name(after), policy_name(before));
    Event { warning: false, reason: "DetourPolicyChanged".into(), message }
}

/// Returns the Event for a policy that is rejected. The pod keeps its rules.
pub(super) fn rejected(assessment: &Assessment) -> Event {
    let message = format!("{}; {}", assessment.reason, kept(&assessment.applied));
    Event { warning: true, reason: "DetourPolicyRejected".into(), message }
}

/// Returns the Event for a policy of which a part needs a new pod.
pub(super) fn outdated(assessment: &Assessment) -> Event {
    let Assessment { applied, desired, reason, .. } = assessment;
    let message = format!("policy {applied} is not current, the current one is {desired}: {reason}");
    Event { warning: false, reason: "DetourPolicyOutdated".into(), message }
}

/// Returns the condition of a pod; `None` if it has none and is not in the mesh, or has no rules. A pod that has lost its
/// rules must not keep the condition of its earlier ones. Its message has the length and the characters that the API
/// server gets, so that it compares with the one that the API server returns.
pub(super) fn condition(assessment: &Assessment, is_meshed: bool, has_condition: bool) -> Option<PolicyCondition> {
    let has_left = !is_meshed && assessment.verdict.is_none();
    if !(has_condition && (is_meshed || has_left) || is_meshed && assessment.has_rules) {
        return None;
    }
    let verdict = match assessment.verdict {
        // The pod has no rules, and needs none.
        None if !assessment.has_rules => Verdict::Current,
        verdict => verdict?,
    };
    let reason = match verdict {
        Verdict::Current => "Current",
        Verdict::Rejected => "Rejected",
        Verdict::Older => "Older",
        Verdict::None => "NoRules",
    };
    let mut message = policy_name(&assessment.applied);
    if !assessment.reason.is_empty() {
        message += &format!(": {}", assessment.reason);
    }
    let message = cut(&line(&message), MAX_MESSAGE).into_owned();
    Some(PolicyCondition { is_current: verdict == Verdict::Current, reason: reason.into(), message })
}

fn kept(applied: &str) -> String {
    if applied.is_empty() { "the pod has no rules".to_owned() } else { format!("the pod keeps policy {applied}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pod_with_a_sidecar_and_rules_has_a_condition() {
        let with = |verdict, has_rules| Assessment {
            verdict,
            has_rules,
            applied: "3f2a00000000".into(),
            ..Assessment::default()
        };
        let current = with(Some(Verdict::Current), true);
        let expected =
            PolicyCondition { is_current: true, reason: "Current".into(), message: "policy 3f2a00000000".into() };
        assert_eq!(condition(&current, true, false), Some(expected));
        assert_eq!(condition(&current, false, false), None);
        assert_eq!(condition(&with(Some(Verdict::Rejected), false), true, false), None);
        assert_eq!(condition(&with(None, true), true, false), None);
        assert_eq!(condition(&with(Some(Verdict::None), false), true, false), None);
    }

    #[test]
    fn a_pod_without_rules_does_not_keep_an_earlier_condition() {
        let with = |verdict| Assessment { verdict, ..Assessment::default() };
        let of = |verdict| condition(&with(verdict), true, true).map(|it| (it.is_current, it.reason, it.message));
        assert_eq!(of(Some(Verdict::None)), Some((false, "NoRules".into(), "no rules".into())));
        assert_eq!(of(Some(Verdict::Rejected)), Some((false, "Rejected".into(), "no rules".into())));
        assert_eq!(of(None), Some((true, "Current".into(), "no rules".into())));
        assert_eq!(condition(&with(Some(Verdict::None)), false, true), None);
    }

    /// Otherwise, the agent would set the condition again after each start.
    #[test]
    fn the_message_is_as_the_api_server_gets_it() {
        let reason = format!("invalid value {:?} and \u{1b}[2J {}", "a\nb", "long ".repeat(400));
        let rejected = Assessment {
            verdict: Some(Verdict::Rejected),
            has_rules: true,
            applied: "3f2a00000000".into(),
            reason,
            ..Assessment::default()
        };
        let PolicyCondition { is_current, reason, message } = condition(&rejected, true, false).expect("one");
        assert!(!is_current && reason == "Rejected" && message.starts_with("policy 3f2a00000000: invalid value"));
        assert!(message.len() <= MAX_MESSAGE && !message.contains('\u{1b}'), "{message}");
        assert_eq!(cut(&line(&message), MAX_MESSAGE), message, "it is stable");
    }
}
