//! The report about the policies of the node's pods, for the agent socket.

use crate::cluster::agent::PoliciesReport;
use std::sync::{Arc, Mutex, PoisonError};

/// The last report. Clones share it.
#[derive(Clone, Default)]
pub(in crate::agent) struct SharedPolicies(Arc<Mutex<PoliciesReport>>);

impl SharedPolicies {
    /// Returns the last report.
    pub(in crate::agent) fn report(&self) -> PoliciesReport {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the report.
    pub(super) fn set(&self, report: PoliciesReport) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }
}
