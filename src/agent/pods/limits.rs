//! The limits of what is done to pods: attempts to repair a pod, changes of its policy, and deletions on the node.

use super::suspicion::Cause;
use crate::agent::token_bucket::TokenBucket;
use crate::backoff::Backoff;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The attempts per pod. More are made only after [`RESET_TIME`].
const MAX_ATTEMPTS: u32 = 5;
/// The time without an attempt after which the earlier ones do not count: a pod that loses its rules once an hour is
/// repaired each time.
const RESET_TIME: Duration = Duration::from_secs(3600);
/// The pause after the first attempt.
const PAUSE: Duration = Duration::from_secs(5);
/// The pause after the first attempt if the kubelet must restart the init container. It waits for 10 s at first and up
/// to five minutes later (`pkg/kubelet/kubelet.go`, `MaxContainerBackOff`).
const PAUSE_AFTER_VALIDATION: Duration = Duration::from_secs(30);

/// The attempts to repair one pod.
#[derive(Debug, Clone, Default)]
pub(super) struct Attempts {
    count: u32,
    /// `None` before the first attempt.
    backoff: Option<Backoff>,
    last: Option<Instant>,
    not_before: Option<Instant>,
}

impl Attempts {
    /// Whether an attempt is allowed at `now`.
    pub(super) fn allows(&mut self, now: Instant) -> bool {
        if self.last.is_some_and(|last| now.duration_since(last) >= RESET_TIME) {
            *self = Self::default();
        }
        !self.are_spent() && self.not_before.is_none_or(|not_before| not_before <= now)
    }

    /// Whether all attempts were made.
    const fn are_spent(&self) -> bool {
        self.count >= MAX_ATTEMPTS
    }

    /// Whether one attempt is left.
    pub(super) const fn is_last_next(&self) -> bool {
        self.count + 1 == MAX_ATTEMPTS
    }

    /// Whether the last attempt was neither the first nor the last one that is allowed.
    pub(super) const fn is_in_between(&self) -> bool {
        self.count > 1 && !self.are_spent()
    }

    /// Records an attempt at `now`.
    pub(super) fn record(&mut self, cause: Cause, now: Instant) {
        let first = if cause == Cause::ValidationFailed { PAUSE_AFTER_VALIDATION } else { PAUSE };
        let backoff = self.backoff.get_or_insert_with(|| Backoff::new(first, RESET_TIME));
        self.not_before = Some(now + backoff.pause(now));
        self.last = Some(now);
        self.count += 1;
    }

    /// Returns the time of the next attempt; `None` if there was none.
    pub(super) fn next(&self) -> Option<Instant> {
        if self.are_spent() { self.last.map(|last| last + RESET_TIME) } else { self.not_before }
    }
}

/// The deletions per node within [`DELETION_PERIOD`].
const MAX_DELETIONS: usize = 5;
/// The period of [`MAX_DELETIONS`].
const DELETION_PERIOD: Duration = Duration::from_secs(60);

/// The rate limit of deletions: if the runtime does not call the plugin, the pod that replaces a deleted one bypasses
/// the mesh too, and would be deleted next.
#[derive(Debug, Default)]
pub(super) struct DeletionLimit {
    recent: VecDeque<Instant>,
    /// The time of the last log message about a deferred deletion.
    logged: Option<Instant>,
}

impl DeletionLimit {
    /// Records a deletion at `now`, if it is allowed.
    ///
    /// # Errors
    /// The time of the next deletion.
    pub(super) fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let is_recent = |deletion: &Instant| now < *deletion + DELETION_PERIOD;
        self.recent.retain(is_recent);
        match self.recent.front() {
            Some(first) if self.recent.len() >= MAX_DELETIONS => Err(*first + DELETION_PERIOD),
            _ => {
                self.recent.push_back(now);
                Ok(())
            }
        }
    }

    /// Logs that a deletion is deferred, once in each period.
    pub(super) fn log_deferred(&mut self, now: Instant) {
        if self.logged.is_none_or(|logged| now >= logged + DELETION_PERIOD) {
            self.logged = Some(now);
            tracing::warn!(
                "deletion of pods deferred: rate limit of {MAX_DELETIONS} pods per {} s reached; check whether new pods are \
                 redirected",
                DELETION_PERIOD.as_secs()
            );
        }
    }
}

/// The minimum time between two changes of a pod's policy.
pub(super) const MIN_INTERVAL: Duration = Duration::from_millis(500);
/// The number of changes that follow one another without further pauses.
const BURST: u32 = 30;
/// The time after which one more change is allowed.
const REFILL_TIME: Duration = Duration::from_secs(10);

/// How often the policy of one pod is changed: a pod's author must not keep the kernel busy.
#[derive(Debug, Clone)]
pub(super) struct ChangeLimit {
    bucket: TokenBucket,
    last: Option<Instant>,
}

impl Default for ChangeLimit {
    fn default() -> Self {
        Self { bucket: TokenBucket::new(BURST, REFILL_TIME), last: None }
    }
}

impl ChangeLimit {
    /// Returns when the next change is allowed; `None` if it is at `now`.
    pub(super) fn next(&mut self, now: Instant) -> Option<Instant> {
        let soon = self.last.map(|last| last + MIN_INTERVAL);
        soon.max(self.bucket.next(now)).filter(|next| *next > now)
    }

    /// Records a change at `now`.
    pub(super) fn record(&mut self, now: Instant) {
        self.bucket.take(now);
        self.last = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_after_the_last_attempt_the_attempts_are_reset_in_an_hour() {
        let mut now = Instant::now();
        let (mut attempts, mut pauses) = (Attempts::default(), Vec::new());
        for _ in 0..MAX_ATTEMPTS {
            assert!(attempts.allows(now));
            attempts.record(Cause::Drift, now);
            assert!(!attempts.allows(now));
            let next = attempts.next().expect("an attempt was made");
            pauses.push(next - now);
            now = next;
        }
        for (pause, expected) in pauses.iter().zip([5, 10, 20, 40]) {
            let expected = Duration::from_secs(expected);
            assert!(expected <= *pause && *pause < expected * 3 / 2, "{pauses:?}");
        }
        assert_eq!(pauses.last(), Some(&RESET_TIME));
        assert!(attempts.allows(now) && attempts.next().is_none());
    }

    #[test]
    fn after_a_failed_validation_the_kubelet_has_time_to_repeat_it() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        attempts.record(Cause::ValidationFailed, now);
        assert!(!attempts.allows(now + Duration::from_secs(29)) && attempts.allows(now + Duration::from_secs(45)));
    }

    #[test]
    fn deletions_beyond_the_rate_limit_are_deferred() {
        let (mut deletions, start) = (DeletionLimit::default(), Instant::now());
        let at = |second: u64| start + Duration::from_secs(second);
        for second in 0..5 {
            assert_eq!(deletions.take(at(second)), Ok(()));
        }
        assert_eq!(deletions.take(at(5)), Err(at(60)));
        assert_eq!(deletions.take(at(60)), Ok(()));
        assert_eq!(deletions.take(at(60)), Err(at(61)), "one more for each that left the period");
    }

    #[test]
    fn a_burst_of_changes_is_followed_by_one_every_ten_seconds() {
        let (mut limit, start) = (ChangeLimit::default(), Instant::now());
        let (mut now, mut pauses) = (start, Vec::new());
        for _ in 0..40 {
            let next = limit.next(now).unwrap_or(now);
            pauses.push((next - now).as_millis());
            now = next;
            assert_eq!(limit.next(now), None);
            limit.record(now);
        }
        assert_eq!(pauses[..3], [0, 500, 500]);
        assert_eq!(pauses[33..], [10_000; 7], "{pauses:?}");
        assert!(now - start >= Duration::from_secs(90), "{:?}", now - start);
        // After a pause, there is a burst again.
        now += BURST * REFILL_TIME;
        for _ in 0..BURST {
            assert_eq!(limit.next(now), None);
            limit.record(now);
            now += MIN_INTERVAL;
        }
        assert!(limit.next(now).is_none_or(|next| next <= now + REFILL_TIME));
    }
}
