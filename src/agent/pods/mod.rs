//! The reconciler of the node's running pods. It repeats the ADD of each pod when its inputs change and at intervals, and
//! gives pods with a sidecar for which the plugin was not called their rules.

mod pass;
mod pod_state;
mod reconciler;
mod repair;
mod settings;
mod suspicion;
mod texts;

pub(super) use pod_state::Finding;
pub use reconciler::{ObservedNode, PodReconciler};
pub use settings::{PodSettings, RepairMode};
