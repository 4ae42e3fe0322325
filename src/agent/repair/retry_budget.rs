//! How often, and when again, something is tried for one pod.

use super::Cause;
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
}
