//! What the agent does about running pods, and what its jobs share.

use super::limits::DeletionLimit;
use crate::agent::install::NodeFiles;
use crate::agent::metrics::Metrics;
use crate::agent::pod_reports::PodReports;
use crate::cluster::Api;
use clap::ValueEnum;
use std::sync::Mutex;

/// What the agent does about running pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodSettings {
    /// How pods that bypass the sidecar are repaired.
    pub repair: RepairMode,
    /// Whether running pods follow changes of their policies.
    pub live_policy: bool,
}

impl PodSettings {
    /// Whether the agent reads the saved state of running pods.
    #[must_use]
    pub const fn uses_saved_state(&self) -> bool {
        !matches!(self.repair, RepairMode::Off) || self.live_policy
    }
}

/// How pods are repaired for which the plugin was not called, a value of `--repair`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RepairMode {
    /// Add the missing rules in place, while the pod keeps running
    #[value(name = "repair")]
    InPlace,
    /// Delete the pod if a controller replaces it
    Delete,
    /// Do not repair pods
    Off,
}

impl RepairMode {
    /// Returns the value of the metrics' label `type`.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::InPlace => "repair",
            Self::Delete => "delete",
            Self::Off => "off",
        }
    }
}

/// What all jobs share.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) settings: PodSettings,
    /// The node on which the plugin is installed.
    pub(super) node: NodeFiles,
    /// The account that changes pods.
    pub(super) account: Api,
    /// The Events of pods.
    pub(super) reports: PodReports,
    pub(super) metrics: Metrics,
    pub(super) deletions: Mutex<DeletionLimit>,
    /// Locked while a job works on a pod sandbox: the saved state of one takes up to some megabytes of memory.
    pub(super) sandbox: Mutex<()>,
}
