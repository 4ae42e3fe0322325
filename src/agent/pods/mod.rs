//! The reconciler of the node's running pods. It repeats the ADD of each pod when its inputs change and at intervals, and
//! repairs pods with a sidecar for which the plugin was not called. This file has its settings, and what all passes share.

mod pass;
mod pod_state;
mod reconciler;
mod repair;
mod suspicion;
mod texts;

pub(super) use pod_state::Finding;
pub use reconciler::{ObservedNode, PodReconciler};

use crate::agent::install::NodeFiles;
use crate::agent::metrics::Metrics;
use crate::agent::token_bucket::TokenBucket;
use crate::cluster::Api;
use crate::cni::Error;
use crate::netns::find::{FoundNetns, NodeSnapshot};
use crate::pod::Pod;
use clap::ValueEnum;
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The deletions of pods that are allowed without a pause, and the time after which one more is allowed.
/// If the runtime does not call the plugin, the pod that replaces a deleted one bypasses the mesh too.
const DELETIONS: u32 = 5;
const DELETION_REFILL_TIME: Duration = Duration::from_secs(12);
/// The maximum age at which a snapshot of the node's network namespaces is used for further pods.
const SNAPSHOT_AGE: Duration = Duration::from_secs(5);

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

/// How the agent repairs pods for which the plugin was not called: the value of `--repair`.
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

/// What all passes share.
pub(super) struct Tools {
    pub(super) settings: PodSettings,
    /// The node on which the plugin is installed.
    pub(super) node: NodeFiles,
    /// The account that changes pods.
    pub(super) account: Api,
    pub(super) metrics: Metrics,
    pub(super) deletions: RefCell<TokenBucket>,
    /// The node's network namespaces, and when they were read.
    snapshot: RefCell<Option<(Instant, NodeSnapshot)>>,
}

impl Tools {
    pub(super) fn new(settings: PodSettings, node: NodeFiles, account: Api, metrics: Metrics) -> Self {
        let deletions = RefCell::new(TokenBucket::new(DELETIONS, DELETION_REFILL_TIME));
        Self { settings, node, account, metrics, deletions, snapshot: RefCell::default() }
    }

    /// Returns the network namespace of a pod; `None` if it is not found.
    pub(super) fn find(&self, pod: &Pod) -> Result<Option<FoundNetns>, Error> {
        let mut snapshot = self.snapshot.borrow_mut();
        if let Some((taken, recent)) = &*snapshot
            && taken.elapsed() < SNAPSHOT_AGE
            && let Ok(Some(found)) = recent.of_pod(pod)
        {
            return Ok(Some(found));
        }
        let (_, fresh) = snapshot.insert((Instant::now(), NodeSnapshot::take(self.node.root())?));
        fresh.of_pod(pod)
    }
}
