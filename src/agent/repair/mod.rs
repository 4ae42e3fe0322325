//! Repairs pods that are in the mesh and bypass it, because they started before the plugin or lost their rules.

mod action;
mod decision;
mod in_place;
mod repair_pass;
mod retry_budget;
mod selector;
mod watched;
mod worker;

pub use action::{RepairMode, RepairOutcome, RepairResult, RepairSettings};
pub use decision::{Cause, Criteria, Suspicion, diagnose, suspect};
pub use selector::Selector;
pub(in crate::agent) use worker::check_state_directory;
pub use worker::{Pods, RepairWorker};
