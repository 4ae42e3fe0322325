//! The settings, modes and outcomes of repairs; deleting and labeling a pod; the Event of each outcome.

use super::decision::{Cause, Criteria, Suspicion};
use crate::agent::facts::ObservedPod;
use crate::agent::install::Installed;
use crate::cluster::{Event, ServiceAccount};
use crate::cni::{Code, Error};
use std::time::Duration;

/// Which pods are repaired, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairSettings {
    /// The pods.
    pub criteria: Criteria,
    /// The mode.
    pub mode: RepairMode,
    /// The mode after all attempts to repair a pod in place have failed.
    pub otherwise: Option<RepairMode>,
    /// Key and value of the label for [`RepairMode::Label`].
    pub label: (String, String),
    /// The interval in which the rules of each pod are checked, in addition to when it changes; zero for no interval.
    pub interval: Duration,
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
    /// The pod had the desired rules or the label already.
    NothingToDo,
    /// The pod was deleted.
    Deleted,
    /// The pod was labeled.
    Labelled,
    /// The repair failed for this reason.
    Failed(String),
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
    pub(super) installed: &'a Installed,
    pub(super) observed: &'a ObservedPod,
    pub(super) suspicion: Suspicion,
    pub(super) cause: Cause,
    /// Whether its rules are the desired ones and redirect its traffic.
    pub(super) is_right: bool,
}

impl RepairCase<'_> {
    /// Whether a new pod could be redirected. One with the same rules would fail its validation too.
    pub(super) fn is_curable(&self) -> bool {
        self.suspicion.redirectable && !(self.cause == Cause::ValidationFailed && self.is_right)
    }
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

impl RepairOutcome {
    /// Returns the value of the metrics' label `result`.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Repaired | Self::RepairedForNew { .. } | Self::Deleted | Self::Labelled => "done",
            Self::NothingToDo => "needless",
            Self::Failed(_) => "failed",
        }
    }

    /// Returns the outcome of the last attempt in place: rules that were right already did not help the pod.
    pub(super) fn after_last_attempt(&self) -> Self {
        match self {
            Self::NothingToDo => {
                Self::Failed("its rules are the desired ones; see the log of its init container".into())
            }
            other => other.clone(),
        }
    }
}

/// Deletes the pod if it has not changed since it was observed.
///
/// # Errors
/// No controller would create a new pod, or the new one could not be redirected either, or the request fails.
pub(super) fn delete(account: &ServiceAccount, case: &RepairCase<'_>) -> Result<RepairOutcome, Error> {
    let RepairCase { observed, suspicion, .. } = case;
    if !suspicion.redirectable {
        let msg = "not deleted: with this node's configuration, the plugin would not redirect a new pod either; run \
                   detour explain";
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    if !case.is_curable() {
        let msg = "not deleted: its rules are the desired ones, so a new pod would fail its validation too; see the log \
                   of its init container";
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    if !observed.owned {
        let msg = "not deleted: it has no controller that would create a new pod; delete it manually";
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    account.delete(&observed.pod, &observed.resource_version)?;
    Ok(RepairOutcome::Deleted)
}

/// Labels the pod if it has not changed since it was observed and does not have the label.
///
/// # Errors
/// The request fails.
pub(super) fn label(
    account: &ServiceAccount,
    observed: &ObservedPod,
    label: &(String, String),
) -> Result<RepairOutcome, Error> {
    let (key, value) = label;
    if observed.pod.labels.get(key) == Some(value) {
        return Ok(RepairOutcome::NothingToDo);
    }
    account.label(&observed.pod, &observed.resource_version, (key, value))?;
    Ok(RepairOutcome::Labelled)
}

/// Returns the Event for a pod whose rules can't be read.
pub(super) fn unreadable_event(error: &Error) -> Event {
    let message = format!("can't read the pod's rules, so drift is not repaired: {error}");
    Event { warning: true, reason: "DetourRulesUnreadable".into(), message }
}

/// Returns the Event for an outcome; `None` if nothing happened.
pub(super) fn outcome_event(cause: Cause, outcome: &RepairOutcome) -> Option<Event> {
    let (warning, reason, message) = match outcome {
        RepairOutcome::NothingToDo => return None,
        RepairOutcome::Repaired => {
            (false, "DetourRepaired", format!("traffic is redirected to the sidecar again: {cause}"))
        }
        RepairOutcome::RepairedForNew { older } => {
            let (connections, bypass, they) = if *older == 1 {
                ("connection", "bypasses", "it closes")
            } else {
                ("connections", "bypass", "they close")
            };
            let message = format!(
                "new connections are redirected to the sidecar again: {cause}; {older} TCP {connections} that existed \
                 before still {bypass} the sidecar until {they}; recreate the pod to capture them"
            );
            (true, "DetourRepaired", message)
        }
        RepairOutcome::Deleted => (true, "DetourDeleted", format!("deleted, so that a new pod is redirected: {cause}")),
        RepairOutcome::Labelled => (true, "DetourLabelled", format!("labeled, not repaired: {cause}")),
        RepairOutcome::Failed(error) => (true, "DetourRepairFailed", format!("repair failed: {cause}; {error}")),
    };
    Some(Event { warning, reason: reason.into(), message })
}
