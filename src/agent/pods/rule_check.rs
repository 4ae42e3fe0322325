//! The check of one pod's live rules, and its repair if it needs one.

use super::pod_rules::{NetnsLocation, PodRules};
use super::repair::{RepairCase, RepairOutcome, RepairResult, confirm};
use super::settings::Tools;
use super::settings::{RepairMode, RepairSettings};
use super::suspicion::{Cause, diagnose, is_called, suspect};
use super::texts;
use crate::agent::facts::ObservedPod;
use crate::agent::install::Installed;
use crate::cluster::{DefinitionQuery, Event, Lookup, ObjectRef};
use crate::cni::{Code, Error};
use crate::netns::find::{self, FoundNetns};
use crate::plugin::running::{self, ContainerStatus};
use crate::pod::Namespace;
use kube::core::SelectorExt;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The interval in which the rules of each pod are checked, in addition to when it changes. See [`RuleCheck::interval`].
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// How long a pod must be without rules before it is repaired: a runtime may be setting it up.
const GRACE: Duration = Duration::from_secs(3);
/// How long a pod must be without rules before it is deleted or labeled. The runtime may be creating a new sandbox with
/// the same address, while an ADD that runs before the plugin's takes long.
const GRACE_BEFORE_DELETION: Duration = Duration::from_secs(30);
/// How long a check waits for the lock of a network namespace: a process in there can hold it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// The timeout for a definition that a pod without rules selects.
const DEFINITION_TIMEOUT: Duration = Duration::from_secs(2);

/// What the checks that begin together share.
pub(super) struct SharedLookups {
    /// The time for the pods, and the clock at that time.
    began: (Instant, Instant),
    /// The node's network namespaces, read once for all pods.
    netns_snapshot: Mutex<Option<find::NodeSnapshot>>,
    /// The definitions that pods without rules select, looked up once; `None` if the API server does not return it.
    definitions: Mutex<BTreeMap<ObjectRef, Option<Lookup>>>,
}

impl SharedLookups {
    pub(super) fn new(now: Instant) -> Self {
        Self { began: (now, Instant::now()), netns_snapshot: Mutex::default(), definitions: Mutex::default() }
    }

    fn now(&self) -> Instant {
        self.began.0 + self.began.1.elapsed()
    }
}

/// The check of one pod.
pub(super) struct RuleCheck {
    pub(super) tools: Arc<Tools>,
    pub(super) settings: RepairSettings,
    pub(super) installed: Arc<Vec<Installed>>,
    pub(super) lookups: Arc<SharedLookups>,
    pub(super) observed: Arc<ObservedPod>,
    pub(super) namespace: Option<Arc<Namespace>>,
}

impl RuleCheck {
    /// Checks the pod, and repairs it if needed. Returns the result of a repair.
    pub(super) fn run(&self, rules: &mut PodRules) -> Option<RepairResult> {
        let observed = &self.observed;
        let suspected = suspect(&self.installed, observed, self.namespace.as_deref());
        let Some((installed, suspicion)) = suspected.filter(|_| self.settings.selector.matches(&observed.pod.labels))
        else {
            rules.rest();
            return None;
        };
        let status = if suspicion.settled { self.container_status(rules) } else { Ok(None) };
        // Other checks may have taken long.
        let now = self.lookups.now();
        rules.record_read(status.as_ref().err(), &observed.pod.reference(), now);
        if let Err(error) = &status {
            self.tools.metrics.look_failure(error.code.name());
            if rules.needs_event(error, now) {
                self.report(texts::unreadable_rules(error));
            }
        }
        let status = status.ok().flatten();
        let is_called = || is_called(installed, &observed.pod, &|object| self.definition(object));
        let cause = diagnose(suspicion, status.as_ref()).filter(|cause| *cause != Cause::NoRules || is_called());
        let grace = if self.settings.mode == RepairMode::InPlace { GRACE } else { GRACE_BEFORE_DELETION };
        if !rules.record_check(cause, self.interval(), grace, now) {
            rules.postpone();
            return None;
        }
        let cause = cause?;
        let is_right = status.is_some_and(|status| status.is_right());
        let case = RepairCase { installed, observed, suspicion, cause, is_right };
        match self.repair(&case, rules.attempts.is_last_next(), now) {
            Ok((mode, outcome)) => {
                rules.attempts.record(cause, now);
                rules.wake(rules.attempts.next());
                self.report_outcome(cause, &outcome, rules.attempts.is_in_between());
                Some(RepairResult { pod: name(observed), cause, mode, outcome })
            }
            Err(next) => {
                rules.wake(Some(next));
                None
            }
        }
    }

    /// Repairs a pod in the configured mode. Drift is first repaired in place in every mode: another version of the
    /// plugin may write the same rules differently, and no pod must be deleted for that.
    ///
    /// # Errors
    /// A deletion is required, and the rate limit defers it to this time.
    fn repair(
        &self,
        case: &RepairCase<'_>,
        is_last: bool,
        now: Instant,
    ) -> Result<(RepairMode, RepairOutcome), Instant> {
        if case.cause == Cause::Drift {
            self.tools.metrics.drift.inc();
        }
        let mode = self.settings.mode;
        if mode == RepairMode::InPlace || case.cause == Cause::Drift {
            let outcome = self.perform(RepairMode::InPlace, case);
            let is_replaced = mode != RepairMode::InPlace && matches!(outcome, RepairOutcome::Failed(_));
            if !is_replaced {
                let is_unhelpful = is_last && mode == RepairMode::InPlace && outcome == RepairOutcome::NothingToDo;
                let outcome = if is_unhelpful {
                    RepairOutcome::Failed("its rules are the desired ones; see the log of its init container".into())
                } else {
                    outcome
                };
                return Ok((RepairMode::InPlace, outcome));
            }
        }
        if mode == RepairMode::Delete && case.is_deletable() {
            let mut deletions = self.tools.deletions.lock().unwrap_or_else(PoisonError::into_inner);
            deletions.take(now).inspect_err(|_| deletions.log_deferred(now))?;
        }
        Ok((mode, self.perform(mode, case)))
    }

    fn perform(&self, mode: RepairMode, case: &RepairCase<'_>) -> RepairOutcome {
        let Tools { account, metrics, .. } = &*self.tools;
        let result = match mode {
            // Found again, because the network namespace of the check may be gone.
            RepairMode::InPlace => self.find().and_then(|found| case.repair_in_place(&found)),
            RepairMode::Delete => case.delete(account),
            RepairMode::Label => case.label(account, &self.settings.label),
        };
        let outcome = result.unwrap_or_else(|error| RepairOutcome::Failed(error.to_string()));
        metrics.repair(mode.name(), outcome.name());
        outcome
    }

    fn find(&self) -> Result<FoundNetns, Error> {
        let missing = || Error::new(Code::InvalidNetns, "no network namespace of the pod was found on this node");
        find::of_pod(self.tools.node.root(), &self.observed.pod)?.ok_or_else(missing)
    }

    /// Logs the outcome of a repair, and creates its Event. Of failures, only the first and the last one get an Event.
    fn report_outcome(&self, cause: Cause, outcome: &RepairOutcome, is_in_between: bool) {
        let Some(event) = texts::repaired(cause, outcome) else { return };
        let (pod, has_failed) = (name(&self.observed), matches!(outcome, RepairOutcome::Failed(_)));
        if has_failed {
            tracing::warn!(pod, "{}", event.message);
        } else {
            tracing::info!(pod, "{}", event.message);
        }
        if !(has_failed && is_in_between) {
            self.report(event);
        }
    }

    fn report(&self, event: Event) {
        self.tools.reports.event(&self.observed.pod.reference(), event);
    }

    /// Returns a definition; `None` if it can't be looked up. After a failure, no other one is looked up by the checks
    /// that began together: they must not wait for an API server that does not answer.
    fn definition(&self, object: &ObjectRef) -> Option<Lookup> {
        let mut definitions = self.lookups.definitions.lock().unwrap_or_else(PoisonError::into_inner);
        let has_failed = definitions.values().any(Option::is_none);
        let look_up = || {
            let query = DefinitionQuery { object: object.clone(), awaited: false };
            let found = self.tools.account.source_once(DEFINITION_TIMEOUT).definitions(&[query]);
            found.inspect_err(|error| tracing::debug!("{error}")).ok()?.into_iter().next()
        };
        definitions.entry(object.clone()).or_insert_with(|| if has_failed { None } else { look_up() }).clone()
    }

    /// Reads the status of the pod's network namespace; `None` if no namespace is found.
    fn container_status(&self, rules: &mut PodRules) -> Result<Option<ContainerStatus>, Error> {
        rules.location.take_if(|location| !location.exists());
        if rules.location.is_none() {
            let found = self.found_in_snapshot()?;
            found.as_ref().map(|found| confirm(found, &self.observed, LOCK_TIMEOUT)).transpose()?;
            rules.location = found.as_ref().and_then(NetnsLocation::of);
        }
        let status =
            |location: &NetnsLocation| running::container_status(&location.container_id, &location.netns, LOCK_TIMEOUT);
        rules.location.as_ref().map(status).transpose()
    }

    fn found_in_snapshot(&self) -> Result<Option<FoundNetns>, Error> {
        let mut snapshot = self.lookups.netns_snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        let snapshot = match &mut *snapshot {
            Some(snapshot) => snapshot,
            none => none.insert(find::NodeSnapshot::take(self.tools.node.root())?),
        };
        snapshot.of_pod(&self.observed.pod)
    }

    /// Returns the interval between two checks of a pod with the right rules: between half of and the whole
    /// [`CHECK_INTERVAL`], different for each pod, so that the checks are spread.
    fn interval(&self) -> Duration {
        let part = BuildHasherDefault::<DefaultHasher>::default().hash_one(&self.observed.pod.uid) % 1000;
        CHECK_INTERVAL / 2 + CHECK_INTERVAL / 2 * u32::try_from(part).unwrap_or(0) / 1000
    }
}

/// Returns `NAMESPACE/NAME`.
pub(super) fn name(observed: &ObservedPod) -> String {
    format!("{}/{}", observed.pod.namespace, observed.pod.name)
}
