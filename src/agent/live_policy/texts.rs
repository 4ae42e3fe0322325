//! The Events and the condition of a pod's policy.

use crate::cluster::{Event, PolicyCondition};
use crate::plugin::live_policy::{Assessment, Verdict, policy_name};
use crate::printable::{cut, line};

/// The maximum length of a condition's message in bytes, as of an Event's.
const MAX_MESSAGE: usize = 1024;

/// Returns the Event for a change that was applied.
pub(super) fn changed(before: &str, after: &str, words: &str) -> Event {
    let message = format!("{} replaces {}: {words}", policy_name(after), policy_name(before));
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

/// Returns the condition of a pod; `None` if it has no sidecar, or neither rules nor a condition. A pod that has lost its
/// rules must not keep the condition of its earlier ones. Its message has the length and the characters that the API
/// server gets, so that it compares with the one that the API server returns.
pub(super) fn condition(assessment: &Assessment, has_sidecar: bool, has_condition: bool) -> Option<PolicyCondition> {
    if !has_sidecar || !(assessment.has_rules || has_condition) {
        return None;
    }
    let verdict = match assessment.verdict {
        // The pod has no rules, and needs none.
        None if !assessment.has_rules => Verdict::Current,
        verdict => verdict?,
    };
    let reason = match verdict {
        Verdict::Current => "Current",
        Verdict::Refused => "Refused",
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
        assert_eq!(condition(&with(Some(Verdict::Refused), false), true, false), None);
        assert_eq!(condition(&with(None, true), true, false), None);
        assert_eq!(condition(&with(Some(Verdict::None), false), true, false), None);
    }

    #[test]
    fn a_pod_without_rules_does_not_keep_an_earlier_condition() {
        let with = |verdict| Assessment { verdict, ..Assessment::default() };
        let of = |verdict| condition(&with(verdict), true, true).map(|it| (it.is_current, it.reason, it.message));
        assert_eq!(of(Some(Verdict::None)), Some((false, "NoRules".into(), "no rules".into())));
        assert_eq!(of(Some(Verdict::Refused)), Some((false, "Refused".into(), "no rules".into())));
        assert_eq!(of(None), Some((true, "Current".into(), "no rules".into())));
        assert_eq!(condition(&with(Some(Verdict::None)), false, true), None);
    }

    /// Otherwise, the agent would set the condition again after each start.
    #[test]
    fn the_message_is_as_the_api_server_gets_it() {
        let reason = format!("invalid value {:?} and \u{1b}[2J {}", "a\nb", "long ".repeat(400));
        let refused = Assessment {
            verdict: Some(Verdict::Refused),
            has_rules: true,
            applied: "3f2a00000000".into(),
            reason,
            ..Assessment::default()
        };
        let PolicyCondition { is_current, reason, message } = condition(&refused, true, false).expect("one");
        assert!(!is_current && reason == "Refused" && message.starts_with("policy 3f2a00000000: invalid value"));
        assert!(message.len() <= MAX_MESSAGE && !message.contains('\u{1b}'), "{message}");
        assert_eq!(cut(&line(&message), MAX_MESSAGE), message, "it is stable");
    }
}
