//! A pod of the node: its observed state, and what is known about its policy and its rules.

use super::pod_policy::PodPolicy;
use super::pod_rules::PodRules;
use crate::agent::facts::ObservedPod;
use crate::pod::Namespace;
use std::sync::Arc;
use std::time::Instant;

/// A pod of the node.
#[derive(Debug)]
pub(super) struct TrackedPod {
    pub(super) observed: Arc<ObservedPod>,
    pub(super) namespace: Option<Arc<Namespace>>,
    pub(super) policy: PodPolicy,
    /// `None` while they are checked, or if the agent does not repair pods.
    pub(super) rules: Option<PodRules>,
    /// Whether a job changes or checks its rules now.
    pub(super) is_busy: bool,
    /// Whether it has changed since that job began.
    has_changed: bool,
}

impl TrackedPod {
    /// Creates the state of a new pod.
    pub(super) fn new(observed: Arc<ObservedPod>, is_repaired: bool, now: Instant) -> Self {
        Self {
            observed,
            namespace: None,
            policy: PodPolicy::new(now),
            rules: is_repaired.then(|| PodRules::new(now)),
            is_busy: false,
            has_changed: false,
        }
    }

    /// Updates the observed states. The policy is due if a part that decides about it has changed, or if the pod sandbox
    /// may have. The rules are due after every change, except that of the condition that the agent sets.
    pub(super) fn update(&mut self, observed: &Arc<ObservedPod>, namespace: Option<Arc<Namespace>>, now: Instant) {
        let mut has_policy_changed = self.namespace != namespace;
        self.namespace = namespace;
        if !Arc::ptr_eq(&self.observed, observed) {
            let old = std::mem::replace(&mut self.observed, Arc::clone(observed));
            has_policy_changed |=
                (old.ending, &old.addresses, &old.pod) != (observed.ending, &observed.addresses, &observed.pod);
            if !old.differs_only_in_condition(observed) {
                self.has_changed = true;
            }
        }
        if has_policy_changed {
            self.policy.changed(now);
        }
        self.check_rules_after_change(now);
    }

    /// Ends a job. `rules` are those that it has checked.
    pub(super) fn finish_job(&mut self, rules: Option<PodRules>, now: Instant) {
        self.is_busy = false;
        self.rules = rules.or(self.rules.take());
        self.check_rules_after_change(now);
    }

    /// Checks its rules soon.
    pub(super) fn check_soon(&mut self, now: Instant) {
        self.has_changed = true;
        self.check_rules_after_change(now);
    }

    fn check_rules_after_change(&mut self, now: Instant) {
        if let Some(rules) = &mut self.rules
            && std::mem::take(&mut self.has_changed)
        {
            rules.changed(now);
        }
    }

    /// Returns when the pod is due; `None` to wait for a change.
    pub(super) fn due(&self) -> Option<Instant> {
        let rules = self.rules.as_ref().and_then(|rules| rules.due);
        self.policy.due.into_iter().chain(rules).min().filter(|_| !self.is_busy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::PolicyCondition;
    use std::time::Duration;

    #[test]
    fn the_condition_that_the_agent_sets_is_no_reason_for_a_check() {
        let now = Instant::now();
        let with = |version: &str, is_current: bool, ending: bool| {
            let condition = PolicyCondition { is_current, reason: "Current".into(), message: String::new() };
            let policy_condition = Some(condition);
            Arc::new(ObservedPod {
                resource_version: version.into(),
                policy_condition,
                ending,
                ..ObservedPod::default()
            })
        };
        let mut pod = TrackedPod::new(with("1", false, false), true, now);
        let mut is_due_after = |observed: Arc<ObservedPod>| {
            let rules = pod.rules.as_mut().expect("repaired");
            rules.record_check(None, Duration::from_secs(60), Duration::ZERO, now);
            pod.policy.evaluated(now);
            pod.update(&observed, None, now);
            (pod.rules.as_ref().is_some_and(|rules| rules.due < Some(now + Duration::from_secs(9))), pod.policy.due)
        };
        assert_eq!(is_due_after(with("2", true, false)), (false, None));
        assert_eq!(is_due_after(with("3", true, false)), (true, None), "another part of the object has changed");
        let (rules, policy) = is_due_after(with("4", false, true));
        assert!(rules && policy.is_some(), "so has the pod");
    }

    #[test]
    fn a_change_during_a_job_is_checked_after_it() {
        let now = Instant::now();
        let mut pod = TrackedPod::new(Arc::default(), true, now);
        let mut rules = pod.rules.take().expect("repaired");
        pod.is_busy = true;
        pod.update(&Arc::new(ObservedPod { resource_version: "2".into(), ..ObservedPod::default() }), None, now);
        assert_eq!(pod.due(), None);
        rules.rest();
        pod.policy.evaluated(now);
        pod.finish_job(Some(rules), now);
        assert_eq!(pod.due(), Some(now));
    }
}
