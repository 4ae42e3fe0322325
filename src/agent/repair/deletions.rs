//! How many pods are deleted in what time: where runtimes don't call the plugin, the pod that takes a
//! deleted one's place bypasses the mesh too, and would go the same way.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
