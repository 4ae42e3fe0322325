//! The state of a pod between two passes: when the next one is due, and what was found and reported.

use super::suspicion::Cause;
use crate::agent::token_bucket::TokenBucket;
use crate::cluster::Event;
use crate::cni::{Code, Error};
use crate::firewall::Rejected;
use crate::wait::Backoff;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The minimum time between two passes over a pod that changes, and so between two changes of its rules.
pub(super) const MIN_INTERVAL: Duration = Duration::from_millis(500);
/// The number of changes of a pod's rules that follow one another without further pauses, and the time after which one more
/// is allowed: a pod's author must not keep the kernel busy.
const CHANGES: u32 = 30;
const REFILL_TIME: Duration = Duration::from_secs(10);
/// The minimum time between two comparisons of the live rules of a pod that changes often, as in a crash loop.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The pauses after failures.
const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(300);
/// The number of failures in a row after which one that may be temporary gets an Event.
const FAILURES_BEFORE_EVENT: u32 = 5;
/// The minimum time between two Events about a state that lasts.
const EVENT_INTERVAL: Duration = Duration::from_secs(3600);

/// What is known about a pod.
#[derive(Debug, Default)]
pub(super) struct PodState {
    /// The time of the next pass; `None` to wait for a change.
    pub(super) due: Option<Instant>,
    /// The pod sandbox whose ADD was repeated last.
    pub(super) container_id: Option<String>,
    /// What was found, with the reason of what is not as it should be; `None` if the pod has no rules and needs none.
    pub(super) finding: Option<(Finding, String)>,
    /// Why the pod is to be deleted.
    pub(super) deletion: Option<Cause>,
    /// The last reported reasons why requests of the pod count as absent.
    pub(super) absent: String,
    /// Whether the pod was reported to have no guard.
    pub(super) unguarded: bool,
    /// What the guard had rejected at the last pass.
    pub(super) rejected: Rejected,
    /// The changes of its rules; `None` before the first one.
    changes: Option<TokenBucket>,
    last_pass: Option<Instant>,
    /// When the live rules were compared with the desired ones.
    pub(super) last_check: Option<Instant>,
    /// The first of the uninterrupted passes that found the pod without rules, or its validation failed.
    pub(super) suspected_since: Option<Instant>,
    /// The first of the uninterrupted passes that found the pod outside the ambient mesh.
    pub(super) outside_since: Option<Instant>,
    /// The last failure.
    failure: Option<String>,
    /// The number of failures in a row.
    failures: u32,
    /// The pauses after these failures.
    backoff: Option<Backoff>,
    /// The end of the pause after a failure, which a change of the pod does not shorten.
    not_before: Option<Instant>,
    /// The times of the last Events about states that last, by reason.
    reported: BTreeMap<String, Instant>,
    /// The Events of this pass.
    pub(super) events: Vec<Event>,
}

/// The state of a pod's rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::agent) enum Finding {
    /// The pod has the rules of its policy.
    Current,
    /// Requests of the pod or its namespace count as absent.
    Rejected,
    /// Its rules could not be checked or changed.
    Failed,
    /// It has a sidecar and no rules.
    NoRules,
    /// It is enrolled in the ambient mesh, and its traffic does not reach ztunnel.
    OutsideMesh,
}

impl Finding {
    /// The names in reports and metrics, in their order.
    pub(in crate::agent) const NAMES: [&str; 5] = ["current", "rejected", "failed", "none", "outside"];
}

impl PodState {
    /// Creates the state of a new pod.
    pub(super) fn new(due: Instant) -> Self {
        Self { due: Some(due), ..Self::default() }
    }

    /// Schedules a pass soon, because the pod has changed.
    pub(super) fn changed(&mut self, now: Instant) {
        let last = self.last_pass.map(|last| last + MIN_INTERVAL);
        let soon = self
            .changes
            .as_mut()
            .and_then(|changes| changes.next(now))
            .into_iter()
            .chain(self.not_before)
            .chain(last)
            .max();
        self.wake(soon.unwrap_or(now).max(now));
    }

    /// Counts a change of the pod's rules.
    pub(super) fn count_change(&mut self, now: Instant) {
        self.changes.get_or_insert(TokenBucket::new(CHANGES, REFILL_TIME)).take(now);
    }

    /// Begins a pass.
    pub(super) const fn begin(&mut self, now: Instant) {
        self.last_pass = Some(now);
    }

    /// Schedules a pass at `time` at the latest.
    pub(super) fn wake(&mut self, time: Instant) {
        self.due = Some(self.due.map_or(time, |due| due.min(time)));
    }

    /// Schedules no pass until the pod changes.
    pub(super) fn rest(&mut self) {
        (self.due, self.suspected_since, self.finding) = (None, None, None);
    }

    /// Returns when the live rules of a pod that changes often may be compared again.
    pub(super) fn next_check(&self, now: Instant) -> Instant {
        self.last_check.map_or(now, |last| last + CHECK_INTERVAL)
    }

    /// Records that the pass has succeeded.
    pub(super) fn succeed(&mut self) {
        (self.failures, self.backoff, self.not_before, self.failure) = (0, None, None, None);
    }

    /// Records a failure, and logs it once until it changes. The pauses grow, so that a pod whose own processes cause failures
    /// does not take the time of others. Returns whether the failure lasts.
    pub(super) fn fail(&mut self, error: &Error, pod: &str, now: Instant) -> bool {
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + self.backoff.get_or_insert(Backoff::new(MIN_PAUSE, MAX_PAUSE)).pause(now));
        self.due = self.not_before;
        let message = error.to_string();
        if self.failure.as_ref() != Some(&message) {
            tracing::warn!("pod {pod}: its rules are neither checked nor changed: {message}");
        }
        if !self.has(Finding::NoRules) {
            self.finding = Some((Finding::Failed, message.clone()));
        }
        self.failure = Some(message);
        error.code == Code::ForeignRules || self.failures >= FAILURES_BEFORE_EVENT
    }

    /// Whether this was found.
    pub(super) fn has(&self, wanted: Finding) -> bool {
        self.finding.as_ref().is_some_and(|(finding, _)| *finding == wanted)
    }

    /// Reports a state that lasts, at most once per hour. Returns whether it is reported now.
    pub(super) fn report_hourly(&mut self, event: Event, now: Instant) -> bool {
        let last = self.reported.get(&*event.reason);
        let is_due = last.is_none_or(|last| now.saturating_duration_since(*last) >= EVENT_INTERVAL);
        if is_due {
            self.reported.insert(event.reason.to_string(), now);
            self.events.push(event);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_pod_that_changes_often_has_a_pass_at_the_minimum_interval() {
        let now = Instant::now();
        let mut state = PodState::new(now);
        state.begin(now);
        state.due = Some(now + MINUTE);
        state.changed(now);
        assert_eq!(state.due, Some(now + MIN_INTERVAL));
    }

    #[test]
    fn a_burst_of_changes_is_followed_by_one_every_ten_seconds() {
        let (start, mut now, mut pauses) = (Instant::now(), Instant::now(), Vec::new());
        let mut state = PodState::new(start);
        for _ in 0..40 {
            state.due = None;
            state.changed(now);
            let next = state.due.expect("scheduled");
            pauses.push((next - now).as_millis());
            now = next;
            state.begin(now);
            state.count_change(now);
        }
        assert_eq!(pauses[..3], [0, 500, 500]);
        assert_eq!(pauses[33..], [10_000; 7], "{pauses:?}");
        assert!(now - start >= 90 * SECOND, "{:?}", now - start);
    }

    #[test]
    fn after_failures_a_pod_has_passes_at_growing_intervals_even_if_it_changes() {
        let (start, error) = (Instant::now(), Error::new(Code::TryAgain, "busy"));
        let (mut state, mut now, mut pauses) = (PodState::new(start), start, Vec::new());
        let lasting = (0..10).filter(|_| {
            let lasts = state.fail(&error, "shop/web-0", now);
            state.changed(now);
            let next = state.due.expect("there is another pass");
            pauses.push(next - now);
            now = next;
            lasts
        });
        assert_eq!(lasting.count(), 6, "the fifth one in a row lasts");
        for (pause, expected) in pauses.iter().zip([1, 2, 4, 8, 16, 32, 64, 128, 256, 300]) {
            assert!(expected * SECOND <= *pause && *pause < expected * SECOND * 3 / 2, "{pauses:?}");
        }
        assert_eq!(state.finding, Some((Finding::Failed, "busy".into())));
        assert!(state.fail(&Error::new(Code::ForeignRules, "too many"), "shop/web-0", now), "at once");
        state.succeed();
        state.due = None;
        state.changed(now);
        assert_eq!(state.due, Some(now));
    }

    #[test]
    fn a_state_that_lasts_has_one_event_per_hour() {
        let (now, mut state) = (Instant::now(), PodState::new(Instant::now()));
        let event = |reason: &str| Event { warning: true, reason: reason.to_owned().into(), message: String::new() };
        for minute in [0, 1, 59, 60] {
            state.report_hourly(event("A"), now + minute * MINUTE);
        }
        state.report_hourly(event("B"), now);
        let reasons: Vec<_> = state.events.iter().map(|event| &*event.reason).collect();
        assert_eq!(reasons, ["A", "A", "B"]);
    }
}
