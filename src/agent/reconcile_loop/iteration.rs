//! The result of one iteration of the loop, and its consequences: the node's readiness, its taint, and the next
//! iteration.
//!
//! A single repair of a ready node does not change its readiness: the file was missing for milliseconds, and a taint
//! that comes and goes helps no pod. A node that was not ready becomes ready only after the installation has stayed in
//! place for [`HOLD_TIME`]: a process that owns the directory (Cilium with `cni.exclusive=true`) reverts it within
//! milliseconds, but not at once.

use crate::agent::install::InstallPlan;
use crate::agent::metrics::Metrics;
use std::time::{Duration, Instant};

/// The interval of reconciliations without a change: not every file system reports changes.
pub(super) const RESYNC_INTERVAL: Duration = Duration::from_secs(60);
/// The pause after a failure, for example because of a full disk.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// The pause after the own list followed its source, which limits the load while another process keeps writing that.
const FOLLOW_DELAY: Duration = Duration::from_millis(50);
/// The result of one iteration.
pub(super) enum Iteration {
    /// The node has the desired state. The text has the notes of the plan.
    Settled(String),
    /// The node has the desired state, except the credentials of the plugin, as the text describes.
    Lacks(String),
    /// This plan was applied.
    Repaired(Box<InstallPlan>),
    /// The own list was written again because its source changed. Everything else was in place.
    Followed(Box<InstallPlan>),
    /// Something is missing that another tool must provide, described by the text.
    Waits(String),
    /// Multus skips its auxiliary chain because of another tool's file, described by the text.
    ChainSkipped(String),
    Failed(String),
    /// The installation on the node belongs to another DaemonSet, which the text names.
    Occupied(String),
}

/// The consequence of an iteration for the node's readiness.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// Everything is in place, but not for long enough.
    Confirming,
    /// Not ready for this reason.
    Not(String),
}

impl Iteration {
    /// Returns the readiness of the node, the delay before the next iteration, and whether to ignore events until then.
    pub(super) fn assess(&self, stability: &mut Stability, now: Instant) -> (Readiness, Duration, bool) {
        let (readiness, delay, ignore_events) = self.assess_files(stability, now);
        match self.lacks() {
            Some(reason) if !matches!(readiness, Readiness::Not(_)) => {
                stability.not_ready();
                (Readiness::Not(reason), delay.min(RETRY_DELAY), ignore_events)
            }
            _ => (readiness, delay, ignore_events),
        }
    }

    /// Returns which credentials the plugin lacks.
    fn lacks(&self) -> Option<String> {
        match self {
            Self::Lacks(reason) => Some(reason.clone()),
            Self::Repaired(plan) | Self::Followed(plan) => {
                plan.lacks.as_ref().map(|lacking| format!("missing: {lacking}"))
            }
            _ => None,
        }
    }

    /// As [`Self::assess`], without the credentials.
    fn assess_files(&self, stability: &mut Stability, now: Instant) -> (Readiness, Duration, bool) {
        match self {
            Self::Settled(_) | Self::Lacks(_) | Self::Followed(_) => {
                let left = stability.in_place(now);
                let readiness = if stability.is_ready() { Readiness::Ready } else { Readiness::Confirming };
                match self {
                    Self::Followed(_) => (readiness, FOLLOW_DELAY, true),
                    _ if left.is_zero() => (readiness, RESYNC_INTERVAL, false),
                    _ => (readiness, left, false),
                }
            }
            Self::Repaired(plan) => {
                let pause = stability.repaired();
                let readiness = match plan.unmet() {
                    Some(missing) => {
                        stability.incomplete();
                        Readiness::Not(missing)
                    }
                    None if stability.is_contested() => Readiness::Not(contested(plan, stability)),
                    None if stability.is_ready() => Readiness::Ready,
                    None => Readiness::Confirming,
                };
                (readiness, pause, true)
            }
            Self::Waits(reason) | Self::ChainSkipped(reason) | Self::Occupied(reason) => {
                stability.incomplete();
                (Readiness::Not(reason.clone()), RETRY_DELAY, false)
            }
            Self::Failed(reason) => {
                stability.incomplete();
                (Readiness::Not(reason.clone()), RETRY_DELAY, true)
            }
        }
    }

    /// Returns whether the node needs no taint; `None` if the taint does not change: an agent that has just replaced the
    /// program, as in an upgrade, does not know yet.
    pub(super) fn taint_decision(&self, readiness: &Readiness) -> Option<bool> {
        match (self, readiness) {
            (Self::Occupied(_), _) | (_, Readiness::Confirming) => None,
            (_, Readiness::Ready) => Some(true),
            (_, Readiness::Not(_)) => Some(false),
        }
    }

    pub(super) fn count(&self, metrics: &Metrics, readiness: &Readiness) {
        metrics.ready.set((*readiness == Readiness::Ready).into());
        match self {
            Self::Repaired(_) => metrics.install("done"),
            Self::Failed(_) | Self::Occupied(_) => metrics.install("failed"),
            _ => {}
        }
    }
}

impl Readiness {
    /// Returns the reason for `/readyz`; `None` if the node is ready.
    pub(super) fn obstacle(&self) -> Option<String> {
        match self {
            Self::Ready => None,
            Self::Confirming => {
                Some(format!("installed, but not yet confirmed: ready after {} s in place", HOLD_TIME.as_secs()))
            }
            Self::Not(reason) => Some(reason.clone()),
        }
    }
}

/// Returns why a node is not ready although the plan was just applied.
fn contested(plan: &InstallPlan, stability: &Stability) -> String {
    let done = plan.actions.iter().map(ToString::to_string).chain(plan.notes.iter().cloned());
    format!(
        "another process keeps reverting the installation: {} repairs in a row did not last {} s, the last one: {}; \
         stop that process (Cilium: set cni.exclusive=false)",
        stability.repairs(),
        HOLD_TIME.as_secs(),
        done.collect::<Vec<_>>().join("; ")
    )
}

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

    /// Returns the decision about the taint and the text of `/readyz`.
    fn assessed(iteration: &Iteration, stability: &mut Stability, now: Instant) -> (Option<bool>, Option<String>) {
        let (readiness, ..) = iteration.assess(stability, now);
        (iteration.taint_decision(&readiness), readiness.obstacle())
    }

    #[test]
    fn the_taint_is_removed_from_a_ready_node_and_added_to_one_that_is_not_ready() {
        let (now, settled) = (Instant::now(), || Iteration::Settled(String::new()));
        let repaired = || Iteration::Repaired(Box::default());
        let fresh = &mut Stability::default();
        for iteration in [repaired(), settled()] {
            let (taint, obstacle) = assessed(&iteration, fresh, now);
            let is_confirming = obstacle.is_some_and(|obstacle| obstacle.contains("not yet confirmed"));
            assert!(taint.is_none() && is_confirming, "the taint is unchanged");
        }
        assert_eq!(assessed(&settled(), fresh, now + HOLD_TIME), (Some(true), None));
        assert_eq!(assessed(&repaired(), fresh, now), (Some(true), None), "one repair changes nothing");
        for iteration in [Iteration::Waits("reason".into()), Iteration::Failed("reason".into())] {
            assert_eq!(assessed(&iteration, fresh, now), (Some(false), Some("reason".into())));
        }
        let missing = InstallPlan { waits_for: Some("a list".into()), ..InstallPlan::default() };
        assert_eq!(
            assessed(&Iteration::Repaired(Box::new(missing)), fresh, now),
            (Some(false), Some("missing: a list".into()))
        );
        let lacking = InstallPlan { lacks: Some("a token".into()), ..InstallPlan::default() };
        let (without, not_ready) = (&mut Stability::default(), (Some(false), Some("missing: a token".to_owned())));
        for round in 0..5 {
            for iteration in [
                Iteration::Repaired(Box::new(lacking.clone())),
                Iteration::Followed(Box::new(lacking.clone())),
                Iteration::Lacks("missing: a token".into()),
            ] {
                assert_eq!(assessed(&iteration, without, now + 2 * round * HOLD_TIME), not_ready);
            }
            let held = now + (2 * round + 1) * HOLD_TIME;
            assert_eq!(assessed(&Iteration::Lacks("missing: a token".into()), without, held), not_ready);
            assert_eq!(without.repairs(), 0, "the files stay in place, so the next repair is not delayed");
        }
        let contested = &mut Stability::default();
        for _ in 0..4 {
            contested.repaired();
        }
        let (taint, obstacle) = assessed(&repaired(), contested, now);
        assert!(taint == Some(false) && obstacle.is_some_and(|obstacle| obstacle.contains("keeps reverting")));
        assert_eq!(assessed(&settled(), contested, now).0, None, "it must stay in place first");
    }

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
