//! Repairs pods that are in the mesh and bypass it, because they started before the plugin or lost their rules.
//!
//! | file | content |
//! |---|---|
//! | `decision`, `selector` | which pods are checked; whether and why one needs a repair (pure) |
//! | `worker` | the thread: which pods are due |
//! | `repair_pass` | one pass over the pods that are due: check, repair, Events |
//! | `watched` | the state of a pod between two checks |
//! | `retry_budget` | limits: attempts per pod, deletions per node, pods in the queue (pure) |
//! | `action` | settings, modes and outcomes; deleting and labeling a pod; the Event of each outcome |
//! | `in_place` | repair without a restart, by the plugin's own ADD or from its saved state |

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
pub(in crate::agent) use decision::{OtherRelease, is_left_to_other};
pub use selector::Selector;
pub(in crate::agent) use worker::check_state_directory;
pub use worker::{Pods, RepairWorker};
