//! The agent of a node: it keeps the plugin installed, answers the plugin's requests about the node's pods, and repairs
//! pods that bypass the mesh.

mod containers;
mod daemon_set;
mod facts;
mod health;
pub mod install;
mod metrics;
pub mod nri;
mod plugin_token;
mod pod_reports;
pub mod pods;
mod reconcile_loop;
mod runtime;
mod services;
mod socket;
pub mod taint;
mod token_bucket;
mod watch;

pub use daemon_set::DaemonSet;
pub use facts::{EndedContainer, ObservedPod};
pub use metrics::Metrics;
pub use plugin_token::PluginToken;
pub use pod_reports::PodReports;
pub use pods::{PodSettings, RepairMode};
pub use reconcile_loop::{DesiredInstallation, Installation, Job, OnExit, run};
pub use runtime::run_tasks;
pub use services::Services;
