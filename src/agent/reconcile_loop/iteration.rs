//! The result of one iteration of the loop, and its consequences: the node's readiness, its taint, the next iteration,
//! and what is logged.
//!
//! A single repair of a ready node does not change its readiness: the file was missing for milliseconds, and a taint
//! that comes and goes helps no pod. A node that was not ready becomes ready only after the installation has stayed in
//! place for [`HOLD_TIME`]: a process that owns the directory (Cilium with `cni.exclusive=true`) reverts it within
//! milliseconds, but not at once.

use crate::agent::install::{InstallPlan, Obstacle};
use crate::agent::metrics::Metrics;
use crate::cluster::Event;
use std::time::{Duration, Instant};

/// The interval of reconciliations without a change: not every file system reports changes.
pub(super) const RESYNC_INTERVAL: Duration = Duration::from_secs(60);
/// The pause after a failure, for example because of a full disk.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// The pause after the own list followed its source, which limits the load while another process keeps writing that.
const FOLLOW_DELAY: Duration = Duration::from_millis(50);

/// The consequence of an iteration for the node's readiness.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// Everything is in place, but not for long enough.
    Confirming,
    /// Not ready for this reason.
    Not(String),
}

/// Returns the readiness of the node after a plan, the delay before the next iteration, and whether to ignore events until
/// then.
pub(super) fn assess(plan: &InstallPlan, stability: &mut Stability, now: Instant) -> (Readiness, Duration, bool) {
    let has_changed = !plan.actions.is_empty();
    let is_repair = has_changed && !plan.follows;
    if let Some((obstacle, _)) = &plan.obstacle {
        let delay = match (obstacle, has_changed) {
            (Obstacle::Failed, _) | (_, false) => RETRY_DELAY,
            _ if plan.follows => FOLLOW_DELAY,
            _ => stability.repaired(),
        };
        stability.incomplete();
        return (Readiness::Not(state(plan)), delay, has_changed || *obstacle == Obstacle::Failed);
    }
    let left = if is_repair { stability.repaired() } else { stability.in_place(now) };
    let delay = match has_changed {
        true if plan.follows => FOLLOW_DELAY,
        false if left.is_zero() => RESYNC_INTERVAL,
        _ => left,
    };
    let readiness = match plan.lacks {
        _ if is_repair && stability.is_contested() => Readiness::Not(contested(plan, stability)),
        Some(_) => {
            // Everything that can be installed is in place.
            stability.ready = false;
            return (Readiness::Not(state(plan)), delay.min(RETRY_DELAY), has_changed);
        }
        None if stability.ready => Readiness::Ready,
        None => Readiness::Confirming,
    };
    (readiness, delay, has_changed)
}

/// Returns whether the node needs no taint; `None` if the taint stays as it is: the installation belongs to another
/// DaemonSet, or this agent has just replaced the program, as in an upgrade, and must confirm that it stays in place.
pub(super) fn taint_decision(plan: &InstallPlan, readiness: &Readiness) -> Option<bool> {
    match (&plan.obstacle, readiness) {
        (Some((Obstacle::Occupied, _)), _) | (_, Readiness::Confirming) => None,
        (_, Readiness::Ready) => Some(true),
        (_, Readiness::Not(_)) => Some(false),
    }
}

pub(super) fn count(plan: &InstallPlan, metrics: &Metrics, readiness: &Readiness) {
    metrics.set("install_ready", [], *readiness == Readiness::Ready);
    match &plan.obstacle {
        Some((Obstacle::Failed | Obstacle::Occupied, _)) => metrics.count("installs", [("result", "failed")]),
        _ if !plan.actions.is_empty() && !plan.follows => metrics.count("installs", [("result", "done")]),
        _ => {}
    }
}

/// Returns the Event for a rejected configuration, for another reason that prevents the installation, or for Multus's
/// auxiliary chain if Multus skips it.
pub(super) fn event(plan: &InstallPlan, rejected: Option<&str>) -> Option<Event> {
    let (reason, message) = match (rejected, &plan.obstacle) {
        (Some(message), _) => ("DetourConfigurationRejected", message.to_owned()),
        (None, Some((Obstacle::Waits, _))) => return None,
        (None, Some((Obstacle::ChainSkipped, _))) => ("DetourChainSkipped", state(plan)),
        (None, Some(_)) => ("DetourNotInstalled", state(plan)),
        (None, None) if plan.lacks.is_some() => ("DetourNotInstalled", state(plan)),
        (None, None) => return None,
    };
    Some(Event { warning: true, reason: reason.into(), message })
}

/// Returns the state of a node after a plan, with the notes of the plan.
fn state(plan: &InstallPlan) -> String {
    let state = match (plan.unmet(), &plan.lacks) {
        (Some(unmet), _) => unmet.to_owned(),
        (None, Some(lacking)) => format!("missing: {lacking}"),
        (None, None) => "the node has the desired state".to_owned(),
    };
    [&[state], plan.notes.as_slice()].concat().join("; ")
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
        stability.repairs,
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

    /// Whether another process keeps reverting what was installed.
    pub(super) fn is_contested(&self) -> bool {
        self.repairs > FREE_REPAIRS
    }
}

/// What was logged last; only changes are logged.
#[derive(Debug, Default)]
pub(super) struct LastLogged {
    state: String,
    rejected: String,
    followed: Option<Instant>,
    ready: bool,
}

/// Whether `state` is new and not empty.
fn is_new(last: &mut String, state: &str) -> bool {
    let is_new = last != state;
    state.clone_into(last);
    is_new && !state.is_empty()
}

impl LastLogged {
    /// Logs each rejected configuration once, and that the newest one is accepted again.
    pub(super) fn rejected(&mut self, reason: Option<&str>) {
        if !self.rejected.is_empty() && reason.is_none() {
            tracing::info!("the newest configuration is accepted");
        }
        if is_new(&mut self.rejected, reason.unwrap_or_default()) {
            tracing::error!("{}", self.rejected);
        }
    }

    /// Logs once that another agent leads, and why this one could not.
    pub(super) fn standby(&mut self, obstacle: Option<&str>) {
        let state = "another agent leads on this node; this agent is on standby".to_owned();
        let state = state + &obstacle.map(|why| format!(" and could not lead: {why}")).unwrap_or_default();
        match obstacle {
            _ if !is_new(&mut self.state, &state) => {}
            None => tracing::info!("{state}"),
            Some(_) => tracing::error!("{state}"),
        }
    }

    /// Logs each applied action, each new state, and when the node becomes ready. That the own list follows its source is
    /// logged once in [`HOLD_TIME`].
    pub(super) fn iteration(&mut self, plan: &InstallPlan, readiness: &Readiness, delay: Duration) {
        if plan.follows {
            if self.followed.is_none_or(|logged| logged.elapsed() > HOLD_TIME) {
                let actions = plan.actions.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
                tracing::info!("the cluster network's configuration list changed: {actions}");
                self.followed = Some(Instant::now());
            }
            return;
        }
        let state = state(plan);
        if !plan.actions.is_empty() {
            self.state.clear();
            plan.actions.iter().for_each(|action| tracing::info!("{action}"));
        }
        match (&plan.obstacle, readiness) {
            (None, Readiness::Not(reason)) if !plan.actions.is_empty() => {
                tracing::warn!("{reason}; next check in {} s", delay.as_secs());
            }
            (None, _) if !plan.actions.is_empty() => {}
            _ if !is_new(&mut self.state, &state) => {}
            (Some((Obstacle::Waits, _)), _) => tracing::warn!("{state}"),
            (Some(_), _) => tracing::error!("{state}"),
            (None, _) if plan.lacks.is_some() => tracing::warn!("{state}"),
            (None, _) => tracing::info!("{state}"),
        }
        let ready = *readiness == Readiness::Ready;
        if ready && !self.ready {
            tracing::info!("the plugin is ready on this node");
        }
        self.ready = ready;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::install::{Change, FileAction, HostPath, Role};

    /// Returns the decision about the taint and the text of `/readyz`.
    fn assessed(plan: &InstallPlan, stability: &mut Stability, now: Instant) -> (Option<bool>, Option<String>) {
        let (readiness, ..) = assess(plan, stability, now);
        (taint_decision(plan, &readiness), readiness.obstacle())
    }

    #[test]
    fn the_taint_is_removed_from_a_ready_node_and_added_to_one_that_is_not_ready() {
        let (now, settled) = (Instant::now(), InstallPlan::default);
        let change = Change::Text(String::new(), 0);
        let action = FileAction { path: HostPath::new("/a").expect("a path"), role: Role::Entry, change, before: None };
        let repair = InstallPlan { actions: vec![action], ..InstallPlan::default() };
        let repaired = || repair.clone();
        let fresh = &mut Stability::default();
        for plan in [repaired(), settled()] {
            let (taint, obstacle) = assessed(&plan, fresh, now);
            let is_confirming = obstacle.is_some_and(|obstacle| obstacle.contains("not yet confirmed"));
            assert!(taint.is_none() && is_confirming, "the taint is unchanged");
        }
        assert_eq!(assessed(&settled(), fresh, now + HOLD_TIME), (Some(true), None));
        assert_eq!(assessed(&repaired(), fresh, now), (Some(true), None), "one repair changes nothing");
        for obstacle in [Obstacle::Waits, Obstacle::Failed] {
            let plan = InstallPlan::impossible(obstacle, "reason".into());
            assert_eq!(assessed(&plan, fresh, now), (Some(false), Some("reason".into())));
        }
        let occupied = InstallPlan::impossible(Obstacle::Occupied, "reason".into());
        assert_eq!(assessed(&occupied, fresh, now), (None, Some("reason".into())));
        let missing = InstallPlan { obstacle: Some((Obstacle::Waits, "missing: a list".into())), ..repair.clone() };
        assert_eq!(assessed(&missing, fresh, now), (Some(false), Some("missing: a list".into())));
        let failed = InstallPlan { obstacle: Some((Obstacle::Failed, "reason".into())), ..repair.clone() };
        let again = &mut Stability::default();
        assert!((0..5).all(|_| assess(&failed, again, now).1 == RETRY_DELAY && again.repairs == 0));
        let lacking = InstallPlan { lacks: Some("a token".into()), ..InstallPlan::default() };
        let restored = InstallPlan { actions: repair.actions.clone(), ..lacking.clone() };
        let (without, not_ready) = (&mut Stability::default(), (Some(false), Some("missing: a token".to_owned())));
        for round in 0..5 {
            for plan in [&restored, &InstallPlan { follows: true, ..restored.clone() }, &lacking] {
                assert_eq!(assessed(plan, without, now + 2 * round * HOLD_TIME), not_ready);
            }
            let held = now + (2 * round + 1) * HOLD_TIME;
            assert_eq!(assessed(&lacking, without, held), not_ready);
            assert_eq!(without.repairs, 0, "the files stay in place, so the next repair is not delayed");
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
        assert!(!stability.ready);
        assert_eq!(stability.in_place(now), Duration::ZERO);
        assert!(stability.ready, "an earlier agent installed it");
        stability
    }

    #[test]
    fn a_new_installation_is_ready_after_the_hold_time() {
        let (mut stability, now) = (Stability::default(), Instant::now());
        assert_eq!(stability.repaired(), Duration::ZERO);
        assert_eq!(stability.in_place(now), HOLD_TIME);
        assert_eq!(stability.in_place(now + HOLD_TIME - SHORT), SHORT);
        assert!(!stability.ready);
        assert_eq!(stability.in_place(now + HOLD_TIME), Duration::ZERO);
        assert!(stability.ready);
    }

    #[test]
    fn single_repairs_neither_change_readiness_nor_add_up() {
        let mut now = Instant::now();
        let mut stability = ready(now);
        for _ in 0..100 {
            assert_eq!(stability.repaired(), Duration::ZERO, "without a pause");
            assert!(stability.ready);
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
            assert_eq!(stability.ready, repair <= FREE_REPAIRS, "{repair}");
            // In place at the check, and reverted before the hold time is over.
            stability.in_place(now);
            now += HOLD_TIME - SHORT;
        }
        assert_eq!(pauses, [0, 0, 0, 1, 2, 4, 8, 16, 32, 60]);
        assert!(stability.is_contested() && !stability.ready);
        stability.in_place(now);
        assert_eq!(stability.in_place(now + HOLD_TIME), Duration::ZERO);
        assert!(stability.ready && !stability.is_contested());
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
        assert!(!stability.ready);
    }

    #[test]
    fn an_incomplete_installation_is_not_ready_and_must_last_the_hold_time_again() {
        let now = Instant::now();
        let mut stability = ready(now);
        stability.incomplete();
        assert!(!stability.ready);
        stability.repaired();
        assert_eq!(stability.in_place(now), HOLD_TIME);
        assert!(!stability.ready);
    }
}
