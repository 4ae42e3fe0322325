//! How long to wait before the next repair, when somebody undoes each.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// As many repairs in a minute are nothing unusual: an upgrade of the cluster network, for one.
const FREE: usize = 3;
const WINDOW: Duration = Duration::from_secs(60);
const LONGEST: Duration = Duration::from_secs(60);

/// The repairs of late.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    repairs: VecDeque<Instant>,
}

impl Backoff {
    /// How long to leave things as they are after a repair at `now`: nothing for the first few in
    /// a minute, then twice as long with each.
    pub(super) fn after_repair(&mut self, now: Instant) -> Duration {
        self.repairs.push_back(now);
        while self.repairs.front().is_some_and(|first| now.duration_since(*first) > WINDOW + LONGEST) {
            self.repairs.pop_front();
        }
        match u32::try_from(self.repairs.len().saturating_sub(FREE)).unwrap_or(u32::MAX) {
            0 => Duration::ZERO,
            more => Duration::from_secs(1).saturating_mul(1 << (more - 1).min(6)).min(LONGEST),
        }
    }

    /// How many there were of late.
    pub(super) fn count(&self) -> usize {
        self.repairs.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fight_is_fought_ever_slower_and_forgotten_when_over() {
        let start = Instant::now();
        let (mut backoff, mut now, mut delays) = (Backoff::default(), start, Vec::new());
        for _ in 0..10 {
            let delay = backoff.after_repair(now);
            delays.push(delay.as_secs());
            now += delay;
        }
        assert_eq!(delays, [0, 0, 0, 1, 2, 4, 8, 16, 32, 60]);
        assert_eq!(backoff.after_repair(now + Duration::from_secs(600)), Duration::ZERO);
        assert_eq!(backoff.count(), 1);
    }
}
