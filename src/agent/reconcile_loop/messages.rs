//! What the loop logs.

use super::iteration::{HOLD_TIME, Iteration, Readiness};
use std::time::{Duration, Instant};

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
        let state = "another agent leads on this node; this agent is on standby";
        match obstacle {
            None if is_new(&mut self.state, state) => tracing::info!("{state}"),
            None => {}
            Some(why) => {
                let state = format!("{state} and could not lead: {why}");
                if is_new(&mut self.state, &state) {
                    tracing::error!("{state}");
                }
            }
        }
    }

    /// Logs each applied action, each new state, and when the node becomes ready. That the own list follows its source is
    /// logged once in [`HOLD_TIME`].
    pub(super) fn iteration(&mut self, iteration: &Iteration, readiness: &Readiness, delay: Duration) {
        let state = match iteration {
            Iteration::Repaired(plan) => {
                plan.actions.iter().for_each(|action| tracing::info!("{action}"));
                if let Readiness::Not(reason) = readiness
                    && plan.unmet().is_none()
                {
                    tracing::warn!("{reason}; next check in {} s", delay.as_secs());
                }
                ""
            }
            Iteration::Followed(plan) => {
                if self.followed.is_none_or(|logged| logged.elapsed() > HOLD_TIME) {
                    let actions = plan.actions.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
                    tracing::info!("the cluster network's configuration list changed: {actions}");
                    self.followed = Some(Instant::now());
                }
                return;
            }
            Iteration::Settled(state)
            | Iteration::Lacks(state)
            | Iteration::Waits(state)
            | Iteration::ChainSkipped(state)
            | Iteration::Failed(state)
            | Iteration::Occupied(state) => state,
        };
        if is_new(&mut self.state, state) {
            match iteration {
                Iteration::Failed(_) | Iteration::Occupied(_) | Iteration::ChainSkipped(_) => {
                    tracing::error!("{state}");
                }
                Iteration::Waits(_) | Iteration::Lacks(_) => tracing::warn!("{state}"),
                _ => tracing::info!("{state}"),
            }
        }
        let ready = *readiness == Readiness::Ready;
        if ready && !self.ready {
            tracing::info!("the plugin is ready on this node");
        }
        self.ready = ready;
    }
}
