//! What the loop logs.

use super::iteration::{HOLD_TIME, Iteration, Readiness};
use crate::agent::install::InstallPlan;
use std::time::{Duration, Instant};

/// The last logged state; only changes of it are logged.
#[derive(Debug, Default)]
pub(super) struct LastLogged {
    state: String,
    rejected: Option<String>,
    followed: Option<Instant>,
    ready: bool,
}

impl LastLogged {
    /// Logs each rejected configuration once, and that the newest one is accepted again.
    pub(super) fn rejected(&mut self, reason: Option<&str>) {
        if self.rejected.as_deref() == reason {
            return;
        }
        match reason {
            Some(reason) => tracing::error!("{reason}"),
            None => tracing::info!("the newest configuration is accepted"),
        }
        self.rejected = reason.map(str::to_owned);
    }

    /// Logs once that another agent leads, and why this one could not.
    pub(super) fn standby(&mut self, obstacle: Option<&str>) {
        let state = "another agent leads on this node; this agent is on standby";
        let state = obstacle.map_or_else(|| state.to_owned(), |why| format!("{state} and could not lead: {why}"));
        if self.state != state {
            match obstacle {
                None => tracing::info!("{state}"),
                Some(_) => tracing::error!("{state}"),
            }
            self.state = state;
        }
    }

    /// Logs that the own list followed its source, once in [`HOLD_TIME`].
    fn followed(&mut self, plan: &InstallPlan) {
        if self.followed.is_none_or(|logged| logged.elapsed() > HOLD_TIME) {
            let actions = plan.actions.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            tracing::info!("the cluster network's configuration list changed: {actions}");
            self.followed = Some(Instant::now());
        }
    }

    /// Logs each applied action, each new state, and when the node becomes ready.
    pub(super) fn iteration(&mut self, iteration: &Iteration, readiness: &Readiness, delay: Duration) {
        let state = match iteration {
            Iteration::Repaired(plan) => {
                plan.actions.iter().for_each(|action| tracing::info!("{action}"));
                if let Readiness::Not(reason) = readiness
                    && plan.unmet().is_none()
                {
                    tracing::warn!("{reason}; next check in {} s", delay.as_secs());
                }
                String::new()
            }
            Iteration::Followed(plan) => {
                self.followed(plan);
                self.state.clone()
            }
            Iteration::Settled(state)
            | Iteration::Lacks(state)
            | Iteration::Waits(state)
            | Iteration::ChainSkipped(state)
            | Iteration::Failed(state)
            | Iteration::Occupied(state) => state.clone(),
        };
        if self.state != state && !state.is_empty() {
            match iteration {
                Iteration::Failed(_) | Iteration::Occupied(_) | Iteration::ChainSkipped(_) => {
                    tracing::error!("{state}");
                }
                Iteration::Waits(_) | Iteration::Lacks(_) => tracing::warn!("{state}"),
                _ => tracing::info!("{state}"),
            }
        }
        self.state = state;
        let ready = *readiness == Readiness::Ready;
        if ready && !self.ready {
            tracing::info!("the plugin is ready on this node");
        }
        self.ready = ready;
    }
}
