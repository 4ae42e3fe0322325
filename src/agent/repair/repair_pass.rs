//! One round: pods that are due are looked at and, where needed, repaired.
//!
//! What is done to a pod that needs repair, and what the cluster is told of it.

use super::retry_budget::{Deletions, RetryBudget};
use super::watched::{NetnsLocation, WatchedPod};
use super::{Cause, ObservedPod, RepairCase, RepairSettings, diagnose, in_place, suspect};
use crate::agent::Metrics;
use crate::agent::install::{Installed, NodeFiles};
use crate::cluster::{Event, ServiceAccount};
use crate::cni::{Code, Error};
use crate::netns::find;
use crate::netns::find::FoundNetns;
use crate::plugin;
use crate::plugin::ContainerStatus;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A pod without rules must be so for this long: a runtime may be at work on it.
const CERTAIN: Duration = Duration::from_secs(3);
/// The same where it would be deleted or labelled. After its sandbox, another with the same address may be in
/// the making, while an ADD that comes before ours takes long.
const CERTAIN_TO_ACT: Duration = Duration::from_secs(30);
/// How long a look waits for another call in the same namespace: whoever is in there can hold its lock, and
/// keep all other pods waiting.
const PATIENCE: Duration = Duration::from_secs(1);

/// What repairs are made with.
#[derive(Debug)]
pub(super) struct RepairTools {
    pub(super) settings: RepairSettings,
    /// Where the plugin is installed.
    pub(super) node: NodeFiles,
    /// Who changes objects of the cluster.
    pub(super) account: ServiceAccount,
    pub(super) metrics: Metrics,
}

/// What was done for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairResult {
    /// `NAMESPACE/NAME`.
    pub pod: String,
    /// Why.
    pub cause: Cause,
    /// How.
    pub mode: RepairMode,
    /// With what result.
    pub outcome: RepairOutcome,
}

/// A round.
pub(super) struct RepairPass<'a> {
    means: &'a RepairTools,
    installed: &'a Installed,
    /// When it began, for the pods and by the clock.
    begun: (Instant, Instant),
    deletions: &'a mut Deletions,
    /// One look at the node serves all pods.
    node: Option<find::NodeSnapshot>,
    /// What is told when all is done: an API that is away keeps no pod waiting.
    news: Vec<(Arc<ObservedPod>, Event)>,
    /// How many would have been deleted, had not so many been of late.
    put_off: usize,
}

impl<'a> RepairPass<'a> {
    /// One that has not looked at any pod yet.
    pub(super) fn new(
        means: &'a RepairTools,
        installed: &'a Installed,
        deletions: &'a mut Deletions,
        now: Instant,
    ) -> Self {
        Self { means, installed, begun: (now, Instant::now()), deletions, node: None, news: Vec::new(), put_off: 0 }
    }

    /// Looks at a pod, and gives what was done.
    pub(super) fn look_at(&mut self, watched: &mut WatchedPod) -> Option<RepairResult> {
        let known = Arc::clone(&watched.known);
        let Some(suspicion) = suspect(&self.means.settings.criteria, self.installed, &known) else {
            watched.rest();
            return None;
        };
        let is_looked_at = suspicion.settled || suspicion.validation_failed;
        let stood = if is_looked_at { self.stand(watched) } else { Ok(None) };
        // Pods before it, and its own look, may have taken long.
        let now = self.begun.0 + self.begun.1.elapsed();
        let error = stood.as_ref().err();
        watched.complain(error);
        watched.note_look(error, now);
        if let Some(error) = error {
            self.means.metrics.look_failure(error.code.name());
            if watched.is_to_be_reported(Some(error), now) {
                self.news.push((Arc::clone(&known), unreadable(error)));
            }
        }
        let standing = stood.ok().flatten();
        let cause = diagnose(suspicion, standing.as_ref());
        let certain = if self.means.settings.mode == RepairMode::InPlace { CERTAIN } else { CERTAIN_TO_ACT };
        if !watched.note(cause, self.interval(&known), certain, now) {
            watched.postpone();
            return None;
        }
        let cause = cause?;
        let is_right = standing.is_some_and(|standing| standing.is_right());
        let case = RepairCase { installed: self.installed, known: &known, suspicion, cause, is_right };
        if case.is_curable()
            && self.may_delete(&watched.tries)
            && let Some(then) = self.deletions.put_off(now)
        {
            self.put_off += 1;
            watched.wake(Some(then));
            return None;
        }
        if cause == Cause::Drift {
            self.means.metrics.drift();
        }
        watched.tries.note(cause, now);
        watched.wake(watched.tries.next());
        let (mode, outcome) = self.act(&case, watched.tries.are_spent());
        if mode == RepairMode::Delete && known.owned && case.is_curable() {
            self.deletions.note(now);
        }
        if let Some(event) = event(cause, &outcome) {
            let pod = name(&known);
            match outcome {
                RepairOutcome::Failed(_) => tracing::warn!(pod, "{}", event.message),
                _ => tracing::info!(pod, "{}", event.message),
            }
            // Of failures the first is told, and the last.
            let between = watched.tries.count() > 1 && !watched.tries.are_spent();
            if !(event.warning && between && matches!(outcome, RepairOutcome::Failed(_))) {
                self.news.push((Arc::clone(&known), event));
            }
        }
        Some(RepairResult { pod: name(&known), cause, mode, outcome })
    }

    /// Tells the cluster what was done.
    pub(super) fn tell(self) {
        if self.put_off > 0 {
            tracing::warn!("{} pods are deleted later, for many were of late: are new pods redirected?", self.put_off);
        }
        for (known, event) in self.news {
            match self.means.account.tell(&known.pod, &event) {
                Err(error) if error.code == Code::TryAgain => return tracing::warn!("events are lost: {error}"),
                Err(error) => tracing::warn!("{error}"),
                Ok(()) => {}
            }
        }
    }

    /// Does what is to be done, and in the last of all tries what is to be done otherwise. Drift is undone in
    /// place first: another version of the plugin may write the same rules differently, and no pod is to end
    /// for that.
    fn act(&self, case: &RepairCase<'_>, is_last: bool) -> (RepairMode, RepairOutcome) {
        let (mode, otherwise) = (self.means.settings.mode, self.means.settings.otherwise);
        if case.cause == Cause::Drift && mode != RepairMode::InPlace {
            let outcome = self.perform(RepairMode::InPlace, case);
            return match outcome {
                RepairOutcome::Failed(_) => (mode, self.perform(mode, case)),
                outcome => (RepairMode::InPlace, outcome),
            };
        }
        let outcome = self.perform(mode, case);
        if mode != RepairMode::InPlace || !is_last {
            return (mode, outcome);
        }
        match (outcome.after_all(), otherwise) {
            // Rules that are right would be the same in a new pod.
            (failed, Some(RepairMode::Delete)) if outcome == RepairOutcome::NothingToDo => (mode, failed),
            (RepairOutcome::Failed(_), Some(otherwise)) => (otherwise, self.perform(otherwise, case)),
            (outcome, _) => (mode, outcome),
        }
    }

    fn perform(&self, mode: RepairMode, case: &RepairCase<'_>) -> RepairOutcome {
        let RepairTools { settings, account, metrics, .. } = self.means;
        let performed = match mode {
            // Found anew: what was found for a look may have gone since.
            RepairMode::InPlace => self.find(case.known).and_then(|found| in_place::repair(case, &found)),
            RepairMode::Delete => delete(account, case),
            RepairMode::Label => label(account, case.known, &settings.label),
        };
        let outcome = performed.unwrap_or_else(|error| RepairOutcome::Failed(error.to_string()));
        metrics.repair(mode.name(), outcome.name());
        outcome
    }

    fn find(&self, known: &ObservedPod) -> Result<FoundNetns, Error> {
        let uid = known.pod.uid_on_node().unwrap_or_default();
        let unknown = || Error::new(Code::InvalidNetns, "no network namespace of the pod is known on this node");
        find::of_pod(self.means.node.root(), uid)?.ok_or_else(unknown)
    }

    /// Whether the next try may end the pod.
    fn may_delete(&self, tries: &RetryBudget) -> bool {
        let RepairSettings { mode, otherwise, .. } = &self.means.settings;
        *mode == RepairMode::Delete || (*otherwise == Some(RepairMode::Delete) && tries.is_last_next())
    }

    /// What the pod's namespace holds; `None` where it has none that is known.
    fn stand(&mut self, watched: &mut WatchedPod) -> Result<Option<ContainerStatus>, Error> {
        watched.place.take_if(|place| !place.is_there());
        if watched.place.is_none() {
            let node = match &mut self.node {
                Some(node) => node,
                None => self.node.insert(find::NodeSnapshot::look(self.means.node.root())?),
            };
            let found = node.of_pod(watched.known.pod.uid_on_node().unwrap_or_default())?;
            found.as_ref().map(|found| in_place::confirm(found, &watched.known, PATIENCE)).transpose()?;
            watched.place = found.as_ref().and_then(NetnsLocation::of);
        }
        watched
            .place
            .as_ref()
            .map(|place| plugin::container_status(&place.container_id, &place.netns, PATIENCE))
            .transpose()
    }

    /// How long rules that are right are left alone: up to the whole interval, each pod another part of it,
    /// lest all be looked at at once.
    fn interval(&self, known: &ObservedPod) -> Option<Duration> {
        let interval = Some(self.means.settings.interval).filter(|interval| !interval.is_zero())?;
        let part = BuildHasherDefault::<DefaultHasher>::default().hash_one(&known.pod.uid) % 1000;
        Some(interval / 2 + interval / 2 * u32::try_from(part).unwrap_or(0) / 1000)
    }
}

fn name(known: &ObservedPod) -> String {
    format!("{}/{}", known.pod.namespace, known.pod.name)
}

/// How pods are repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairMode {
    /// The pod runs on and gets its rules.
    InPlace,
    /// It is deleted, where somebody makes a new one.
    Delete,
    /// It is labelled, for somebody else to act upon.
    Label,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RepairOutcome {
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

impl RepairMode {
    /// For metrics.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::InPlace => "repair",
            Self::Delete => "delete",
            Self::Label => "label",
        }
    }
}

impl RepairOutcome {
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
/// No controller would create a new one, or the new one would be no better off; or the pod can't be deleted.
pub(super) fn delete(account: &ServiceAccount, case: &RepairCase<'_>) -> Result<RepairOutcome, Error> {
    let RepairCase { known, suspicion, .. } = case;
    if !suspicion.redirectable {
        let msg = "not deleted: the plugin, as it is configured on this node, would not redirect a new pod either; \
                   see detour explain";
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    if !case.is_curable() {
        let msg = "not deleted: its rules are what they should be, so a new pod would fail its validation too; see \
                   its init container's log";
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    if !known.owned {
        let msg = "nobody would make a new one (it has no controller), so it is not deleted: delete it by hand";
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    account.delete(&known.pod, &known.resource_version)?;
    Ok(RepairOutcome::Deleted)
}

/// Labels the pod, if it still is as it is known and has not the label yet.
///
/// # Errors
/// It can't be labelled.
pub(super) fn label(
    account: &ServiceAccount,
    known: &ObservedPod,
    label: &(String, String),
) -> Result<RepairOutcome, Error> {
    let (key, value) = label;
    if known.pod.labels.get(key) == Some(value) {
        return Ok(RepairOutcome::NothingToDo);
    }
    account.label(&known.pod, &known.resource_version, (key, value))?;
    Ok(RepairOutcome::Labelled)
}

/// The Event for a pod whose rules can't be read.
pub(super) fn unreadable(error: &Error) -> Event {
    let message = format!("drift is not repaired: {error}");
    Event { warning: true, reason: "DetourRulesUnreadable".into(), message }
}

/// What is told of an outcome; `None` where nothing happened.
pub(super) fn event(cause: Cause, outcome: &RepairOutcome) -> Option<Event> {
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
        RepairOutcome::Deleted => (true, "DetourDeleted", format!("deleted so that a new pod is redirected: {cause}")),
        RepairOutcome::Labelled => (true, "DetourLabelled", format!("labelled, not repaired: {cause}")),
        RepairOutcome::Failed(why) => (true, "DetourRepairFailed", format!("{cause}; {why}")),
    };
    Some(Event { warning, reason: reason.into(), message })
}
