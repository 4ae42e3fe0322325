//! What is done to a pod that needs repair, and what the cluster is told of it.

use super::{Case, Cause, KnownPod};
use crate::cluster::{Event, ServiceAccount};
use crate::cni::{Code, Error};

/// How pods are repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The pod runs on and gets its rules.
    InPlace,
    /// It is deleted, where somebody makes a new one.
    Delete,
    /// It is labelled, for somebody else to act upon.
    Label,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Its rules are what they should be again.
    Repaired,
    /// The same, but connections that are older bypass the sidecar until they close.
    RepairedForNew {
        /// How many TCP connections.
        older: usize,
    },
    /// They were already.
    NothingToDo,
    /// It is on its way out.
    Deleted,
    /// It has the label.
    Labelled,
    /// Why not.
    Failed(String),
}

impl Mode {
    /// For metrics.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::InPlace => "repair",
            Self::Delete => "delete",
            Self::Label => "label",
        }
    }
}

impl Outcome {
    /// For metrics.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Repaired | Self::RepairedForNew { .. } | Self::Deleted | Self::Labelled => "done",
            Self::NothingToDo => "needless",
            Self::Failed(_) => "failed",
        }
    }

    /// The same once tries in place have been too many: that the rules are right is no repair then.
    pub(super) fn after_all(&self) -> Self {
        match self {
            Self::NothingToDo => Self::Failed("its rules are what they should be; see its init container's log".into()),
            other => other.clone(),
        }
    }
}

/// Deletes the pod, if it still is as it is known.
///
/// # Errors
/// No controller would create a new one, or the plugin would not redirect that either; or the pod can't be
/// deleted.
pub(super) fn delete(account: &ServiceAccount, case: &Case<'_>) -> Result<Outcome, Error> {
    let Case { known, suspicion, .. } = case;
    if !suspicion.redirectable {
        let msg = "not deleted: the plugin, as it is configured on this node, would not redirect a new pod either; \
                   see detour explain";
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    if !known.owned {
        let msg = "nobody would make a new one (it has no controller), so it is not deleted: delete it by hand";
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    account.delete(&known.pod, &known.resource_version)?;
    Ok(Outcome::Deleted)
}

/// Labels the pod, if it still is as it is known and has not the label yet.
///
/// # Errors
/// It can't be labelled.
pub(super) fn label(account: &ServiceAccount, known: &KnownPod, label: &(String, String)) -> Result<Outcome, Error> {
    let (key, value) = label;
    if known.pod.labels.get(key) == Some(value) {
        return Ok(Outcome::NothingToDo);
    }
    account.label(&known.pod, &known.resource_version, (key, value))?;
    Ok(Outcome::Labelled)
}

/// The Event for a pod whose rules can't be read.
pub(super) fn unreadable(error: &Error) -> Event {
    let message = format!("drift is not repaired: {error}");
    Event { warning: true, reason: "DetourRulesUnreadable".into(), message }
}

/// What is told of an outcome; `None` where nothing happened.
pub(super) fn event(cause: Cause, outcome: &Outcome) -> Option<Event> {
    let (warning, reason, message) = match outcome {
        Outcome::NothingToDo => return None,
        Outcome::Repaired => (false, "DetourRepaired", format!("traffic is redirected to the sidecar again: {cause}")),
        Outcome::RepairedForNew { older } => {
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
        Outcome::Deleted => (true, "DetourDeleted", format!("deleted so that a new pod is redirected: {cause}")),
        Outcome::Labelled => (true, "DetourLabelled", format!("labelled, not repaired: {cause}")),
        Outcome::Failed(why) => (true, "DetourRepairFailed", format!("{cause}; {why}")),
    };
    Some(Event { warning, reason: reason.into(), message })
}
