//! The state of a pod between two checks: when it is due, its failed reads, and its attempts.

use super::decision::Cause;
use super::retry_budget::RetryBudget;
use crate::agent::facts::ObservedPod;
use crate::cni::{Code, Error};
use crate::netns::find::FoundNetns;
use crate::netns::{NetNs, NetnsId};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The minimum time between two checks of a pod that changes often, as in a crash loop.
const MIN_INTERVAL: Duration = Duration::from_secs(5);
/// The pause after a failure to read the rules, doubled after each further one in a row.
const MIN_PAUSE: Duration = Duration::from_secs(15);
const MAX_PAUSE: Duration = Duration::from_secs(600);
/// The number of failures in a row after which one that may be temporary gets an Event.
const FAILURES_BEFORE_EVENT: u32 = 5;
/// The minimum time between two Events about such failures.
const EVENT_INTERVAL: Duration = Duration::from_secs(3600);

/// The state of a pod.
#[derive(Debug)]
pub(super) struct WatchedPod {
    /// The last observed state in the cluster.
    pub(super) observed: Arc<ObservedPod>,
    /// The time of the next check; `None` to wait for a change.
    pub(super) due: Option<Instant>,
    last_check: Option<Instant>,
    /// The first of the uninterrupted checks that found a cause for a repair.
    suspected_since: Option<Instant>,
    pub(super) retries: RetryBudget,
    pub(super) location: Option<NetnsLocation>,
    /// The last logged failure to read the rules.
    logged: Option<String>,
    /// The number of failures in a row.
    failures: u32,
    /// The end of the pause after a failure, which a change of the pod does not shorten.
    not_before: Option<Instant>,
    /// The time of the last Event about a failure.
    last_event: Option<Instant>,
}

/// The network namespace of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NetnsLocation {
    pub(super) netns: PathBuf,
    pub(super) id: NetnsId,
    pub(super) container_id: String,
}

impl NetnsLocation {
    /// Returns the location of a network namespace; `None` if its container is unknown.
    pub(super) fn of(found: &FoundNetns) -> Option<Self> {
        let id = NetNs::open(&found.netns).ok().flatten()?.id();
        Some(Self { netns: found.netns.clone(), id, container_id: found.container_id.clone()? })
    }

    /// Whether the path still leads to the same network namespace.
    pub(super) fn exists(&self) -> bool {
        NetNs::open(&self.netns).is_ok_and(|netns| netns.is_some_and(|netns| netns.id() == self.id))
    }
}

impl WatchedPod {
    /// Creates the state of a new pod.
    pub(super) fn new(observed: Arc<ObservedPod>, due: Instant) -> Self {
        let retries = RetryBudget::default();
        Self {
            observed,
            due: Some(due),
            last_check: None,
            suspected_since: None,
            retries,
            location: None,
            logged: None,
            failures: 0,
            not_before: None,
            last_event: None,
        }
    }

    /// Updates the observed state. A pod that has changed is checked soon, unless the change is the condition that the
    /// agent sets.
    pub(super) fn update(&mut self, observed: &Arc<ObservedPod>, now: Instant) {
        if Arc::ptr_eq(&self.observed, observed) {
            return;
        }
        let old = std::mem::replace(&mut self.observed, Arc::clone(observed));
        if !old.differs_only_in_condition(observed) {
            let soon = self.last_check.map_or(now, |last| now.max(last + MIN_INTERVAL));
            let soon = self.not_before.map_or(soon, |not_before| soon.max(not_before));
            self.due = Some(self.due.map_or(soon, |due| due.min(soon)));
        }
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| due <= now)
    }

    /// Records a check that found `cause`. The next one is due after `interval`, or sooner for a repair. Returns whether
    /// the pod is repaired now: a pod without rules must be so for `grace`.
    pub(super) fn record_check(
        &mut self,
        cause: Option<Cause>,
        interval: Option<Duration>,
        grace: Duration,
        now: Instant,
    ) -> bool {
        self.last_check = Some(now);
        self.due = interval.map(|interval| now + interval);
        let Some(cause) = cause else {
            self.suspected_since = None;
            return false;
        };
        let since = *self.suspected_since.get_or_insert(now);
        if cause == Cause::NoRules && now < since + grace {
            self.due = Some(since + grace);
            return false;
        }
        let is_allowed = self.retries.allows(now);
        if !is_allowed {
            self.wake(self.retries.next());
        }
        is_allowed
    }

    /// Schedules no check until the pod changes.
    pub(super) fn rest(&mut self) {
        (self.due, self.suspected_since) = (None, None);
    }

    /// Schedules a check at `time` at the latest.
    pub(super) fn wake(&mut self, time: Option<Instant>) {
        self.due = self.due.into_iter().chain(time).min();
    }

    /// Records whether the rules could be read. The pod's own processes can cause failures of some kinds; after these the
    /// pauses grow, so that such a pod does not take the time of others.
    pub(super) fn record_read(&mut self, error: Option<&Error>, now: Instant) {
        let is_its_own = error.is_some_and(|error| matches!(error.code, Code::TryAgain | Code::ForeignRules));
        self.failures = if is_its_own { self.failures.saturating_add(1) } else { 0 };
        self.not_before = is_its_own.then(|| now + (MIN_PAUSE * 2_u32.pow(self.failures.min(10) - 1)).min(MAX_PAUSE));
    }

    /// Schedules the next check after the pause, if there is one.
    pub(super) fn postpone(&mut self) {
        self.due = self.not_before.or(self.due);
    }

    /// Whether the failure to read the rules gets an Event.
    pub(super) fn needs_event(&mut self, error: Option<&Error>, now: Instant) -> bool {
        let has_too_many_rules = error.is_some_and(|error| error.code == Code::ForeignRules);
        let is_due = self.last_event.is_none_or(|last| now.duration_since(last) >= EVENT_INTERVAL);
        let needs_event = (has_too_many_rules || self.failures >= FAILURES_BEFORE_EVENT) && is_due;
        if needs_event {
            self.last_event = Some(now);
        }
        needs_event
    }

    /// Logs a failure to read the rules, once until it changes.
    pub(super) fn log_failure(&mut self, error: Option<&Error>) {
        let error = error.map(ToString::to_string);
        if let Some(message) = error.as_ref().filter(|_| error != self.logged) {
            let pod = &self.observed.pod;
            tracing::warn!("pod {}/{}: can't read its rules: {message}", pod.namespace, pod.name);
        }
        self.logged = error;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::PolicyCondition;

    const SECOND: Duration = Duration::from_secs(1);
    const GRACE: Duration = Duration::from_secs(3);
    const MINUTE: Option<Duration> = Some(Duration::from_secs(60));

    #[test]
    fn a_pod_that_changes_often_is_checked_at_the_minimum_interval() {
        let (now, observed) = (Instant::now(), Arc::new(ObservedPod::default()));
        let mut watched = WatchedPod::new(Arc::clone(&observed), now);
        assert!(watched.is_due(now) && !watched.record_check(None, MINUTE, GRACE, now));
        watched.update(&observed, now + SECOND);
        assert!(!watched.is_due(now + 59 * SECOND) && watched.is_due(now + 60 * SECOND));
        for second in 1..4 {
            watched.update(&Arc::new(ObservedPod::default()), now + second * SECOND);
        }
        assert!(!watched.is_due(now + 4 * SECOND) && watched.is_due(now + MIN_INTERVAL));
    }

    #[test]
    fn the_condition_that_the_agent_sets_is_no_reason_for_a_check() {
        let now = Instant::now();
        let with = |version: &str, current: bool, ending: bool| {
            let message = String::new();
            let condition = PolicyCondition { is_current: current, reason: "Current".into(), message };
            let policy_condition = Some(condition);
            Arc::new(ObservedPod {
                resource_version: version.into(),
                policy_condition,
                ending,
                ..ObservedPod::default()
            })
        };
        let mut watched = WatchedPod::new(with("1", false, false), now);
        watched.record_check(None, MINUTE, GRACE, now);
        watched.update(&with("2", true, false), now);
        assert!(!watched.is_due(now + MIN_INTERVAL));
        watched.update(&with("3", true, false), now);
        assert!(watched.is_due(now + MIN_INTERVAL), "another part of the object has changed");
        watched.record_check(None, MINUTE, GRACE, now);
        watched.update(&with("4", false, true), now);
        assert!(watched.is_due(now + MIN_INTERVAL), "so has the pod");
    }

    #[test]
    fn a_pod_whose_rules_can_not_be_read_is_checked_at_growing_intervals_even_if_it_changes() {
        let (start, error) = (Instant::now(), Error::new(Code::ForeignRules, "too many rules"));
        let (mut watched, mut now, mut pauses) = (WatchedPod::new(Arc::default(), start), start, Vec::new());
        for _ in 0..8 {
            watched.record_read(Some(&error), now);
            watched.record_check(None, MINUTE, GRACE, now);
            watched.postpone();
            watched.update(&Arc::new(ObservedPod::default()), now + SECOND);
            let next = watched.due.expect("it is checked again");
            pauses.push((next - now).as_secs());
            now = next;
        }
        assert_eq!(pauses, [15, 30, 60, 120, 240, 480, 600, 600]);
        watched.record_read(None, now);
        watched.record_check(None, MINUTE, GRACE, now);
        watched.postpone();
        assert_eq!(watched.due, Some(now + 60 * SECOND));
    }

    #[test]
    fn a_failure_to_read_the_rules_gets_one_event_per_hour() {
        let (now, hour) = (Instant::now(), Duration::from_secs(3600));
        let (many, busy) = (Error::new(Code::ForeignRules, "too many"), Error::new(Code::TryAgain, "busy"));
        let mut watched = WatchedPod::new(Arc::default(), now);
        assert!(!watched.needs_event(None, now));
        assert!(watched.needs_event(Some(&many), now) && !watched.needs_event(Some(&many), now + SECOND));
        assert!(watched.needs_event(Some(&many), now + hour));
        let mut watched = WatchedPod::new(Arc::default(), now);
        let reports = (0..6).filter(|_| {
            watched.record_read(Some(&busy), now);
            watched.needs_event(Some(&busy), now)
        });
        assert_eq!(reports.count(), 1, "after several times in a row");
    }

    #[test]
    fn a_pod_without_rules_is_repaired_after_the_grace_period() {
        let now = Instant::now();
        let mut watched = WatchedPod::new(Arc::default(), now);
        assert!(!watched.record_check(Some(Cause::NoRules), None, GRACE, now) && watched.is_due(now + GRACE));
        assert!(!watched.record_check(None, None, GRACE, now + SECOND), "a runtime was setting it up");
        assert!(!watched.record_check(Some(Cause::NoRules), None, GRACE, now + GRACE));
        assert!(watched.record_check(Some(Cause::NoRules), None, GRACE, now + 2 * GRACE));
        assert!(watched.record_check(Some(Cause::Drift), None, GRACE, now + 2 * GRACE), "drift is repaired at once");
    }
}
