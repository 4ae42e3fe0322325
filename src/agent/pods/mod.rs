//! The reconciler of the node's running pods. It repeats the ADD of each pod when its inputs change and at intervals, and
//! repairs pods with a sidecar for which the plugin was not called.

mod limits;
mod pass;
mod pod_state;
mod reconciler;
mod repair;
mod run;
mod settings;
mod suspicion;
mod texts;
mod tracked_pod;

pub(super) use pod_state::Finding;
pub use reconciler::{FinishedJob, Job, ObservedNode, PodReconciler};
pub use repair::{RepairOutcome, RepairResult};
pub(super) use run::PodSignals;
pub use settings::{PodSettings, RepairMode};
pub use suspicion::Cause;
