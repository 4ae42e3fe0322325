//! Whether an installation stays in place, and how long to pause while another process keeps reverting it.
//!
//! A single repair of a ready node does not change its readiness: the file was missing for milliseconds, and a taint
//! that comes and goes helps no pod. A node that was not ready becomes ready only after the installation has stayed in
//! place for [`HOLD_TIME`]: a process that owns the directory (Cilium with `cni.exclusive=true`) reverts it within
//! milliseconds, but not at once.

use std::time::{Duration, Instant};

/// How long everything must stay in place before the installation is stable.
pub(super) const HOLD_TIME: Duration = Duration::from_secs(3);
/// The number of repairs in a row without a pause and without effect on the readiness: an upgrade of the cluster
/// network writes its file several times.
const FREE_REPAIRS: u32 = 3;
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// The results of the recent checks.
#[derive(Debug, Default)]
pub(super) struct Stability {
    /// The first of the uninterrupted checks that found everything in place.
    in_place: Option<Instant>,
    /// The repairs since the installation was stable.
    repairs: u32,
    /// Whether the node counts as ready.
    ready: bool,
}

impl Stability {
    /// Records a check that found everything in place. Returns how long that must last before it is stable.
    pub(super) fn in_place(&mut self, now: Instant) -> Duration {
        let since = *self.in_place.get_or_insert(now);
        let left = HOLD_TIME.saturating_sub(now.duration_since(since));
        if self.repairs == 0 || left.is_zero() {
            (self.repairs, self.ready) = (0, true);
            return Duration::ZERO;
        }
        left
    }

    /// Records a repair. Returns the pause before the next check: none after the first [`FREE_REPAIRS`] in a row, then
    /// twice as long after each.
    pub(super) fn repaired(&mut self) -> Duration {
        self.in_place = None;
        self.repairs = self.repairs.saturating_add(1);
        self.ready &= !self.is_contested();
        match self.repairs.saturating_sub(FREE_REPAIRS) {
            0 => Duration::ZERO,
            more => Duration::from_secs(1 << (more - 1).min(6)).min(MAX_PAUSE),
        }
    }

    /// Records an iteration that did not put everything in place.
    pub(super) fn incomplete(&mut self) {
        (self.in_place, self.ready) = (None, false);
    }

    /// Records that the node is not ready, although everything that can be installed is in place.
    pub(super) fn not_ready(&mut self) {
        self.ready = false;
    }

    /// Whether the node counts as ready.
    pub(super) fn is_ready(&self) -> bool {
        self.ready
    }

    /// Whether another process keeps reverting what was installed.
    pub(super) fn is_contested(&self) -> bool {
        self.repairs > FREE_REPAIRS
    }

    /// Returns the number of repairs since the installation was stable.
    pub(super) fn repairs(&self) -> u32 {
        self.repairs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(1);

    /// A node on which the first check has found everything in place.
    fn ready(now: Instant) -> Stability {
        let mut stability = Stability::default();
        assert!(!stability.is_ready());
        assert_eq!(stability.in_place(now), Duration::ZERO);
        assert!(stability.is_ready(), "an earlier agent installed it");
        stability
    }

    #[test]
    fn a_new_installation_is_ready_after_the_hold_time() {
        let (mut stability, now) = (Stability::default(), Instant::now());
        assert_eq!(stability.repaired(), Duration::ZERO);
        assert_eq!(stability.in_place(now), HOLD_TIME);
        assert_eq!(stability.in_place(now + HOLD_TIME - SHORT), SHORT);
        assert!(!stability.is_ready());
        assert_eq!(stability.in_place(now + HOLD_TIME), Duration::ZERO);
        assert!(stability.is_ready());
    }

    #[test]
    fn single_repairs_neither_change_readiness_nor_add_up() {
        let mut now = Instant::now();
        let mut stability = ready(now);
        for _ in 0..100 {
            assert_eq!(stability.repaired(), Duration::ZERO, "without a pause");
            assert!(stability.is_ready());
            assert_eq!(stability.in_place(now), HOLD_TIME, "and with another check");
            now += HOLD_TIME;
            assert_eq!(stability.in_place(now), Duration::ZERO);
        }
    }

    #[test]
    fn a_contested_installation_is_not_ready_and_is_repaired_at_growing_intervals() {
        let mut now = Instant::now();
        let mut stability = ready(now);
        let mut pauses = Vec::new();
        for repair in 1..=10 {
            pauses.push(stability.repaired().as_secs());
            assert_eq!(stability.is_ready(), repair <= FREE_REPAIRS, "{repair}");
            // In place at the check, and reverted before the hold time is over.
            stability.in_place(now);
            now += HOLD_TIME - SHORT;
        }
        assert_eq!(pauses, [0, 0, 0, 1, 2, 4, 8, 16, 32, 60]);
        assert!(stability.is_contested() && !stability.is_ready());
        stability.in_place(now);
        assert_eq!(stability.in_place(now + HOLD_TIME), Duration::ZERO);
        assert!(stability.is_ready() && !stability.is_contested());
        assert_eq!(stability.repaired(), Duration::ZERO);
    }

    #[test]
    fn a_pause_does_not_count_as_time_in_place() {
        let now = Instant::now();
        let mut stability = ready(now);
        for minute in 0..5 {
            stability.repaired();
            assert_eq!(stability.in_place(now + minute * MAX_PAUSE), HOLD_TIME);
        }
        assert!(!stability.is_ready());
    }

    #[test]
    fn an_incomplete_installation_is_not_ready_and_must_last_the_hold_time_again() {
        let now = Instant::now();
        let mut stability = ready(now);
        stability.incomplete();
        assert!(!stability.is_ready());
        stability.repaired();
        assert_eq!(stability.in_place(now), HOLD_TIME);
        assert!(!stability.is_ready());
    }
}
