//! The state of a pod between two evaluations.

use super::change_limit::{ChangeLimit, MIN_INTERVAL};
use super::texts;
use crate::agent::facts::ObservedPod;
use crate::agent::pod_reports::PodReports;
use crate::cluster::PolicyCondition;
use crate::plugin::live_policy::{Assessment, Verdict};
use crate::pod::{Namespace, PodRef};
use std::collections::VecDeque;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause after a failed change, doubled after each further one in a row.
const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The number of messages of which each is reported once.
const MAX_MESSAGES: usize = 16;

/// A pod of the node.
pub(super) struct TrackedPod {
    pub(super) observed: Arc<ObservedPod>,
    pub(super) namespace: Option<Arc<Namespace>>,
    /// When it is evaluated next; `None` to wait for a change.
    pub(super) due: Option<Instant>,
    last_evaluation: Option<Instant>,
    /// The container (pod sandbox) of the last evaluation.
    pub(super) container_id: Option<String>,
    pub(super) assessment: Assessment,
    pub(super) limit: ChangeLimit,
    /// The number of failed changes in a row, or of evaluations without saved rules.
    failures: u32,
    /// Whether a thread changes it now.
    pub(super) is_changing: bool,
    /// The hashes of the last messages of refused policies.
    refused: VecDeque<u64>,
    /// The desired policy of the last Event about an outdated pod.
    outdated: String,
    /// The condition that was sent and may not have been observed yet.
    sent: Option<PolicyCondition>,
}

impl TrackedPod {
    /// Creates the state of a new pod.
    pub(super) fn new(observed: Arc<ObservedPod>, now: Instant) -> Self {
        Self {
            observed,
            namespace: None,
            due: Some(now),
            last_evaluation: None,
            container_id: None,
            assessment: Assessment::default(),
            limit: ChangeLimit::default(),
            failures: 0,
            is_changing: false,
            refused: VecDeque::new(),
            outdated: String::new(),
            sent: None,
        }
    }

    /// Updates the observed states. The pod is due if a part that decides about its policy has changed, or if its sandbox
    /// may have.
    pub(super) fn update(&mut self, observed: &Arc<ObservedPod>, namespace: Option<Arc<Namespace>>, now: Instant) {
        let mut has_changed = false;
        if !Arc::ptr_eq(&self.observed, observed) {
            let old = std::mem::replace(&mut self.observed, Arc::clone(observed));
            has_changed |= (old.ending, &old.addresses) != (observed.ending, &observed.addresses);
            has_changed |= old.pod != observed.pod;
        }
        let is_same = match (&self.namespace, &namespace) {
            (Some(old), Some(new)) => Arc::ptr_eq(old, new) || old == new,
            (old, new) => old.is_none() && new.is_none(),
        };
        has_changed |= !is_same;
        self.namespace = namespace;
        if has_changed {
            self.failures = 0;
            self.wake(now);
        }
    }

    /// Evaluates the pod at `time`, or as soon after it as the minimum interval allows.
    pub(super) fn wake(&mut self, time: Instant) {
        let soon = self.last_evaluation.map_or(time, |last| time.max(last + MIN_INTERVAL));
        self.due = Some(self.due.map_or(soon, |due| due.min(soon)));
    }

    /// Evaluates the pod anew, and sets a condition that another process has changed.
    pub(super) fn resync(&mut self, now: Instant) {
        self.sent = None;
        self.wake(now);
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        !self.is_changing && self.due.is_some_and(|due| due <= now)
    }

    /// Records an evaluation at `now`; the next one follows a change.
    pub(super) fn evaluated(&mut self, now: Instant) {
        (self.last_evaluation, self.due) = (Some(now), None);
    }

    /// Schedules the next attempt after a growing pause.
    pub(super) fn retry(&mut self, now: Instant) {
        let pause = (MIN_PAUSE * 2_u32.pow(self.failures.min(10))).min(MAX_PAUSE);
        self.failures = self.failures.saturating_add(1);
        self.wake(now + pause);
    }

    /// Records a change that was applied.
    pub(super) const fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// Returns the pod for reports.
    pub(super) fn pod_ref(&self) -> PodRef {
        let pod = &self.observed.pod;
        PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.clone() }
    }

    /// Stores an assessment, and reports it: the condition, and the Events for a policy that is refused or outdated,
    /// each once.
    pub(super) fn report(&mut self, assessment: Assessment, reports: &PodReports) {
        let pod = self.pod_ref();
        let name = format!("{}/{}", pod.namespace, pod.name);
        let is_refused_anew = assessment.verdict == Some(Verdict::Refused) && self.is_new_message(&assessment.reason);
        let known = self.sent.as_ref().or(self.observed.policy_condition.as_ref());
        let condition = texts::condition(&assessment, self.observed.pod.proxy().is_some(), known.is_some());
        // An earlier agent has reported it already.
        let is_reported = condition.is_some() && known == condition.as_ref();
        if is_refused_anew {
            let event = texts::refused(&assessment);
            tracing::warn!(pod = name, "policy refused: {}", event.message);
            if !is_reported {
                reports.event(&pod, event);
            }
        }
        if assessment.is_outdated && self.outdated != assessment.desired {
            self.outdated.clone_from(&assessment.desired);
            if !is_reported {
                let event = texts::outdated(&assessment);
                tracing::info!(pod = name, "{}", event.message);
                reports.event(&pod, event);
            }
        }
        if let Some(condition) = condition.filter(|condition| known != Some(condition)) {
            let has_changed_status = known.is_none_or(|known| known.is_current != condition.is_current);
            reports.condition(&pod, condition.clone(), has_changed_status);
            self.sent = Some(condition);
        }
        self.assessment = assessment;
    }

    fn is_new_message(&mut self, message: &str) -> bool {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(message);
        if self.refused.contains(&hash) {
            return false;
        }
        if self.refused.len() == MAX_MESSAGES {
            self.refused.pop_front();
        }
        self.refused.push_back(hash);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::{Container, Pod};

    fn refused() -> Assessment {
        Assessment {
            verdict: Some(Verdict::Refused),
            has_rules: true,
            applied: "3f2a00000000".into(),
            reason: "invalid value".into(),
            ..Assessment::default()
        }
    }

    /// Returns the Events of a new agent about a refused pod with this condition.
    fn events(policy_condition: Option<PolicyCondition>) -> Vec<String> {
        let proxy = Container { name: "istio-proxy".into(), ..Container::default() };
        let pod = Pod { containers: vec![proxy], ..Pod::default() };
        let observed = ObservedPod { pod, policy_condition, ..ObservedPod::default() };
        let reports = PodReports::new();
        let mut pod = TrackedPod::new(Arc::new(observed), Instant::now());
        pod.report(refused(), &reports);
        pod.report(refused(), &reports);
        reports.waiting_events()
    }

    #[test]
    fn a_refusal_that_an_earlier_agent_reported_has_no_second_event() {
        let reported = texts::condition(&refused(), true, false);
        assert_eq!(events(reported.clone()), [""; 0]);
        assert_eq!(events(None), ["DetourPolicyRefused"]);
        let other = reported.map(|it| PolicyCondition { message: "policy 3f2a00000000: other".into(), ..it });
        assert_eq!(events(other), ["DetourPolicyRefused"]);
    }
}
