//! One pass over the pods that are due: checks each one, and repairs it if needed.

use super::action::{
    RepairCase, RepairMode, RepairOutcome, RepairResult, RepairSettings, delete, label, outcome_event, unreadable_event,
};
use super::decision::{Cause, diagnose, is_called, suspect};
use super::in_place;
use super::retry_budget::{DELETION_PERIOD, DeletionLimit, MAX_DELETIONS};
use super::watched::{NetnsLocation, WatchedPod};
use crate::agent::facts::ObservedPod;
use crate::agent::install::{Installed, NodeFiles};
use crate::agent::metrics::Metrics;
use crate::agent::pod_reports::PodReports;
use crate::cluster::{DefinitionQuery, Event, Lookup, ObjectRef, ServiceAccount};
use crate::cni::{Code, Error};
use crate::netns::find::{self, FoundNetns};
use crate::plugin::{self, ContainerStatus};
use crate::pod::{Pod, PodRef};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a pod must be without rules before it is repaired: a runtime may be setting it up.
const GRACE: Duration = Duration::from_secs(3);
/// How long a pod must be without rules before it is deleted or labeled. The runtime may be creating a new sandbox with
/// the same address, while an ADD that runs before the plugin's takes long.
const GRACE_BEFORE_DELETION: Duration = Duration::from_secs(30);
/// How long a check waits for the lock of a network namespace: a process in there can hold it, and would delay all other
/// pods.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The timeout for a definition that a pod without rules selects.
const DEFINITION_TIMEOUT: Duration = Duration::from_secs(2);

/// The settings and handles of all repairs.
#[derive(Debug)]
pub(super) struct RepairTools {
    pub(super) settings: RepairSettings,
    /// The node on which the plugin is installed.
    pub(super) node: NodeFiles,
    /// The account that changes pods.
    pub(super) account: ServiceAccount,
    /// The Events of pods.
    pub(super) reports: PodReports,
    pub(super) metrics: Metrics,
}

/// A pass over the pods that are due.
pub(super) struct RepairPass<'a> {
    tools: &'a RepairTools,
    installed: &'a [Installed],
    /// The time of the pass for the pods, and the clock at that time.
    started: (Instant, Instant),
    deletions: &'a mut DeletionLimit,
    /// The node's network namespaces, read once for all pods.
    netns_snapshot: Option<find::NodeSnapshot>,
    /// The definitions that pods without rules select, looked up once; `None` if the API server does not return it.
    definitions: RefCell<BTreeMap<ObjectRef, Option<Lookup>>>,
    /// The number of pods whose deletion is deferred by the limit.
    deferred: usize,
}

impl<'a> RepairPass<'a> {
    /// Creates a pass at the time `now`.
    pub(super) fn new(
        tools: &'a RepairTools,
        installed: &'a [Installed],
        deletions: &'a mut DeletionLimit,
        now: Instant,
    ) -> Self {
        let started = (now, Instant::now());
        let definitions = RefCell::default();
        Self { tools, installed, started, deletions, netns_snapshot: None, definitions, deferred: 0 }
    }

    /// Checks a pod, and repairs it if needed. Returns the result of a repair.
    pub(super) fn check(&mut self, watched: &mut WatchedPod) -> Option<RepairResult> {
        let observed = Arc::clone(&watched.observed);
        let Some((installed, suspicion)) = suspect(&self.tools.settings.criteria, self.installed, &observed) else {
            watched.rest();
            return None;
        };
        let status = if suspicion.settled { self.container_status(watched) } else { Ok(None) };
        // This check and those of the pods before it may have taken long.
        let now = self.started.0 + self.started.1.elapsed();
        let error = status.as_ref().err();
        watched.log_failure(error);
        watched.record_read(error, now);
        if let Some(error) = error {
            self.tools.metrics.look_failure(error.code.name());
            if watched.needs_event(Some(error), now) {
                self.report(&observed, unreadable_event(error));
            }
        }
        let status = status.ok().flatten();
        let is_called = || is_called(installed, &observed.pod, &|object| self.definition(object));
        let cause = diagnose(suspicion, status.as_ref()).filter(|cause| *cause != Cause::NoRules || is_called());
        let grace = if self.tools.settings.mode == RepairMode::InPlace { GRACE } else { GRACE_BEFORE_DELETION };
        if !watched.record_check(cause, self.interval(&observed), grace, now) {
            watched.postpone();
            return None;
        }
        let cause = cause?;
        let is_right = status.is_some_and(|status| status.is_right());
        let case = RepairCase { installed, observed: &observed, suspicion, cause, is_right };
        let Some((mode, outcome)) = self.repair(&case, watched.retries.is_last_next(), now) else {
            self.deferred += 1;
            watched.wake(self.deletions.next(now));
            return None;
        };
        if cause == Cause::Drift {
            self.tools.metrics.drift();
        }
        watched.retries.record(cause, now);
        watched.wake(watched.retries.next());
        if let Some(event) = outcome_event(cause, &outcome) {
            let pod = name(&observed);
            match outcome {
                RepairOutcome::Failed(_) => tracing::warn!(pod, "{}", event.message),
                _ => tracing::info!(pod, "{}", event.message),
            }
            // Only the first and the last failure get an Event.
            let is_in_between = watched.retries.attempts() > 1 && !watched.retries.is_spent();
            if !(event.warning && is_in_between && matches!(outcome, RepairOutcome::Failed(_))) {
                self.report(&observed, event);
            }
        }
        Some(RepairResult { pod: name(&observed), cause, mode, outcome })
    }

    /// Logs how many deletions are deferred.
    pub(super) fn end(self) {
        if self.deferred > 0 {
            tracing::warn!(
                "deletion of {} pods deferred: rate limit of {MAX_DELETIONS} pods per {} s reached; check whether new \
                 pods are redirected",
                self.deferred,
                DELETION_PERIOD.as_secs()
            );
        }
    }

    /// Adds an Event to those that another thread writes: an API server that does not answer must not delay a repair.
    fn report(&self, observed: &ObservedPod, event: Event) {
        let Pod { namespace, name, uid, .. } = &observed.pod;
        let pod = PodRef { namespace: namespace.clone(), name: name.clone(), uid: uid.clone() };
        self.tools.reports.event(&pod, event);
    }

    /// Repairs a pod in the configured mode, and in the last attempt in the mode that replaces it. Drift is first
    /// repaired in place in every mode: another version of the plugin may write the same rules differently, and no pod
    /// must be deleted for that. Returns `None` if a deletion is required that the limit defers.
    fn repair(&mut self, case: &RepairCase<'_>, is_last: bool, now: Instant) -> Option<(RepairMode, RepairOutcome)> {
        let (mode, last_resort) = (self.tools.settings.mode, self.tools.settings.otherwise);
        if mode != RepairMode::InPlace && case.cause != Cause::Drift {
            return self.replace(mode, case, now);
        }
        let outcome = self.perform(RepairMode::InPlace, case);
        if mode != RepairMode::InPlace {
            return match outcome {
                RepairOutcome::Failed(_) => self.replace(mode, case, now),
                outcome => Some((RepairMode::InPlace, outcome)),
            };
        }
        if !is_last {
            return Some((mode, outcome));
        }
        match (outcome.after_last_attempt(), last_resort) {
            // A new pod would have the same rules, which are right.
            (failed, Some(RepairMode::Delete)) if outcome == RepairOutcome::NothingToDo => Some((mode, failed)),
            (RepairOutcome::Failed(_), Some(last_resort)) => self.replace(last_resort, case, now),
            (outcome, _) => Some((mode, outcome)),
        }
    }

    /// Deletes or labels a pod. Returns `None` if the limit defers its deletion.
    fn replace(
        &mut self,
        mode: RepairMode,
        case: &RepairCase<'_>,
        now: Instant,
    ) -> Option<(RepairMode, RepairOutcome)> {
        if mode == RepairMode::Delete && case.observed.owned && case.is_curable() {
            if self.deletions.next(now).is_some() {
                return None;
            }
            self.deletions.record(now);
        }
        Some((mode, self.perform(mode, case)))
    }

    fn perform(&self, mode: RepairMode, case: &RepairCase<'_>) -> RepairOutcome {
        let RepairTools { settings, account, metrics, .. } = self.tools;
        let result = match mode {
            // Found again, because the network namespace of the check may be gone.
            RepairMode::InPlace => self.find(case.observed).and_then(|found| in_place::repair(case, &found)),
            RepairMode::Delete => delete(account, case),
            RepairMode::Label => label(account, case.observed, &settings.label),
        };
        let outcome = result.unwrap_or_else(|error| RepairOutcome::Failed(error.to_string()));
        metrics.repair(mode.name(), outcome.name());
        outcome
    }

    fn find(&self, observed: &ObservedPod) -> Result<FoundNetns, Error> {
        let missing = || Error::new(Code::InvalidNetns, "no network namespace of the pod was found on this node");
        find::of_pod(self.tools.node.root(), &observed.pod)?.ok_or_else(missing)
    }

    /// Returns a definition; `None` if it can't be looked up. After a failure, no other one is looked up in this pass: the
    /// repairs must not wait for an API server that does not answer.
    fn definition(&self, object: &ObjectRef) -> Option<Lookup> {
        let mut definitions = self.definitions.borrow_mut();
        let has_failed = definitions.values().any(Option::is_none);
        let look_up = || {
            let query = DefinitionQuery { object: object.clone(), awaited: false };
            let found = self.tools.account.source_once(DEFINITION_TIMEOUT).definitions(&[query]);
            found.inspect_err(|error| tracing::debug!("{error}")).ok()?.into_iter().next()
        };
        definitions.entry(object.clone()).or_insert_with(|| if has_failed { None } else { look_up() }).clone()
    }

    /// Reads the status of the pod's network namespace; `None` if no namespace is found.
    fn container_status(&mut self, watched: &mut WatchedPod) -> Result<Option<ContainerStatus>, Error> {
        watched.location.take_if(|location| !location.exists());
        if watched.location.is_none() {
            let snapshot = match &mut self.netns_snapshot {
                Some(snapshot) => snapshot,
                None => self.netns_snapshot.insert(find::NodeSnapshot::take(self.tools.node.root())?),
            };
            let found = snapshot.of_pod(&watched.observed.pod)?;
            found.as_ref().map(|found| in_place::confirm(found, &watched.observed, LOCK_TIMEOUT)).transpose()?;
            watched.location = found.as_ref().and_then(NetnsLocation::of);
        }
        let status =
            |location: &NetnsLocation| plugin::container_status(&location.container_id, &location.netns, LOCK_TIMEOUT);
        watched.location.as_ref().map(status).transpose()
    }

    /// Returns the interval between two checks of a pod with the right rules: between half of and the whole configured
    /// interval, different for each pod, so that the checks are spread.
    fn interval(&self, observed: &ObservedPod) -> Option<Duration> {
        let interval = Some(self.tools.settings.interval).filter(|interval| !interval.is_zero())?;
        let part = BuildHasherDefault::<DefaultHasher>::default().hash_one(&observed.pod.uid) % 1000;
        Some(interval / 2 + interval / 2 * u32::try_from(part).unwrap_or(0) / 1000)
    }
}

fn name(observed: &ObservedPod) -> String {
    format!("{}/{}", observed.pod.namespace, observed.pod.name)
}
