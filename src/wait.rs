//! Waiting: with a deadline, asking again in growing intervals until there is an answer; and the pauses between attempts
//! that fail, each about twice as long as the one before. A random part keeps the agents of a cluster, and the pods of a
//! node, from retrying at the same time.

use std::hash::{BuildHasher, RandomState};
use std::thread::park_timeout;
use std::time::{Duration, Instant};

/// The first and the longest interval between two questions.
pub type Intervals = [Duration; 2];

/// Asks again at once: for something that another process changed meanwhile.
pub const AT_ONCE: Intervals = [Duration::ZERO; 2];

/// Returns the first answer of `ask`; `None` if it has none until `timeout` is over. Asks at least once.
///
/// # Errors
/// The first error of `ask`.
pub fn until<T, E>(
    timeout: Duration,
    [mut interval, longest]: Intervals,
    mut ask: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(answer) = ask()? {
            return Ok(Some(answer));
        }
        let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
            return Ok(None);
        };
        if !interval.is_zero() {
            park_timeout(interval.min(left));
        }
        interval = (interval * 2).min(longest);
    }
}

/// After a time without failures of this many times the longest pause, the next pause is short again.
const CALM: u32 = 4;

/// The pauses after failures in a row.
#[derive(Debug, Clone)]
pub struct Backoff {
    shortest: Duration,
    longest: Duration,
    failures: u32,
    last: Option<Instant>,
}

impl Backoff {
    /// Returns pauses that start at `shortest` and end at `longest`, both without their random part: up to half more.
    #[must_use]
    pub const fn new(shortest: Duration, longest: Duration) -> Self {
        Self { shortest, longest, failures: 0, last: None }
    }

    /// Counts a failure at `now`, and returns the pause after it.
    pub fn pause(&mut self, now: Instant) -> Duration {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) >= CALM * self.longest) {
            self.failures = 0;
        }
        let pause = self.shortest.saturating_mul(1 << self.failures.min(16)).min(self.longest);
        (self.failures, self.last) = (self.failures.saturating_add(1), Some(now));
        let random = u32::try_from(RandomState::new().hash_one(0) % 1000).unwrap_or(0);
        pause + pause * random / 2000
    }

    /// Forgets the failures after a success.
    pub const fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORTEST: Duration = Duration::from_millis(800);
    const LONGEST: Duration = Duration::from_secs(30);

    #[test]
    fn pauses_double_up_to_a_limit_and_are_short_again_after_a_success_or_a_calm_time() {
        let (mut backoff, now) = (Backoff::new(SHORTEST, LONGEST), Instant::now());
        let mut is_about = |expected: u64, now| {
            let (pause, expected) = (backoff.pause(now), Duration::from_millis(expected));
            assert!(expected <= pause && pause < expected * 3 / 2, "{expected:?}: {pause:?}");
        };
        for expected in [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000] {
            is_about(expected, now);
        }
        is_about(800, now + CALM * LONGEST);
        backoff.reset();
        assert!(backoff.pause(now) < SHORTEST * 3 / 2);
    }
}
