//! How often, and when again, something is tried for one pod.
//!
//! How many pods are deleted in what time: where runtimes don't call the plugin, the pod that takes a
//! deleted one's place bypasses the mesh too, and would go the same way.
//!
//! The pods that wait for the worker: each once, and no more than so many.

use super::Cause;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// As many tries, then it is given up until things have been quiet.
const MOST_ATTEMPTS: u32 = 5;
/// After so long without a try, earlier ones are forgotten: a pod that loses its rules once an hour
/// gets them back each time.
const QUIET: Duration = Duration::from_secs(3600);
/// The pause after the first try; each is twice the one before.
const PAUSE: Duration = Duration::from_secs(5);
/// The same where the kubelet has yet to run the init container again; it waits for 10 s at first and up
/// to five minutes then (`pkg/kubelet/kubelet.go`, `MaxContainerBackOff`).
const PAUSE_AFTER_VALIDATION: Duration = Duration::from_secs(30);

/// The tries for one pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RetryBudget {
    count: u32,
    last: Option<Instant>,
    not_before: Option<Instant>,
}

impl RetryBudget {
    /// Whether another one may be made at `now`.
    pub(super) fn may(&mut self, now: Instant) -> bool {
        if self.last.is_some_and(|last| now.duration_since(last) >= QUIET) {
            *self = Self::default();
        }
        !self.are_spent() && self.not_before.is_none_or(|then| then <= now)
    }

    /// Whether there have been too many.
    pub(super) fn are_spent(&self) -> bool {
        self.count >= MOST_ATTEMPTS
    }

    /// Whether there is one more, and then too many.
    pub(super) fn is_last_next(&self) -> bool {
        self.count + 1 == MOST_ATTEMPTS
    }

    /// Notes one that was made at `now`.
    pub(super) fn note(&mut self, cause: Cause, now: Instant) {
        let first = if cause == Cause::ValidationFailed { PAUSE_AFTER_VALIDATION } else { PAUSE };
        self.not_before = Some(now + first * 2_u32.pow(self.count.min(MOST_ATTEMPTS)));
        self.count += 1;
        self.last = Some(now);
    }

    /// How many there were.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// When the next one may be made.
    pub(super) fn next(&self) -> Option<Instant> {
        if self.are_spent() { self.last.map(|last| last + QUIET) } else { self.not_before }
    }
}

/// No more than so many on a node
const MOST_DELETIONS: usize = 5;
/// within so long.
const WITHIN: Duration = Duration::from_secs(60);

/// When the last ones were made.
#[derive(Debug, Default)]
pub(super) struct Deletions(VecDeque<Instant>);

impl Deletions {
    /// When the next may be made; `None`: at `now`.
    pub(super) fn put_off(&self, now: Instant) -> Option<Instant> {
        let first = self.0.front().filter(|_| self.0.len() >= MOST_DELETIONS)?;
        Some(*first + WITHIN).filter(|then| *then > now)
    }

    /// Notes one that was made at `now`.
    pub(super) fn note(&mut self, now: Instant) {
        if self.0.len() >= MOST_DELETIONS {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }
}

/// As many are looked after before the node's pods are asked for anew. A kubelet's default for all pods of
/// a node is 110 (`maxPods`), OpenShift's 250, and 500 is the most that it is tested with.
pub(super) const LENGTH: usize = 512;

/// UIDs, first come first served.
#[derive(Debug)]
pub(super) struct RepairQueue {
    waiting: VecDeque<String>,
    length: usize,
}

impl RepairQueue {
    /// One that holds so many.
    pub(super) fn new(length: usize) -> Self {
        Self { waiting: VecDeque::new(), length }
    }

    /// Has a pod wait; one that waits already does so once. Gives whether there was room.
    pub(super) fn push(&mut self, uid: &str) -> bool {
        if self.waiting.iter().any(|other| other == uid) {
            return true;
        }
        let room = self.waiting.len() < self.length;
        if room {
            self.waiting.push_back(uid.to_owned());
        }
        room
    }

    /// Whether nobody waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The one that has waited longest.
    pub(super) fn pop(&mut self) -> Option<String> {
        self.waiting.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ever_longer_pauses_then_no_more_until_it_was_quiet() {
        let mut now = Instant::now();
        let (mut tries, mut pauses) = (RetryBudget::default(), Vec::new());
        for _ in 0..MOST_ATTEMPTS {
            assert!(tries.may(now));
            tries.note(Cause::Drift, now);
            assert!(!tries.may(now));
            let next = tries.next().expect("there was one");
            pauses.push((next - now).as_secs());
            now = next;
        }
        assert_eq!(pauses, [5, 10, 20, 40, 3600]);
        assert!(tries.may(now));
        assert_eq!(tries.count(), 0);
    }

    #[test]
    fn a_kubelet_gets_time_to_validate_again() {
        let (mut tries, now) = (RetryBudget::default(), Instant::now());
        tries.note(Cause::ValidationFailed, now);
        assert!(!tries.may(now + Duration::from_secs(29)) && tries.may(now + Duration::from_secs(30)));
    }

    #[test]
    fn no_more_than_so_many_in_a_while() {
        let (mut deletions, start) = (Deletions::default(), Instant::now());
        let at = |second: u64| start + Duration::from_secs(second);
        for second in 0..5 {
            assert_eq!(deletions.put_off(at(second)), None);
            deletions.note(at(second));
        }
        assert_eq!(deletions.put_off(at(5)), Some(at(60)));
        assert_eq!(deletions.put_off(at(60)), None);
        deletions.note(at(60));
        assert_eq!(deletions.put_off(at(60)), Some(at(61)), "one more for each that is long ago");
    }

    #[test]
    fn each_waits_once_and_in_its_turn() {
        let mut queue = RepairQueue::new(2);
        assert!(queue.push("a") && queue.push("b") && queue.push("a"));
        assert!(!queue.push("c"), "it is full");
        assert_eq!(queue.pop().as_deref(), Some("a"));
        assert!(queue.push("c"));
        assert_eq!((queue.pop().as_deref(), queue.pop().as_deref(), queue.pop()), (Some("b"), Some("c"), None));
    }
}
