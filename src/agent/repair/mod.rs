//! Repair of pods that are in the mesh and bypass it: they raced the plugin, or lost their rules.
//!
//! | file | what it knows |
//! |---|---|
//! | `decision`, `selector` | whether a pod needs it, and why (pure) |
//! | `queue`, `tries`, `deletions` | who waits; how often something is tried, and when again (pure) |
//! | `watched` | what is remembered of a pod between two looks |
//! | `worker`, `round` | all pods, one look after the other; what is found and done in one |
//! | `in_place`, `action` | the three ways to repair, each with its event |
//!
//! In place is by way of [`crate::plugin`] alone: what a call of the runtime does is done again, or for
//! the first time, and then read back from the kernel.

mod decision;
mod in_place;
mod repair_pass;
mod retry_budget;
mod selector;
mod watched;
mod worker;

pub use decision::{Cause, Criteria, Suspicion, diagnose, suspect};
pub use repair_pass::RepairResult;
pub use repair_pass::{RepairMode, RepairOutcome};
pub use selector::Selector;
pub use worker::RepairWorker;

use super::ObservedPod;
use super::install::Installed;
use std::sync::Arc;
use std::time::Duration;

/// What is repaired, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairSettings {
    /// Who is looked after.
    pub criteria: Criteria,
    /// What is done.
    pub mode: RepairMode,
    /// What is done where a repair in place has failed too often.
    pub otherwise: Option<RepairMode>,
    /// The label of [`Mode::Label`]: key and value.
    pub label: (String, String),
    /// How often the rules of each pod are looked at, besides when it changes; zero: only then.
    pub interval: Duration,
}

/// A pod that needs repair.
struct RepairCase<'a> {
    installed: &'a Installed,
    known: &'a ObservedPod,
    suspicion: Suspicion,
    cause: Cause,
    /// Whether its rules are what its attachments asked for, and redirect it.
    is_right: bool,
}

impl RepairCase<'_> {
    /// Whether a new pod could be better off: one that has the same rules would fail its validation too.
    fn is_curable(&self) -> bool {
        self.suspicion.redirectable && !(self.cause == Cause::ValidationFailed && self.is_right)
    }
}

/// The pods of the node.
pub trait Pods: Send {
    /// As they are known now; one that has not changed is the same one.
    fn pods(&self) -> Vec<Arc<ObservedPod>>;

    /// Waits until one changes, at the most for `time`.
    fn wait(&mut self, time: Duration);
}
