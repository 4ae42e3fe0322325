//! The limits of repairs: attempts per pod, deletions per node, and pods in the queue.

use super::decision::Cause;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The attempts per pod. More are made only after [`RESET_TIME`].
const MAX_ATTEMPTS: u32 = 5;
/// The time without an attempt after which the earlier ones do not count: a pod that loses its rules once an hour is
/// repaired each time.
const RESET_TIME: Duration = Duration::from_secs(3600);
/// The pause after the first attempt, doubled after each further one.
const PAUSE: Duration = Duration::from_secs(5);
/// The pause after the first attempt if the kubelet must restart the init container. It waits for 10 s at first and up
/// to five minutes later (`pkg/kubelet/kubelet.go`, `MaxContainerBackOff`).
const PAUSE_AFTER_VALIDATION: Duration = Duration::from_secs(30);

/// The attempts to repair one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RetryBudget {
    attempts: u32,
    last: Option<Instant>,
    not_before: Option<Instant>,
}

impl RetryBudget {
    /// Whether an attempt is allowed at `now`.
    pub(super) fn allows(&mut self, now: Instant) -> bool {
        if self.last.is_some_and(|last| now.duration_since(last) >= RESET_TIME) {
            *self = Self::default();
        }
        !self.is_spent() && self.not_before.is_none_or(|not_before| not_before <= now)
    }

    /// Whether all attempts were made.
    pub(super) fn is_spent(&self) -> bool {
        self.attempts >= MAX_ATTEMPTS
    }

    /// Whether one attempt is left.
    pub(super) fn is_last_next(&self) -> bool {
        self.attempts + 1 == MAX_ATTEMPTS
    }

    /// Records an attempt at `now`.
    pub(super) fn record(&mut self, cause: Cause, now: Instant) {
        let first = if cause == Cause::ValidationFailed { PAUSE_AFTER_VALIDATION } else { PAUSE };
        self.not_before = Some(now + first * 2_u32.pow(self.attempts.min(MAX_ATTEMPTS)));
        self.attempts += 1;
        self.last = Some(now);
    }

    /// Returns the number of attempts.
    pub(super) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Returns the time of the next attempt; `None` if there was none.
    pub(super) fn next(&self) -> Option<Instant> {
        if self.is_spent() { self.last.map(|last| last + RESET_TIME) } else { self.not_before }
    }
}

/// The deletions per node within [`DELETION_PERIOD`].
pub(super) const MAX_DELETIONS: usize = 5;
/// The period of [`MAX_DELETIONS`].
pub(super) const DELETION_PERIOD: Duration = Duration::from_secs(60);

/// The rate limit of deletions: if the runtime does not call the plugin, the pod that replaces a deleted one bypasses
/// the mesh too, and would be deleted next.
#[derive(Debug, Default)]
pub(super) struct DeletionLimit(VecDeque<Instant>);

impl DeletionLimit {
    /// Returns the time of the next deletion; `None` if it is allowed at `now`.
    pub(super) fn next(&self, now: Instant) -> Option<Instant> {
        let first = self.0.front().filter(|_| self.0.len() >= MAX_DELETIONS)?;
        Some(*first + DELETION_PERIOD).filter(|next| *next > now)
    }

    /// Records a deletion at `now`.
    pub(super) fn record(&mut self, now: Instant) {
        if self.0.len() >= MAX_DELETIONS {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }
}

/// The limit of the repair queue. The kubelet's default for the pods of a node is 110 (`maxPods`), OpenShift's is 250,
/// and 500 is the largest number that it is tested with.
pub(super) const MAX_QUEUE_LENGTH: usize = 512;

/// A queue of pod UIDs, without duplicates.
#[derive(Debug)]
pub(super) struct RepairQueue {
    waiting: VecDeque<String>,
    limit: usize,
}

impl RepairQueue {
    /// Creates a queue for `limit` pods.
    pub(super) fn new(limit: usize) -> Self {
        Self { waiting: VecDeque::new(), limit }
    }

    /// Appends a pod that is not in the queue. Returns false if the queue is full.
    pub(super) fn push(&mut self, uid: &str) -> bool {
        if self.waiting.iter().any(|other| other == uid) {
            return true;
        }
        let has_room = self.waiting.len() < self.limit;
        if has_room {
            self.waiting.push_back(uid.to_owned());
        }
        has_room
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Removes and returns the first pod.
    pub(super) fn pop(&mut self) -> Option<String> {
        self.waiting.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_after_the_last_attempt_the_budget_resets_in_an_hour() {
        let mut now = Instant::now();
        let (mut budget, mut pauses) = (RetryBudget::default(), Vec::new());
        for _ in 0..MAX_ATTEMPTS {
            assert!(budget.allows(now));
            budget.record(Cause::Drift, now);
            assert!(!budget.allows(now));
            let next = budget.next().expect("an attempt was made");
            pauses.push((next - now).as_secs());
            now = next;
        }
        assert_eq!(pauses, [5, 10, 20, 40, 3600]);
        assert!(budget.allows(now));
        assert_eq!(budget.attempts(), 0);
    }

    #[test]
    fn after_a_failed_validation_the_kubelet_has_time_to_repeat_it() {
        let (mut budget, now) = (RetryBudget::default(), Instant::now());
        budget.record(Cause::ValidationFailed, now);
        assert!(!budget.allows(now + Duration::from_secs(29)) && budget.allows(now + Duration::from_secs(30)));
    }

    #[test]
    fn deletions_beyond_the_rate_limit_are_deferred() {
        let (mut deletions, start) = (DeletionLimit::default(), Instant::now());
        let at = |second: u64| start + Duration::from_secs(second);
        for second in 0..5 {
            assert_eq!(deletions.next(at(second)), None);
            deletions.record(at(second));
        }
        assert_eq!(deletions.next(at(5)), Some(at(60)));
        assert_eq!(deletions.next(at(60)), None);
        deletions.record(at(60));
        assert_eq!(deletions.next(at(60)), Some(at(61)), "one more for each that left the period");
    }

    #[test]
    fn the_queue_has_no_duplicates_and_keeps_the_order() {
        let mut queue = RepairQueue::new(2);
        assert!(queue.push("a") && queue.push("b") && queue.push("a"));
        assert!(!queue.push("c"), "the queue is full");
        assert_eq!(queue.pop().as_deref(), Some("a"));
        assert!(queue.push("c"));
        assert_eq!((queue.pop().as_deref(), queue.pop().as_deref(), queue.pop()), (Some("b"), Some("c"), None));
    }
}
