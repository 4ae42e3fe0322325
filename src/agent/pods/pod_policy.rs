//! The policy of a pod: when it is evaluated, whether it is changed, and what is reported about it.

use super::limits::{ChangeLimit, MIN_INTERVAL};
use super::rule_check::name;
use super::settings::Tools;
use super::suspicion::suspect;
use super::texts;
use crate::agent::facts::ObservedPod;
use crate::agent::install::Installed;
use crate::agent::pod_reports::PodReports;
use crate::backoff::Backoff;
use crate::cluster::PolicyCondition;
use crate::cni::{Code, Error, NetConf};
use crate::host_path::HostRoot;
use crate::plugin::running::live_policy::{
    Assessment, Input, Policies, RunningPod, Verdict, applied_policy, assess, assess_changed, changes,
};
use crate::pod::{Facts, Namespace};
use crate::policy::{LivePolicyScope, Policy};
use crate::sub_plugins::is_meshed;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pauses after failed changes.
const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// What is known about the policy of a pod.
#[derive(Debug)]
pub(super) struct PodPolicy {
    /// When it is evaluated next; `None` to wait for a change.
    pub(super) due: Option<Instant>,
    last_evaluation: Option<Instant>,
    /// The container (pod sandbox) of the last evaluation.
    pub(super) container_id: Option<String>,
    pub(super) assessment: Assessment,
    limit: ChangeLimit,
    /// The pauses after failed changes, and after evaluations without saved rules.
    backoff: Backoff,
    /// The message of the last Event about a rejected policy.
    rejected: String,
    /// The desired policy of the last Event about an outdated pod.
    outdated: String,
    /// The condition that was sent and may not have been observed yet.
    sent: Option<PolicyCondition>,
    /// Whether it has a sidecar, or is in the ambient mesh.
    is_meshed: bool,
}

/// A change of a pod's policy.
#[derive(Debug)]
pub(super) struct PolicyChange {
    running: RunningPod,
    change: Policies,
    /// The assessment if the change is applied.
    after: Assessment,
    /// The change in words.
    words: String,
}

impl PolicyChange {
    /// Applies the change to the rules.
    ///
    /// # Errors
    /// As [`RunningPod::apply`]: the old rules remain.
    pub(super) fn apply(&self, tools: &Tools) -> Result<(), Error> {
        self.running.apply(tools.node.root(), &self.change)
    }
}

impl PodPolicy {
    /// Creates the state of a new pod.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            due: Some(now),
            last_evaluation: None,
            container_id: None,
            assessment: Assessment::default(),
            limit: ChangeLimit::default(),
            backoff: Backoff::new(MIN_PAUSE, MAX_PAUSE),
            rejected: String::new(),
            outdated: String::new(),
            sent: None,
            is_meshed: false,
        }
    }

    /// Evaluates the policy soon, because an input has changed.
    pub(super) fn changed(&mut self, now: Instant) {
        self.backoff.reset();
        self.wake(now);
    }

    /// Evaluates the policy at `time`, or as soon after it as the minimum interval allows.
    pub(super) fn wake(&mut self, time: Instant) {
        let soon = self.last_evaluation.map_or(time, |last| time.max(last + MIN_INTERVAL));
        self.due = Some(self.due.map_or(soon, |due| due.min(soon)));
    }

    /// Evaluates the policy anew, and sets a condition that another process has changed.
    pub(super) fn resync(&mut self, now: Instant) {
        self.sent = None;
        self.wake(now);
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| due <= now)
    }

    /// Records an evaluation at `now`; the next one follows a change.
    pub(super) const fn evaluated(&mut self, now: Instant) {
        (self.last_evaluation, self.due) = (Some(now), None);
    }

    /// Schedules the next attempt after a growing pause.
    fn retry(&mut self, now: Instant) {
        let pause = self.backoff.pause(now);
        self.wake(now + pause);
    }

    /// Stores an assessment, and reports it: the condition, the metric, and the Events for a policy that is rejected or
    /// outdated, each once.
    fn report(&mut self, assessment: Assessment, observed: &ObservedPod, tools: &Tools) {
        if self.is_newly_rejected(&assessment) && tools.settings.live_policy != LivePolicyScope::Off {
            tools.metrics.policy_change("rejected");
        }
        self.write(assessment, observed, &tools.policy_reports());
    }

    fn is_newly_rejected(&self, assessment: &Assessment) -> bool {
        assessment.verdict == Some(Verdict::Rejected) && self.rejected != assessment.reason
    }

    fn write(&mut self, assessment: Assessment, observed: &ObservedPod, reports: &PodReports) {
        let (pod, name) = (observed.pod.reference(), name(observed));
        let known = self.sent.as_ref().or(observed.policy_condition.as_ref());
        let condition = texts::condition(&assessment, self.is_meshed, known.is_some());
        // An earlier agent has reported it already.
        let is_reported = condition.is_some() && known == condition.as_ref();
        if self.is_newly_rejected(&assessment) {
            self.rejected.clone_from(&assessment.reason);
            let event = texts::rejected(&assessment);
            tracing::warn!(pod = name, "policy rejected: {}", event.message);
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

    /// Records the result of a change.
    pub(super) fn finish_change(
        &mut self,
        change: PolicyChange,
        result: Result<(), Error>,
        observed: &ObservedPod,
        tools: &Tools,
        now: Instant,
    ) {
        let name = name(observed);
        match result {
            Ok(()) => {
                tools.metrics.policy_change("applied");
                self.backoff.reset();
                let event = texts::changed(&self.assessment.applied, &change.after.applied, &change.words);
                tracing::info!(pod = name, "{}", event.message);
                if !change.words.is_empty() {
                    tools.reports.event(&observed.pod.reference(), event);
                }
                self.report(change.after, observed, tools);
            }
            Err(error) if error.code == Code::InvalidConfig => {
                let reason = error.to_string();
                let rejected = Assessment { verdict: Some(Verdict::Rejected), reason, ..self.assessment.clone() };
                self.report(rejected, observed, tools);
            }
            Err(error) => {
                tools.metrics.policy_change("failed");
                let reason = format!("the change failed, and the agent retries: {error}");
                if self.assessment.reason != reason {
                    tracing::warn!(pod = name, "can't change its policy: {error}");
                }
                self.report(Assessment { reason, ..self.assessment.clone() }, observed, tools);
                self.retry(now);
            }
        }
    }
}

/// What the evaluations of all pods that are due share.
pub(super) struct PolicyEvaluation<'a> {
    pub(super) tools: &'a Tools,
    pub(super) installed: &'a [Installed],
    /// The saved state.
    pub(super) sandboxes: Sandboxes,
    /// Whether the observed state of pods and namespaces is current.
    pub(super) is_current: bool,
    pub(super) now: Instant,
}

impl PolicyEvaluation<'_> {
    /// Evaluates a pod. Returns the change to apply.
    pub(super) fn evaluate(
        &self,
        policy: &mut PodPolicy,
        observed: &Arc<ObservedPod>,
        namespace: Option<&Namespace>,
    ) -> Option<PolicyChange> {
        policy.evaluated(self.now);
        policy.is_meshed = is_meshed(&observed.pod, namespace);
        if observed.ending {
            policy.assessment = Assessment::default();
            return None;
        }
        let root = HostRoot::new(self.tools.node.root());
        let sandbox = self.sandboxes.of(observed, &root);
        let container_id = sandbox.map(|sandbox| sandbox.container_id.clone());
        if !self.is_current && (container_id.is_none() || policy.container_id != container_id) {
            // The facts of its ADD may be newer than the cache.
            policy.retry(self.now);
            return None;
        }
        policy.container_id = container_id;
        let Some(running) = sandbox else {
            self.evaluate_without_saved_state(policy, observed, namespace);
            return None;
        };
        // The watch of namespaces wakes this pod.
        let namespace = namespace?;
        let facts = Facts { pod: observed.pod.clone(), namespace: Some(namespace.clone()) };
        let configurations: Vec<&NetConf> = self.installed.iter().map(|installed| &installed.conf).collect();
        let desired = running.desired(self.tools.node.root(), &facts, &configurations);
        let scope = self.tools.settings.live_policy;
        let input = Input { running, facts: &facts, desired: &desired, scope };
        let assessment = assess(&input);
        let Some(change) = assessment.change.clone() else {
            policy.report(assessment, observed, self.tools);
            return None;
        };
        let assessment = Assessment { change: None, ..assessment };
        if let Some(next) = policy.limit.next(self.now) {
            self.defer(policy, observed, assessment, next);
            return None;
        }
        policy.limit.record(self.now);
        policy.assessment = assessment;
        let words = changes(&applied_policy(running), &Policy::union_of(change.iter().map(|(_, policy)| policy)));
        let after = assess_changed(&input, &change);
        Some(PolicyChange { running: running.clone(), change, after, words })
    }

    /// Reports a pod that bypasses the sidecar. A repair or an ADD that adds the rules does not change the pod in the
    /// cluster, so it is evaluated again.
    fn evaluate_without_saved_state(
        &self,
        policy: &mut PodPolicy,
        observed: &Arc<ObservedPod>,
        namespace: Option<&Namespace>,
    ) {
        let suspicion = suspect(self.installed, observed, namespace).map(|(_, suspicion)| suspicion);
        if suspicion.is_some_and(|it| it.redirectable && it.settled) {
            let reason = "no saved rules: the plugin was not called for it, or another tool redirects it".to_owned();
            let none = Assessment { verdict: Some(Verdict::None), reason, ..Assessment::default() };
            policy.report(none, observed, self.tools);
            policy.retry(self.now);
        } else {
            policy.assessment = Assessment::default();
        }
    }

    /// Waits for the rate limit of changes.
    fn defer(&self, policy: &mut PodPolicy, observed: &ObservedPod, assessment: Assessment, next: Instant) {
        policy.wake(next);
        // The text is the same until the change, so that the condition is set once.
        let reason = "its policy changes too often; the next change follows within 10 s".to_owned();
        let waiting = Assessment { reason, ..assessment };
        if next - self.now > MIN_INTERVAL {
            policy.report(waiting, observed, self.tools);
        } else {
            policy.assessment = waiting;
        }
    }
}

/// The pod sandboxes with saved state by the namespaces and names of their pods.
pub(super) struct Sandboxes(BTreeMap<(String, String), Vec<RunningPod>>);

impl Sandboxes {
    pub(super) fn new(running: Vec<RunningPod>) -> Self {
        let mut by_pod: BTreeMap<_, Vec<RunningPod>> = BTreeMap::new();
        for sandbox in running {
            if let Some(pod) = sandbox.pod.clone() {
                by_pod.entry((pod.namespace, pod.name)).or_default().push(sandbox);
            }
        }
        Self(by_pod)
    }

    /// Returns the sandbox of a pod; `None` without saved state. While a previous sandbox is removed, there are two, and
    /// the newer one is the pod's.
    pub(super) fn of(&self, observed: &ObservedPod, root: &HostRoot) -> Option<&RunningPod> {
        let pod = &observed.pod;
        let of_name = self.0.get(&(pod.namespace.clone(), pod.name.clone())).into_iter().flatten();
        let of_pod = of_name.filter(|running| running.pod.as_ref().is_some_and(|named| pod.matches(named)));
        let present = of_pod.filter(|running| running.is_present(root));
        present.max_by_key(|running| running.added_since_boot())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::{Container, Pod};

    fn rejected() -> Assessment {
        Assessment {
            verdict: Some(Verdict::Rejected),
            has_rules: true,
            applied: "3f2a00000000".into(),
            reason: "invalid value".into(),
            ..Assessment::default()
        }
    }

    /// Returns the Events of a new agent about a rejected pod with this condition.
    fn events(policy_condition: Option<PolicyCondition>) -> Vec<String> {
        let proxy = Container { name: "istio-proxy".into(), ..Container::default() };
        let pod = Pod { containers: vec![proxy], ..Pod::default() };
        let observed = ObservedPod { pod, policy_condition, ..ObservedPod::default() };
        let (reports, mut policy) = (PodReports::new(), PodPolicy::new(Instant::now()));
        policy.is_meshed = true;
        policy.write(rejected(), &observed, &reports);
        policy.write(rejected(), &observed, &reports);
        reports.waiting_events()
    }

    #[test]
    fn a_refusal_that_an_earlier_agent_reported_has_no_second_event() {
        let reported = texts::condition(&rejected(), true, false);
        assert_eq!(events(reported.clone()), [""; 0]);
        assert_eq!(events(None), ["DetourPolicyRejected"]);
        let other = reported.map(|it| PolicyCondition { message: "policy 3f2a00000000: other".into(), ..it });
        assert_eq!(events(other), ["DetourPolicyRejected"]);
    }
}
