//! What the agent does about running pods, and what its jobs share.

use super::limits::DeletionLimit;
use crate::agent::install::NodeFiles;
use crate::agent::metrics::Metrics;
use crate::agent::pod_reports::PodReports;
use crate::cluster::ServiceAccount;
use crate::policy::LivePolicyScope;
use kube::core::Selector;
use std::sync::Mutex;

/// What the agent does about running pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSettings {
    /// How pods that bypass the sidecar are repaired; `None` to not repair them.
    pub repair: Option<RepairSettings>,
    /// Which changes of their policies running pods follow.
    pub live_policy: LivePolicyScope,
}

impl PodSettings {
    /// Whether the agent reads the saved state of running pods.
    #[must_use]
    pub fn uses_saved_state(&self) -> bool {
        self.repair.is_some() || self.live_policy != LivePolicyScope::Off
    }
}

/// Which pods are repaired, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairSettings {
    /// The labels of the pods.
    pub selector: Selector,
    /// The mode.
    pub mode: RepairMode,
    /// Key and value of the label for [`RepairMode::Label`].
    pub label: (String, String),
}

/// How pods are repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairMode {
    /// The pod keeps running and gets its rules.
    InPlace,
    /// The pod is deleted if a controller replaces it.
    Delete,
    /// The pod is labeled for another tool.
    Label,
}

impl RepairMode {
    /// Returns the value of the metrics' label `type`.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::InPlace => "repair",
            Self::Delete => "delete",
            Self::Label => "label",
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
    pub(super) account: ServiceAccount,
    /// The Events and conditions of pods.
    pub(super) reports: PodReports,
    pub(super) metrics: Metrics,
    pub(super) deletions: Mutex<DeletionLimit>,
}

impl Tools {
    /// Returns the reports about policies. Without live policy, the agent lacks the permissions to write them.
    pub(super) fn policy_reports(&self) -> PodReports {
        match self.settings.live_policy {
            LivePolicyScope::Off => PodReports::none(),
            LivePolicyScope::Exclusions | LivePolicyScope::All => self.reports.clone(),
        }
    }
}
