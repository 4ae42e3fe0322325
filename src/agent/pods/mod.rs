//! The reconciler of the node's running pods. It compares the desired with the live state of each pod and acts on two
//! findings: the pod has a sidecar and bypasses it (repair), or its policy has changed (live policy).

mod limits;
mod pod_policy;
mod pod_rules;
mod reconciler;
mod repair;
mod rule_check;
mod run;
mod settings;
mod suspicion;
mod texts;
mod tracked_pod;

pub use reconciler::{FinishedJob, Job, ObservedNode, PodReconciler};
pub use repair::{RepairOutcome, RepairResult};
pub(super) use run::PodSignals;
pub use settings::{PodSettings, RepairMode, RepairSettings, parse_selector};
pub use suspicion::Cause;
