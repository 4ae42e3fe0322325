//! Running pods follow changes of their policy: of their annotations, their namespace's, and the node's configuration.
//!
//! | file | content |
//! |---|---|
//! | `worker` | the thread `live-policy`: which pods are evaluated, and when; the report and the metrics |
//! | `tracked_pod` | the state of a pod between two evaluations; its reports |
//! | `decision` | whether a pod is current, and what it gets (pure) |
//! | `change_limit` | how often a pod is changed (pure) |
//! | `wording`, `texts` | changes in words; Events and the condition (pure) |
//! | `jobs` | the threads that apply changes |

mod change_limit;
mod decision;
mod jobs;
mod texts;
mod tracked_pod;
mod wording;
mod worker;

use crate::cluster::agent::PoliciesReport;
use std::sync::{Arc, Mutex, PoisonError};
pub(super) use worker::{NodeState, Worker};

/// The report for the agent socket. Clones share it.
#[derive(Clone, Default)]
pub(super) struct SharedPolicies(Arc<Mutex<PoliciesReport>>);

impl SharedPolicies {
    /// Returns the last report.
    pub(super) fn report(&self) -> PoliciesReport {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, report: PoliciesReport) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }
}
