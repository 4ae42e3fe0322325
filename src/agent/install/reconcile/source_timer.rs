//! How long the source of an own list is unusable.

use super::reconcile;
use crate::agent::install::error::InstallError;
use crate::agent::install::plan::InstallPlan;
use crate::agent::install::state::{DesiredState, FoundState};
use std::time::{Duration, Instant};

/// A timer that runs while the source of the own list is unusable.
#[derive(Debug, Default)]
pub struct SourceTimer {
    since: Option<Instant>,
    left: Option<Duration>,
}

impl SourceTimer {
    /// Returns the plan of [`reconcile`]. While the source of the own list is unusable, the plan keeps the last copy. When
    /// the timer has expired, the plan may replace the source.
    ///
    /// # Errors
    /// As [`reconcile`].
    pub fn plan(&mut self, desired: &DesiredState, mut found: FoundState) -> Result<InstallPlan, InstallError> {
        let mut plan = reconcile(desired, &found)?;
        let Some(timeout) = plan.source_timeout else {
            *self = Self::default();
            return Ok(plan);
        };
        let left = timeout.saturating_sub(self.since.get_or_insert_with(Instant::now).elapsed());
        if left.is_zero() {
            found.source_expired = true;
            plan = reconcile(desired, &found)?;
            // The timer of another source starts anew.
            self.since.take_if(|_| plan.waits_for.is_none());
        }
        self.left = Some(left).filter(|left| !left.is_zero());
        Ok(plan)
    }

    /// Returns, once for each plan, the time after which the plan must be made again.
    pub fn take_left(&mut self) -> Option<Duration> {
        self.left.take()
    }
}
