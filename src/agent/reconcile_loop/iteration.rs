//! The result of one iteration of the loop, and its consequences: the node's readiness, its taint, and the next
//! iteration.

use crate::agent::install::InstallPlan;
use crate::agent::services::TaintDecision;
use crate::agent::stability::{HOLD_TIME, Stability};
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
    /// This plan was applied.
    Repaired(Box<InstallPlan>),
    /// The own list was written again because its source changed. Everything else was in place.
    Followed(Box<InstallPlan>),
    /// Something is missing that another tool must provide, described by the text.
    Waits(String),
    /// Multus skips its auxiliary chain because of another tool's file, described by the text.
    ChainSkipped(String),
    /// The named agent, which started later, leads.
    Yields(String),
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
        match self {
            Self::Settled(_) | Self::Followed(_) => {
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
                let readiness = match plan.lacks() {
                    Some(missing) => {
                        stability.incomplete();
                        Readiness::Not(format!("missing: {missing}"))
                    }
                    None if stability.is_contested() => Readiness::Not(contested(plan, stability)),
                    None if stability.is_ready() => Readiness::Ready,
                    None => Readiness::Confirming,
                };
                (readiness, pause, true)
            }
            Self::Yields(_) => (Readiness::Ready, RETRY_DELAY, false),
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

    /// Returns the decision about the node's taint. The taint belongs to the agent that leads, and an
    /// agent that has just replaced the program, as in an upgrade, does not change it yet.
    pub(super) fn taint_decision(&self, readiness: &Readiness) -> TaintDecision {
        match (self, readiness) {
            (Self::Yields(_) | Self::Occupied(_), _) | (_, Readiness::Confirming) => TaintDecision::Unchanged,
            (_, Readiness::Ready) => TaintDecision::Remove,
            (_, Readiness::Not(_)) => TaintDecision::Add,
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
    let next_step = if plan.removes_renamed_list() {
        "Cilium renames the file: set cni.exclusive=false in its chart"
    } else {
        "stop that process (Cilium: set cni.exclusive=false)"
    };
    format!(
        "another process keeps reverting the installation: {} repairs in a row did not last {} s, the last one: {}; \
         {next_step}",
        stability.repairs(),
        HOLD_TIME.as_secs(),
        done.collect::<Vec<_>>().join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the decision about the taint and the text of `/readyz`.
    fn assessed(iteration: &Iteration, stability: &mut Stability, now: Instant) -> (TaintDecision, Option<String>) {
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
            assert!(taint == TaintDecision::Unchanged && is_confirming, "the taint is unchanged");
        }
        assert_eq!(assessed(&settled(), fresh, now + HOLD_TIME), (TaintDecision::Remove, None));
        assert_eq!(assessed(&repaired(), fresh, now), (TaintDecision::Remove, None), "one repair changes nothing");
        assert_eq!(assessed(&Iteration::Yields("later".into()), fresh, now), (TaintDecision::Unchanged, None));
        for iteration in [Iteration::Waits("reason".into()), Iteration::Failed("reason".into())] {
            assert_eq!(assessed(&iteration, fresh, now), (TaintDecision::Add, Some("reason".into())));
        }
        let missing = InstallPlan { waits_for: Some("a list".into()), ..InstallPlan::default() };
        assert_eq!(
            assessed(&Iteration::Repaired(Box::new(missing)), fresh, now),
            (TaintDecision::Add, Some("missing: a list".into()))
        );
        let contested = &mut Stability::default();
        for _ in 0..4 {
            contested.repaired();
        }
        let (taint, obstacle) = assessed(&repaired(), contested, now);
        assert!(taint == TaintDecision::Add && obstacle.is_some_and(|obstacle| obstacle.contains("keeps reverting")));
        assert_eq!(assessed(&settled(), contested, now).0, TaintDecision::Unchanged, "it must stay in place first");
    }
}
