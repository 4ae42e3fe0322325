//! What the agent does about running pods.

use crate::policy::LivePolicyScope;
use kube::core::Selector;

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
