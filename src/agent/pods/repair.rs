//! The two ways to repair a pod: in place, with the plugin's ADD or from saved state; by deleting it.

use super::settings::RepairMode;
use super::suspicion::{Cause, Suspicion};
use crate::agent::facts::ObservedPod;
use crate::agent::install::Installed;
use crate::cluster::Api;
use crate::cni::{Code, DEFAULT_INTERFACE, Error, OutsideBounds, Request};
use crate::netns::find::FoundNetns;
use crate::plugin;
use crate::plugin::running::{self, ContainerStatus, RepeatedAdd};
use std::path::Path;
use std::time::Duration;

/// How long another call of the plugin in the same network namespace is waited for.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// The result of a repair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RepairOutcome {
    /// The pod has the desired rules.
    Repaired,
    /// The pod has the desired rules, but older connections bypass the sidecar until they close.
    RepairedForNew {
        /// The number of these TCP connections.
        older: usize,
    },
    /// The pod had the desired rules already.
    NothingToDo,
    /// The pod was deleted.
    Deleted,
    /// The repair failed for this reason.
    Failed(String),
}

impl RepairOutcome {
    /// Returns the outcome of rules that were restored, with the number of older connections that bypass the sidecar.
    pub(super) fn of_count(older: Result<usize, Error>, observed: &ObservedPod) -> Self {
        match older {
            Ok(0) => Self::Repaired,
            Ok(older) => Self::RepairedForNew { older },
            Err(error) => {
                let (namespace, pod) = (&observed.pod.namespace, &observed.pod.name);
                tracing::warn!("pod {namespace}/{pod}: can't count the connections that bypass the sidecar: {error}");
                Self::Repaired
            }
        }
    }

    /// Returns the value of the metrics' label `result`.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Repaired | Self::RepairedForNew { .. } | Self::Deleted => "done",
            Self::NothingToDo => "needless",
            Self::Failed(_) => "failed",
        }
    }
}

/// A repair and its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairResult {
    /// `NAMESPACE/NAME` of the pod.
    pub pod: String,
    /// Why it needed a repair.
    pub cause: Cause,
    /// How it was repaired.
    pub mode: RepairMode,
    /// The result.
    pub outcome: RepairOutcome,
}

/// A pod that needs a repair.
pub(super) struct RepairCase<'a> {
    /// The mount point of the node's file system.
    pub(super) root: &'a Path,
    pub(super) installed: &'a Installed,
    pub(super) observed: &'a ObservedPod,
    pub(super) suspicion: Suspicion,
    pub(super) cause: Cause,
    /// Whether its rules are the desired ones and redirect its traffic.
    pub(super) is_right: bool,
}

impl RepairCase<'_> {
    /// Returns why the pod can't be deleted: no controller would create a new pod, or the new one could not be
    /// redirected either.
    fn obstacle_to_deletion(&self) -> Option<&'static str> {
        if !self.suspicion.redirectable {
            Some(
                "not deleted: with this node's configuration, the plugin would not redirect a new pod either; run detour \
                 explain",
            )
        } else if self.cause == Cause::ValidationFailed && self.is_right {
            Some(
                "not deleted: its rules are the desired ones, so a new pod would fail its validation too; see the log of \
                 its init container",
            )
        } else if !self.observed.owned {
            Some("not deleted: it has no controller that would create a new pod; delete it manually")
        } else {
            None
        }
    }

    /// Whether a deletion would be requested.
    pub(super) fn is_deletable(&self) -> bool {
        self.obstacle_to_deletion().is_none()
    }

    /// Deletes the pod if it has not changed since it was observed.
    ///
    /// # Errors
    /// The pod must not be deleted, or the request fails.
    pub(super) fn delete(&self, account: &Api) -> Result<RepairOutcome, Error> {
        if let Some(obstacle) = self.obstacle_to_deletion() {
            return Err(Error::new(Code::InvalidConfig, obstacle));
        }
        account.delete(&self.observed.pod, &self.observed.resource_version)?;
        Ok(RepairOutcome::Deleted)
    }

    /// Restores the pod's desired rules, and reads them back from the kernel. Each call of the plugin has its own
    /// timeout.
    ///
    /// # Errors
    /// The rules can't be restored. Then no partial change is left.
    pub(super) fn repair_in_place(&self, found: &FoundNetns) -> Result<RepairOutcome, Error> {
        let Some(container_id) = found.container_id.as_deref() else {
            let msg = format!("can't call ADD: the container ID of the pod sandbox is unknown ({})", found.evidence);
            return Err(Error::new(Code::InvalidNetns, msg));
        };
        confirm(found, self.observed, LOCK_TIMEOUT)?;
        let before = running::container_status(container_id, &found.netns, LOCK_TIMEOUT)?;
        if !before.drift.is_empty() {
            let restore =
                RepeatedAdd { root: self.root, facts: None, installed: &[], restores: true, found: Some(&found.netns) };
            restore.run(container_id)?;
        } else if before.redirected && before.attachments.is_empty() {
            let msg = "another tool redirects the pod, and its rules are not changed; check which tool created them";
            return Err(Error::new(Code::ForeignRules, msg));
        } else if before.redirected || self.cause == Cause::Drift {
            return Ok(RepairOutcome::NothingToDo);
        } else if !self.suspicion.redirectable {
            let msg = "with this node's configuration, the plugin would not redirect the pod; run detour explain";
            return Err(Error::new(Code::InvalidConfig, msg));
        } else {
            self.add(found, container_id, &before)?;
        }
        let after = running::container_status(container_id, &found.netns, LOCK_TIMEOUT)?;
        if let Some(difference) = after.drift.first() {
            let error = Error::new(Code::Drift, "the pod's rules still differ after the repair");
            return Err(error.with_details(difference));
        }
        if self.cause != Cause::Drift && !after.redirected {
            let msg = "the pod is not redirected after a successful ADD; run detour explain";
            return Err(Error::new(Code::Drift, msg));
        }
        let older = running::bypassing(container_id, &found.netns, LOCK_TIMEOUT);
        Ok(RepairOutcome::of_count(older, self.observed))
    }

    /// Calls the plugin's ADD as the runtime would.
    fn add(&self, found: &FoundNetns, container_id: &str, before: &ContainerStatus) -> Result<(), Error> {
        let mut conf = self.installed.conf.clone();
        // A pod that runs already is redirected, without its requests outside the bounds.
        conf.bounds.outside = OutsideBounds::Ignore;
        let attached = before.attachments.iter().find(|attachment| attachment.network == conf.name);
        let cached = found.attachments.iter().find(|cached| cached.network == conf.name);
        // The plugin would reject the runtime's cached result if it had another version.
        let result =
            cached.map(|cached| &cached.result).filter(|result| result["cniVersion"] == conf.cni_version.as_str());
        conf.prev_result = result.cloned().or(conf.prev_result);
        let ifname = attached.map(|attachment| &attachment.ifname).or(cached.map(|cached| &cached.ifname));
        let pod = &self.observed.pod;
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={container_id};K8S_POD_UID={}",
            pod.namespace,
            pod.name,
            pod.uid_on_node().unwrap_or_default()
        );
        let request = Request::parse(|name| {
            let value = match name {
                "CNI_COMMAND" => "ADD",
                "CNI_CONTAINERID" => container_id,
                "CNI_NETNS" => found.netns.to_str()?,
                "CNI_IFNAME" => ifname.map_or(DEFAULT_INTERFACE, String::as_str),
                "CNI_ARGS" => &args,
                // Required, and unused: the configuration has no executables.
                "CNI_PATH" => "/",
                _ => return None,
            };
            Some(value.to_owned())
        })?;
        plugin::run(&request, &conf).map(drop)
    }
}

/// Checks that the network namespace has one of the pod's addresses. A sandbox that was found may be a previous one, and
/// the addresses are those of the previous sandbox until all ADD calls for the new one have returned. Waits for the
/// namespace's lock as [`running::container_status`] does.
///
/// # Errors
/// The network namespace has none of the addresses, the pod has no address yet, or the namespace can't be read.
pub(super) fn confirm(found: &FoundNetns, observed: &ObservedPod, lock_timeout: Duration) -> Result<(), Error> {
    if found.has_any_address(&observed.addresses, lock_timeout)? {
        return Ok(());
    }
    let msg = format!("the network namespace that was found has none of the pod's addresses: {}", found.evidence);
    Err(Error::new(Code::InvalidNetns, msg))
}
