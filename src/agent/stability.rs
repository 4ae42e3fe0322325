//! Whether what was installed stays in place, and how long to pause while another process keeps
//! reverting it.
//!
//! A single repair of a ready node does not change its readiness: the file was missing for
//! milliseconds, and a taint that comes and goes helps no pod. What was not ready before becomes so
//! only after the installation has stayed in place for [`HOLD`]: a process that owns the directory
//! (Cilium with `cni.exclusive=true`) reverts within milliseconds, but not at once.

use std::time::{Duration, Instant};

/// How long everything must stay in place, from check to check, before the installation is stable.
pub(super) const HOLD: Duration = Duration::from_secs(3);
/// The number of repairs in a row without a pause and without effect on a ready node: an upgrade of
/// the cluster network writes its file several times.
const FREE: u32 = 3;
const LONGEST: Duration = Duration::from_secs(60);

/// What the checks of late have found.
#[derive(Debug, Default)]
pub(super) struct Stability {
    /// Since when every check has found everything in place.
    in_place: Option<Instant>,
    /// Repairs since the installation was stable last.
    repairs: u32,
    /// Whether the node counts as ready.
    ready: bool,
}

impl Stability {
    /// Records a check that found everything in place. Returns how long it must stay so before it
    /// is stable.
    pub(super) fn in_place(&mut self, now: Instant) -> Duration {
        let since = *self.in_place.get_or_insert(now);
        let left = HOLD.saturating_sub(now.duration_since(since));
        if self.repairs == 0 || left.is_zero() {
            (self.repairs, self.ready) = (0, true);
            return Duration::ZERO;
        }
        left
    }

    /// Records a repair. Returns the pause before the next check: none after the first few in a
    /// row, then twice as long after each.
    pub(super) fn repaired(&mut self) -> Duration {
        self.in_place = None;
        self.repairs = self.repairs.saturating_add(1);
        self.ready &= !self.is_contested();
        match self.repairs.saturating_sub(FREE) {
            0 => Duration::ZERO,
            more => Duration::from_secs(1 << (more - 1).min(6)).min(LONGEST),
        }
    }

    /// Records a check that could not bring everything in place.
    pub(super) fn incomplete(&mut self) {
        (self.in_place, self.ready) = (None, false);
    }

    /// Whether the node counts as ready.
    pub(super) fn is_ready(&self) -> bool {
        self.ready
    }

    /// Whether another process keeps reverting what was installed.
    pub(super) fn is_contested(&self) -> bool {
        self.repairs > FREE
    }

    /// The number of repairs since the installation was stable last.
    pub(super) fn repairs(&self) -> u32 {
        self.repairs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(1);

    /// One that has found everything in place.
    fn ready(now: Instant) -> Stability {
        let mut stability = Stability::default();
        assert!(!stability.is_ready());
        assert_eq!(stability.in_place(now), Duration::ZERO);
        assert!(stability.is_ready(), "what a first check finds in place is not this agent's work");
        stability
    }

    #[test]
    fn what_was_just_installed_is_ready_once_it_has_held() {
        let (mut stability, now) = (Stability::default(), Instant::now());
        assert_eq!(stability.repaired(), Duration::ZERO);
        assert_eq!(stability.in_place(now), HOLD);
        assert_eq!(stability.in_place(now + HOLD - SHORT), SHORT);
        assert!(!stability.is_ready());
        assert_eq!(stability.in_place(now + HOLD), Duration::ZERO);
        assert!(stability.is_ready());
    }

    #[test]
    fn honest_repairs_neither_change_readiness_nor_add_up() {
        let mut now = Instant::now();
        let mut stability = ready(now);
        for _ in 0..100 {
            assert_eq!(stability.repaired(), Duration::ZERO, "each comes at once");
            assert!(stability.is_ready());
            assert_eq!(stability.in_place(now), HOLD, "and is checked again");
            now += HOLD;
            assert_eq!(stability.in_place(now), Duration::ZERO);
        }
    }

    #[test]
    fn a_fight_is_not_ready_and_is_fought_ever_slower_until_it_is_over() {
        let mut now = Instant::now();
        let mut stability = ready(now);
        let mut pauses = Vec::new();
        for turn in 1..=10 {
            pauses.push(stability.repaired().as_secs());
            assert_eq!(stability.is_ready(), turn <= FREE, "{turn}");
            // In place when it is looked at, and reverted before it has held.
            stability.in_place(now);
            now += HOLD - SHORT;
        }
        assert_eq!(pauses, [0, 0, 0, 1, 2, 4, 8, 16, 32, 60]);
        assert!(stability.is_contested() && !stability.is_ready());
        stability.in_place(now);
        assert_eq!(stability.in_place(now + HOLD), Duration::ZERO);
        assert!(stability.is_ready() && !stability.is_contested());
        assert_eq!(stability.repaired(), Duration::ZERO);
    }

    #[test]
    fn a_pause_does_not_count_as_time_in_place() {
        let now = Instant::now();
        let mut stability = ready(now);
        for minute in 0..5 {
            stability.repaired();
            assert_eq!(stability.in_place(now + minute * LONGEST), HOLD);
        }
        assert!(!stability.is_ready());
    }

    #[test]
    fn what_is_incomplete_is_not_ready_and_must_hold_again() {
        let now = Instant::now();
        let mut stability = ready(now);
        stability.incomplete();
        assert!(!stability.is_ready());
        stability.repaired();
        assert_eq!(stability.in_place(now), HOLD);
        assert!(!stability.is_ready());
    }
}
