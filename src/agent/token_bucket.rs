//! A rate limit with a burst.

use std::time::{Duration, Instant};

/// A bucket of `burst` tokens. One returns after each refill time.
#[derive(Debug, Clone)]
pub(super) struct TokenBucket {
    burst: u32,
    refill_time: Duration,
    /// The number of tokens that were taken and have not returned.
    used: u32,
    /// The time from which `used` decreases.
    since: Option<Instant>,
}

impl TokenBucket {
    /// Creates a full bucket.
    pub(super) const fn new(burst: u32, refill_time: Duration) -> Self {
        Self { burst, refill_time, used: 0, since: None }
    }

    /// Returns when there is a token; `None` if there is one at `now`.
    pub(super) fn next(&mut self, now: Instant) -> Option<Instant> {
        self.refill(now);
        self.since.filter(|_| self.used >= self.burst).map(|since| since + self.refill_time)
    }

    /// Takes a token at `now`.
    pub(super) fn take(&mut self, now: Instant) {
        self.refill(now);
        self.used += 1;
        self.since.get_or_insert(now);
    }

    /// Whether all tokens have returned at `now`.
    pub(super) fn is_full(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.used == 0
    }

    fn refill(&mut self, now: Instant) {
        while let Some(since) = self.since.filter(|since| now >= *since + self.refill_time) {
            self.used = self.used.saturating_sub(1);
            self.since = (self.used > 0).then_some(since + self.refill_time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_returns_after_each_refill_time() {
        let (mut bucket, start) = (TokenBucket::new(2, Duration::from_secs(10)), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        bucket.take(at(0));
        assert_eq!(bucket.next(at(3)), None);
        bucket.take(at(3));
        assert_eq!(bucket.next(at(3)), Some(at(10)));
        assert_eq!(bucket.next(at(10)), None);
        assert!(!bucket.is_full(at(19)) && bucket.is_full(at(20)));
    }
}
