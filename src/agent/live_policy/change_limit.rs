//! How often the policy of one pod is changed: a pod's author must not keep the kernel busy.

use crate::agent::token_bucket::TokenBucket;
use std::time::{Duration, Instant};

/// The minimum time between two changes.
pub(super) const MIN_INTERVAL: Duration = Duration::from_millis(500);
/// The number of changes that follow one another without further pauses.
const BURST: u32 = 30;
/// The time after which one more change is allowed.
const REFILL_TIME: Duration = Duration::from_secs(10);

/// The limit of one pod.
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
