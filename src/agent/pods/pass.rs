//! A pass over one pod: repeats its ADD, or repairs it if the plugin was not called for it.

use super::pod_state::{Finding, NetnsLocation, PodState};
use super::repair::{RepairCase, RepairOutcome, RepairResult, confirm};
use super::settings::{RepairMode, Tools};
use super::suspicion::{Cause, Suspicion, diagnose, is_called, suspect};
use super::texts;
use crate::agent::facts::ObservedPod;
use crate::agent::install::Installed;
use crate::cluster::{DefinitionQuery, Definitions, Event, Lookup, ObjectRef};
use crate::cni::{Code, Error, NetConf};
use crate::firewall::Rejected;
use crate::netns::find::{self, FoundNetns};
use crate::plugin::running::{self, ContainerStatus, Repeated, RepeatedAdd, Sandbox};
use crate::pod::{Facts, Namespace};
use crate::sub_plugins::enrolled_by;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The interval of passes over each pod, in addition to when it changes. See [`Pass::interval`].
const INTERVAL: Duration = Duration::from_secs(60);
/// How long a pod must be without rules before it is repaired: a runtime may be setting it up.
const GRACE: Duration = Duration::from_secs(3);
/// How long a pod must be without rules before it is deleted. The runtime may be creating a new sandbox with
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

/// A pass over one pod.
pub(super) struct Pass {
    pub(super) tools: Arc<Tools>,
    pub(super) installed: Arc<Vec<Installed>>,
    pub(super) lookups: Arc<SharedLookups>,
    pub(super) observed: Arc<ObservedPod>,
    pub(super) namespace: Option<Arc<Namespace>>,
    /// Whether the observed state of pods and namespaces is current.
    pub(super) is_current: bool,
    /// The pod's sandbox, if it has saved state.
    pub(super) sandbox: Option<Sandbox>,
}

impl Pass {
    /// Repeats the pod's ADD, repairs the pod if needed, and checks whether it is in the ambient mesh. Returns the result of
    /// a repair.
    pub(super) fn run(&self, state: &mut PodState) -> Option<RepairResult> {
        let result = self.check_rules(state);
        self.check_ambient(state);
        result
    }

    /// Reports a pod that is enrolled in the ambient mesh and outside of it. What is missing is Istio's, so nothing is
    /// repaired.
    fn check_ambient(&self, state: &mut PodState) {
        let ObservedPod { pod, addresses, ending, .. } = &*self.observed;
        let is_enrolled = enrolled_by(pod, self.namespace.as_deref()).is_some();
        if !is_enrolled || *ending || addresses.is_empty() {
            state.outside_since = None;
            return;
        }
        let found = self.locate(state).and_then(|location| {
            let Some(location) = location else { return Ok(None) };
            running::lacks_of_ambient(&location.netns, LOCK_TIMEOUT)
        });
        let now = self.lookups.now();
        match found {
            Ok(lacking) => {
                if state.record_outside(lacking.clone(), self.interval(), now)
                    && let Some(lacking) = lacking
                {
                    let event = texts::outside_mesh(&lacking);
                    tracing::warn!(pod = name(&self.observed), "{}", event.message);
                    self.report(event);
                }
            }
            Err(error) => {
                tracing::debug!(pod = name(&self.observed), "not checked whether it is in the ambient mesh: {error}");
                state.wake(Some(now + self.interval()));
            }
        }
    }

    fn check_rules(&self, state: &mut PodState) -> Option<RepairResult> {
        let observed = &self.observed;
        state.begin(self.lookups.now());
        let suspected = suspect(&self.installed, observed, self.namespace.as_deref());
        match (&self.sandbox, suspected) {
            _ if observed.ending => state.rest(),
            (Some(sandbox), suspected) => {
                let restored = self.repeat(sandbox, suspected.is_some(), state);
                // After a repair, the kubelet repeats the validation.
                let failed = suspected.filter(|(_, suspicion)| suspicion.validation_failed && restored.is_none());
                return failed
                    .and_then(|(installed, suspicion)| self.examine(installed, suspicion, state))
                    .or(restored);
            }
            (None, Some((installed, suspicion))) => return self.examine(installed, suspicion, state),
            (None, None) => state.rest(),
        }
        None
    }

    /// Repeats the ADD of a pod with saved state. Returns the result if this restored rules.
    fn repeat(&self, sandbox: &Sandbox, is_meshed: bool, state: &mut PodState) -> Option<RepairResult> {
        let (observed, settings, metrics) = (&self.observed, &self.tools.settings, &self.tools.metrics);
        let is_known = state.container_id.as_ref() == Some(&sandbox.container_id);
        // The facts of a new sandbox's ADD may be newer than those that a watch observed which is not current.
        let evaluates = settings.live_policy && (self.is_current || is_known && self.namespace.is_some());
        let namespace = self.namespace.as_deref().cloned();
        let namespace =
            namespace.unwrap_or_else(|| Namespace { name: observed.pod.namespace.clone(), ..Namespace::default() });
        let facts = Facts { pod: observed.pod.clone(), namespace: Some(namespace) };
        let installed: Vec<&NetConf> = self.installed.iter().map(|installed| &installed.conf).collect();
        let add = RepeatedAdd {
            root: self.tools.node.root(),
            facts: evaluates.then_some(&facts),
            installed: &installed,
            restores: settings.repair != RepairMode::Off && state.may_check(self.lookups.now()),
            found: None,
        };
        let run = |add: &RepeatedAdd<'_>| {
            let _turn = self.tools.sandbox.lock().unwrap_or_else(PoisonError::into_inner);
            add.run(&sandbox.container_id)
        };
        let mut repeated = run(&add);
        // The runtime's path can be one below /proc, which does not lead to it from here.
        if repeated.as_ref().is_err_and(|error| error.code == Code::InvalidNetns)
            && let Ok(Some(found)) = self.found_in_snapshot()
        {
            repeated = run(&RepeatedAdd { found: Some(&found.netns), ..add });
        }
        let now = self.lookups.now();
        state.record(repeated.as_ref().err(), &observed.pod.reference(), now);
        let repeated = match repeated {
            Ok(repeated) => repeated,
            Err(error) => {
                metrics.look_failure(error.code.name());
                metrics.policy_change("failed");
                if state.needs_event(&error, now) {
                    self.report(texts::failed(&error));
                }
                state.postpone();
                return None;
            }
        };
        state.location = NetnsLocation::at(&repeated.netns, &sandbox.container_id);
        if evaluates || !settings.live_policy {
            state.container_id = Some(sandbox.container_id.clone());
        }
        let is_checked = add.restores || settings.repair == RepairMode::Off;
        state.last_check = if is_checked { Some(now) } else { state.last_check };
        // A change of the pod is followed by a comparison of the rules.
        let next = if is_checked { now + self.interval() } else { state.next_check(now) };
        state.due = (is_meshed || repeated.has_rules).then_some(next);
        if evaluates || !matches!(state.finding, Finding::Rejected(_)) {
            state.finding = if repeated.has_rules { Finding::Current } else { Finding::Nothing };
        }
        if evaluates && (is_meshed || repeated.has_rules) {
            self.report_absent(&repeated, state);
            if !std::mem::replace(&mut state.unguarded, repeated.unguarded) && repeated.unguarded {
                self.report(texts::unguarded());
            }
        }
        if let Some(rejected) = repeated.rejected {
            self.report_rejected(rejected, state, now);
        }
        if repeated.has_committed || !repeated.change.is_empty() {
            state.limit.record(now);
        }
        if !repeated.change.is_empty() {
            metrics.policy_change("applied");
            let event = texts::changed(&repeated.change);
            tracing::info!(pod = name(observed), "{}", event.message);
            self.report(event);
            return None;
        }
        repeated.has_committed.then(|| self.report_restored(sandbox, &repeated))
    }

    /// Reports the requests of the pod that count as absent, and the parts of its facts that are unknown, once until they
    /// change.
    fn report_absent(&self, repeated: &Repeated, state: &mut PodState) {
        let absent = texts::absent(&repeated.absent, self.unknown().as_deref());
        if !absent.is_empty() {
            state.finding = Finding::Rejected(absent.clone());
        }
        if state.absent == absent {
            return;
        }
        state.absent.clone_from(&absent);
        if !absent.is_empty() {
            self.tools.metrics.policy_change("rejected");
            tracing::warn!(pod = name(&self.observed), "{absent}");
            self.report(Event { warning: true, reason: "DetourPolicyRejected".into(), message: absent });
        }
    }

    /// Counts what the pod's guard has rejected since the last pass, and reports it.
    fn report_rejected(&self, rejected: Rejected, state: &mut PodState, now: Instant) {
        let (new, needs_event) = state.record_rejected(rejected, now);
        self.tools.metrics.rejected_by_guard(new.outbound, new.inbound);
        if needs_event {
            let event = texts::rejected(new, &self.observed.pod);
            tracing::warn!(pod = name(&self.observed), "{}", event.message);
            self.report(event);
        }
    }

    /// Returns the object of which the agent knows only a part.
    fn unknown(&self) -> Option<String> {
        let pod = &self.observed.pod;
        if self.observed.incomplete {
            Some(format!("pod {}/{}", pod.namespace, pod.name))
        } else {
            let is_unknown = self.namespace.as_ref().is_none_or(|namespace| namespace.incomplete);
            is_unknown.then(|| format!("namespace {}", pod.namespace))
        }
    }

    /// Reports rules that were restored, and the connections that still bypass the sidecar.
    fn report_restored(&self, sandbox: &Sandbox, repeated: &Repeated) -> RepairResult {
        let (cause, mode) = (Cause::Drift, RepairMode::InPlace);
        let older = if repeated.is_redirected {
            running::bypassing(&sandbox.container_id, &repeated.netns, LOCK_TIMEOUT)
        } else {
            Ok(0)
        };
        let outcome = RepairOutcome::of_count(older, &self.observed);
        self.tools.metrics.drift.inc();
        self.tools.metrics.repair(mode.name(), outcome.name());
        self.report_outcome(cause, &outcome, false);
        RepairResult { pod: name(&self.observed), cause, mode, outcome }
    }

    /// Examines a pod with a sidecar for which the plugin was not called, or whose validation failed, and repairs it.
    fn examine(&self, installed: &Installed, suspicion: Suspicion, state: &mut PodState) -> Option<RepairResult> {
        let observed = &self.observed;
        let status = if suspicion.settled { self.container_status(state) } else { Ok(None) };
        // Other passes may have taken long.
        let now = self.lookups.now();
        state.record(status.as_ref().err(), &observed.pod.reference(), now);
        if let Err(error) = &status {
            self.tools.metrics.look_failure(error.code.name());
            // Of other failures, the repair reports the first and the last one.
            let is_its_own = matches!(error.code, Code::TryAgain | Code::ForeignRules);
            if is_its_own && state.needs_event(error, now) {
                self.report(texts::failed(error));
            }
        }
        let is_read = status.is_ok();
        let status = status.ok().flatten();
        let is_called = || is_called(installed, &observed.pod, &|object| self.definition(object));
        let cause = diagnose(suspicion, status.as_ref()).filter(|cause| *cause != Cause::NoRules || is_called());
        if self.sandbox.is_none() && is_read {
            state.finding = match cause {
                Some(Cause::NoRules) => Finding::NoRules("the plugin was not called for it".to_owned()),
                _ => Finding::Nothing,
            };
        }
        let mode = self.tools.settings.repair;
        if mode == RepairMode::Off {
            state.due = Some(now + self.interval());
            return None;
        }
        let grace = if mode == RepairMode::InPlace { GRACE } else { GRACE_BEFORE_DELETION };
        if !state.record_check(cause, self.interval(), grace, now) {
            state.postpone();
            return None;
        }
        let cause = cause?;
        let is_right = status.is_some_and(|status| status.is_right());
        let case = RepairCase { root: self.tools.node.root(), installed, observed, suspicion, cause, is_right };
        // Another version of the plugin may write the same rules differently, and no pod must be deleted for that.
        let mode = if cause == Cause::Drift { RepairMode::InPlace } else { mode };
        match self.repair(mode, &case, state.attempts.is_last_next(), now) {
            Ok(outcome) => {
                state.attempts.record(cause, now);
                state.wake(state.attempts.next());
                self.report_outcome(cause, &outcome, state.attempts.is_in_between());
                if matches!(outcome, RepairOutcome::Repaired | RepairOutcome::RepairedForNew { .. }) {
                    // The pod has saved state now.
                    state.wake(Some(now));
                }
                Some(RepairResult { pod: name(observed), cause, mode, outcome })
            }
            Err(next) => {
                state.wake(Some(next));
                None
            }
        }
    }

    /// Repairs a pod.
    ///
    /// # Errors
    /// A deletion is required, and the rate limit defers it to this time.
    fn repair(
        &self,
        mode: RepairMode,
        case: &RepairCase<'_>,
        is_last: bool,
        now: Instant,
    ) -> Result<RepairOutcome, Instant> {
        let Tools { account, metrics, .. } = &*self.tools;
        if case.cause == Cause::Drift {
            metrics.drift.inc();
        }
        if mode == RepairMode::Delete && case.is_deletable() {
            let mut deletions = self.tools.deletions.lock().unwrap_or_else(PoisonError::into_inner);
            deletions.take(now).inspect_err(|_| deletions.log_deferred(now))?;
        }
        let result = if mode == RepairMode::Delete {
            case.delete(account)
        } else {
            let _turn = self.tools.sandbox.lock().unwrap_or_else(PoisonError::into_inner);
            // Found again, because the network namespace of the check may be gone.
            self.find().and_then(|found| case.repair_in_place(&found))
        };
        let outcome = match result {
            Ok(RepairOutcome::NothingToDo) if is_last => {
                RepairOutcome::Failed("its rules are the desired ones; see the log of its init container".into())
            }
            Ok(outcome) => outcome,
            Err(error) => RepairOutcome::Failed(error.to_string()),
        };
        metrics.repair(mode.name(), outcome.name());
        Ok(outcome)
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
            let found = self.tools.account.within(DEFINITION_TIMEOUT).once().definitions(&[query]);
            found.inspect_err(|error| tracing::debug!("{error}")).ok()?.into_iter().next()
        };
        definitions.entry(object.clone()).or_insert_with(|| if has_failed { None } else { look_up() }).clone()
    }

    /// Reads the status of the pod's network namespace; `None` if no namespace is found.
    fn container_status(&self, state: &mut PodState) -> Result<Option<ContainerStatus>, Error> {
        let status = |location: &NetnsLocation| {
            let _turn = self.tools.sandbox.lock().unwrap_or_else(PoisonError::into_inner);
            running::container_status(&location.container_id, &location.netns, LOCK_TIMEOUT)
        };
        self.locate(state)?.map(status).transpose()
    }

    /// Returns where the pod's network namespace is; `None` if it is not found.
    fn locate<'s>(&self, state: &'s mut PodState) -> Result<Option<&'s NetnsLocation>, Error> {
        state.location.take_if(|location| !location.exists());
        if state.location.is_none() {
            let found = self.found_in_snapshot()?;
            found.as_ref().map(|found| confirm(found, &self.observed, LOCK_TIMEOUT)).transpose()?;
            state.location = found.as_ref().and_then(NetnsLocation::of);
        }
        Ok(state.location.as_ref())
    }

    fn found_in_snapshot(&self) -> Result<Option<FoundNetns>, Error> {
        let mut snapshot = self.lookups.netns_snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        let snapshot = match &mut *snapshot {
            Some(snapshot) => snapshot,
            none => none.insert(find::NodeSnapshot::take(self.tools.node.root())?),
        };
        snapshot.of_pod(&self.observed.pod)
    }

    /// Returns the interval between two passes over a pod with the right rules: between half of and the whole
    /// [`INTERVAL`], different for each pod, so that the passes are spread.
    fn interval(&self) -> Duration {
        let part = BuildHasherDefault::<DefaultHasher>::default().hash_one(&self.observed.pod.uid) % 1000;
        INTERVAL / 2 + INTERVAL / 2 * u32::try_from(part).unwrap_or(0) / 1000
    }
}

/// Returns `NAMESPACE/NAME`.
pub(super) fn name(observed: &ObservedPod) -> String {
    format!("{}/{}", observed.pod.namespace, observed.pod.name)
}
