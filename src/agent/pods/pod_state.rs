//! The state of a pod between two passes: failures, attempts to repair it, and what was reported.

use super::limits::{Attempts, ChangeLimit, MIN_INTERVAL};
use super::suspicion::Cause;
use crate::backoff::Backoff;
use crate::cni::{Code, Error};
use crate::firewall::Rejected;
use crate::netns::find::FoundNetns;
use crate::netns::{NetNs, NetnsId};
use crate::pod::PodRef;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The minimum time between two comparisons of the live rules of a pod that changes often, as in a crash loop.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The pauses after failures.
const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(600);
/// The longest pause after failures that the pod's own processes can't cause.
const MAX_PAUSE_OF_NODE: Duration = Duration::from_secs(60);
/// The number of failures in a row after which one that may be temporary gets an Event.
const FAILURES_BEFORE_EVENT: u32 = 5;
/// How long a pod must be outside the ambient mesh before it is reported: Istio enrolls it after its start.
const ENROLLMENT_GRACE: Duration = Duration::from_secs(60);
/// The minimum time between two Events about such failures, about rejected packets, or about a pod outside the ambient mesh.
const EVENT_INTERVAL: Duration = Duration::from_secs(3600);

/// What is known about a pod.
#[derive(Debug)]
pub(super) struct PodState {
    /// The time of the next pass; `None` to wait for a change.
    pub(super) due: Option<Instant>,
    /// The pod sandbox whose ADD was repeated last.
    pub(super) container_id: Option<String>,
    /// What is not as it should be; empty if all is.
    pub(super) finding: Finding,
    /// The last reported reasons why requests of the pod count as absent.
    pub(super) absent: String,
    /// Whether the pod was reported to have no guard.
    pub(super) unguarded: bool,
    /// What the guard had rejected at the last pass.
    pub(super) rejected: Rejected,
    /// The time of the last Event about it.
    rejection_event: Option<Instant>,
    pub(super) limit: ChangeLimit,
    last_pass: Option<Instant>,
    /// When the live rules were compared with the desired ones.
    pub(super) last_check: Option<Instant>,
    /// The first of the uninterrupted checks that found a cause for a repair.
    suspected_since: Option<Instant>,
    pub(super) attempts: Attempts,
    pub(super) location: Option<NetnsLocation>,
    /// The last logged failure.
    logged: Option<String>,
    /// The number of failures in a row.
    failures: u32,
    backoff: Backoff,
    /// The end of the pause after a failure, which a change of the pod does not shorten.
    not_before: Option<Instant>,
    /// The time of the last Event about a failure.
    last_event: Option<Instant>,
    /// The first of the uninterrupted checks that found the pod outside the ambient mesh.
    pub(super) outside_since: Option<Instant>,
    /// The time of the last Event about that.
    outside_event: Option<Instant>,
}

/// What is not as it should be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::agent) enum Finding {
    /// Nothing, or the pod has no rules and needs none.
    #[default]
    Nothing,
    /// The pod has the rules of its policy.
    Current,
    /// Requests of the pod or its namespace count as absent.
    Rejected(String),
    /// Its rules could not be checked or changed.
    Failed(String),
    /// It has a sidecar and no rules.
    NoRules(String),
    /// It is enrolled in the ambient mesh, and its traffic does not reach ztunnel.
    OutsideMesh(String),
}

impl Finding {
    /// The names of all but the first in reports and metrics.
    pub(in crate::agent) const NAMES: [&str; 5] = ["current", "rejected", "failed", "none", "outside"];
}

/// The network namespace of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NetnsLocation {
    pub(super) netns: PathBuf,
    id: NetnsId,
    pub(super) container_id: String,
}

impl NetnsLocation {
    /// Returns the location of a network namespace; `None` if its container is unknown.
    pub(super) fn of(found: &FoundNetns) -> Option<Self> {
        Self::at(&found.netns, found.container_id.as_deref()?)
    }

    /// Returns the location of the network namespace at a path; `None` if the path does not lead to one.
    pub(super) fn at(netns: &Path, container_id: &str) -> Option<Self> {
        let id = NetNs::open(netns).ok().flatten()?.id();
        Some(Self { netns: netns.to_owned(), id, container_id: container_id.to_owned() })
    }

    /// Whether the path still leads to the same network namespace.
    pub(super) fn exists(&self) -> bool {
        NetNs::open(&self.netns).is_ok_and(|netns| netns.is_some_and(|netns| netns.id() == self.id))
    }
}

impl PodState {
    /// Creates the state of a new pod.
    pub(super) fn new(due: Instant) -> Self {
        Self {
            due: Some(due),
            container_id: None,
            finding: Finding::Nothing,
            absent: String::new(),
            unguarded: false,
            rejected: Rejected::default(),
            rejection_event: None,
            limit: ChangeLimit::default(),
            last_pass: None,
            last_check: None,
            suspected_since: None,
            attempts: Attempts::default(),
            location: None,
            logged: None,
            failures: 0,
            backoff: Backoff::new(MIN_PAUSE, MAX_PAUSE),
            not_before: None,
            last_event: None,
            outside_since: None,
            outside_event: None,
        }
    }

    /// Schedules a pass soon, because the pod has changed.
    pub(super) fn changed(&mut self, now: Instant) {
        let last = self.last_pass.map(|last| last + MIN_INTERVAL);
        let soon = self.limit.next(now).into_iter().chain(self.not_before).chain(last).max();
        self.wake(Some(soon.unwrap_or(now).max(now)));
    }

    /// Begins a pass.
    pub(super) const fn begin(&mut self, now: Instant) {
        self.last_pass = Some(now);
    }

    /// Returns whether the live rules of a pod that changes often are compared now.
    pub(super) fn may_check(&self, now: Instant) -> bool {
        self.last_check.is_none_or(|last| now >= last + CHECK_INTERVAL)
    }

    /// Schedules a pass at `time` at the latest.
    pub(super) fn wake(&mut self, time: Option<Instant>) {
        self.due = self.due.into_iter().chain(time).min();
    }

    /// Schedules no pass until the pod changes.
    pub(super) fn rest(&mut self) {
        (self.due, self.suspected_since, self.finding) = (None, None, Finding::Nothing);
    }

    /// Records a check that found `cause`. The next one is due after `interval`, or sooner for a repair. Returns whether
    /// the pod is repaired now: a pod without rules must be so for `grace`.
    pub(super) fn record_check(
        &mut self,
        cause: Option<Cause>,
        interval: Duration,
        grace: Duration,
        now: Instant,
    ) -> bool {
        self.due = Some(now + interval);
        let Some(cause) = cause else {
            self.suspected_since = None;
            return false;
        };
        let since = *self.suspected_since.get_or_insert(now);
        if cause == Cause::NoRules && now < since + grace {
            self.due = Some(since + grace);
            return false;
        }
        let is_allowed = self.attempts.allows(now);
        if !is_allowed {
            self.wake(self.attempts.next());
        }
        is_allowed
    }

    /// Records whether the rules could be checked, and logs a failure once until it changes. After failures, the pauses
    /// grow, so that a pod whose own processes cause them does not take the time of others.
    pub(super) fn record(&mut self, error: Option<&Error>, pod: &PodRef, now: Instant) {
        if error.is_some() {
            self.failures = self.failures.saturating_add(1);
            let is_its_own = error.is_some_and(|error| matches!(error.code, Code::TryAgain | Code::ForeignRules));
            let longest = if is_its_own { MAX_PAUSE } else { MAX_PAUSE_OF_NODE };
            self.not_before = Some(now + self.backoff.pause(now).min(longest));
        } else {
            self.backoff.reset();
            (self.failures, self.not_before) = (0, None);
        }
        let error = error.map(ToString::to_string);
        if let Some(message) = error.as_ref().filter(|_| error != self.logged) {
            tracing::warn!("pod {}/{}: its rules are not checked: {message}", pod.namespace, pod.name);
            self.finding = Finding::Failed(message.clone());
        }
        self.logged = error;
    }

    /// Records what an enrolled pod lacks to be in the ambient mesh, and schedules the next check. Returns whether it gets
    /// an Event.
    pub(super) fn record_outside(&mut self, lacking: Option<String>, interval: Duration, now: Instant) -> bool {
        let Some(lacking) = lacking else {
            self.outside_since = None;
            self.wake(Some(now + interval));
            return false;
        };
        let reported = *self.outside_since.get_or_insert(now) + ENROLLMENT_GRACE;
        if now < reported {
            self.wake(Some(reported.min(now + interval)));
            return false;
        }
        self.wake(Some(now + interval));
        self.finding = Finding::OutsideMesh(lacking);
        let is_due = self.outside_event.is_none_or(|last| now.duration_since(last) >= EVENT_INTERVAL);
        if is_due {
            self.outside_event = Some(now);
        }
        is_due
    }

    /// Returns when the live rules may be compared again.
    pub(super) fn next_check(&self, now: Instant) -> Instant {
        self.last_check.map_or(now, |last| last + CHECK_INTERVAL)
    }

    /// Schedules the next pass after the pause, if there is one.
    pub(super) fn postpone(&mut self) {
        self.due = self.not_before.or(self.due);
    }

    /// Records what the guard has rejected. Returns what is new, and whether it gets an Event.
    pub(super) fn record_rejected(&mut self, rejected: Rejected, now: Instant) -> (Rejected, bool) {
        let new = rejected.since(std::mem::replace(&mut self.rejected, rejected));
        let is_due = self.rejection_event.is_none_or(|last| now.duration_since(last) >= EVENT_INTERVAL);
        if new.is_any() && is_due {
            self.rejection_event = Some(now);
        }
        (new, new.is_any() && is_due)
    }

    /// Whether the failure gets an Event.
    pub(super) fn needs_event(&mut self, error: &Error, now: Instant) -> bool {
        let is_lasting = error.code == Code::ForeignRules || self.failures >= FAILURES_BEFORE_EVENT;
        let is_due = self.last_event.is_none_or(|last| now.duration_since(last) >= EVENT_INTERVAL);
        if is_lasting && is_due {
            self.last_event = Some(now);
        }
        is_lasting && is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const GRACE: Duration = Duration::from_secs(3);
    const MINUTE: Duration = Duration::from_secs(60);

    fn read(rules: &mut PodState, error: Option<&Error>, now: Instant) {
        rules.record(error, &PodRef::default(), now);
    }

    #[test]
    fn a_pod_that_changes_often_has_a_pass_at_the_minimum_interval() {
        let now = Instant::now();
        let mut rules = PodState::new(now);
        assert!(!rules.record_check(None, MINUTE, GRACE, now));
        assert_eq!(rules.due, Some(now + MINUTE));
        rules.begin(now);
        rules.changed(now);
        assert_eq!(rules.due, Some(now + MIN_INTERVAL));
    }

    #[test]
    fn a_pod_whose_rules_can_not_be_read_is_checked_at_growing_intervals_even_if_it_changes() {
        let (start, error) = (Instant::now(), Error::new(Code::ForeignRules, "too many rules"));
        let (mut rules, mut now, mut pauses) = (PodState::new(start), start, Vec::new());
        for _ in 0..8 {
            read(&mut rules, Some(&error), now);
            rules.record_check(None, MINUTE, GRACE, now);
            rules.postpone();
            rules.changed(now);
            let next = rules.due.expect("it is checked again");
            pauses.push(next - now);
            now = next;
        }
        for (pause, expected) in pauses.iter().zip([1, 2, 4, 8, 16, 32, 64, 128]) {
            assert!(expected * SECOND <= *pause && *pause < expected * SECOND * 3 / 2, "{pauses:?}");
        }
        read(&mut rules, None, now);
        rules.record_check(None, MINUTE, GRACE, now);
        rules.postpone();
        assert_eq!(rules.due, Some(now + MINUTE));
    }

    #[test]
    fn a_failure_to_read_the_rules_gets_one_event_per_hour() {
        let (now, hour) = (Instant::now(), Duration::from_secs(3600));
        let (many, busy) = (Error::new(Code::ForeignRules, "too many"), Error::new(Code::TryAgain, "busy"));
        let mut rules = PodState::new(now);
        assert!(rules.needs_event(&many, now) && !rules.needs_event(&many, now + SECOND));
        assert!(rules.needs_event(&many, now + hour));
        let mut rules = PodState::new(now);
        let reports = (0..6).filter(|_| {
            read(&mut rules, Some(&busy), now);
            rules.needs_event(&busy, now)
        });
        assert_eq!(reports.count(), 1, "after several times in a row");
    }

    #[test]
    fn rejected_packets_are_counted_since_the_last_pass_and_get_one_event_per_hour() {
        let (now, hour) = (Instant::now(), Duration::from_secs(3600));
        let of = |outbound, inbound| Rejected { outbound, inbound };
        let mut state = PodState::new(now);
        assert_eq!(state.record_rejected(of(0, 0), now), (of(0, 0), false));
        assert_eq!(state.record_rejected(of(3, 1), now), (of(3, 1), true));
        assert_eq!(state.record_rejected(of(5, 1), now + MINUTE), (of(2, 0), false));
        // The rules were written again.
        assert_eq!(state.record_rejected(of(2, 0), now + 2 * MINUTE), (of(2, 0), false));
        assert_eq!(state.record_rejected(of(2, 4), now + hour), (of(0, 4), true));
    }

    #[test]
    fn a_pod_outside_the_ambient_mesh_is_reported_after_a_minute_and_once_per_hour() {
        let now = Instant::now();
        let mut state = PodState::new(now);
        let lacking = || Some("a listener".to_owned());
        assert!(!state.record_outside(lacking(), MINUTE, now) && state.finding == Finding::Nothing);
        assert!(!state.record_outside(None, MINUTE, now + 50 * SECOND), "it is enrolled late");
        assert!(!state.record_outside(lacking(), MINUTE, now + 61 * SECOND));
        assert!(state.record_outside(lacking(), MINUTE, now + 121 * SECOND));
        assert_eq!(state.finding, Finding::OutsideMesh("a listener".to_owned()));
        assert!(!state.record_outside(lacking(), MINUTE, now + 181 * SECOND));
        assert!(state.record_outside(lacking(), MINUTE, now + 3721 * SECOND));
    }

    #[test]
    fn a_pod_without_rules_is_repaired_after_the_grace_period() {
        let now = Instant::now();
        let mut rules = PodState::new(now);
        let mut repairs = |cause, second: u32| rules.record_check(cause, MINUTE, GRACE, now + second * SECOND);
        assert!(!repairs(Some(Cause::NoRules), 0));
        assert!(!repairs(None, 1), "a runtime was setting it up");
        assert!(!repairs(Some(Cause::NoRules), 3));
        assert!(repairs(Some(Cause::NoRules), 6));
        assert!(repairs(Some(Cause::Drift), 6), "drift is repaired at once");
        assert_eq!(rules.due, Some(now + 66 * SECOND));
    }
}
