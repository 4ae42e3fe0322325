//! A pass over one pod: repeats its ADD, or calls the first one if the plugin was not called for it.

use super::pod_state::{Finding, PodState};
use super::repair::{LOCK_TIMEOUT, add, check_deletable, older_connections};
use super::suspicion::{Cause, Suspicion, diagnose, suspect};
use super::texts;
use super::{RepairMode, Tools};
use crate::agent::facts::ObservedPod;
use crate::agent::install::Installed;
use crate::cluster::Event;
use crate::cni::{Code, Error, NetConf};
use crate::firewall::Rejected;
use crate::netns::find::FoundNetns;
use crate::plugin::running::{self, ContainerStatus, Repeated, RepeatedAdd, Sandbox};
use crate::pod::{Facts, Namespace};
use crate::sub_plugins::enrolled_by;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The interval of passes over each pod, in addition to when it changes. See [`Pass::interval`].
pub(super) const INTERVAL: Duration = Duration::from_secs(60);
/// How long a pod must be without rules before it is repaired: a runtime may be setting it up.
const GRACE: Duration = Duration::from_secs(3);
/// How long a pod must be without rules before it is deleted. The runtime may be creating a new sandbox with
/// the same address, while an ADD that runs before the plugin's takes long.
const GRACE_BEFORE_DELETION: Duration = Duration::from_secs(30);
/// How long the validation of a pod with the desired rules may have failed before it is reported. The kubelet restarts the
/// init container after five minutes at the latest (`pkg/kubelet/kubelet.go`, `MaxContainerBackOff`).
const VALIDATION_GRACE: Duration = Duration::from_secs(600);
/// How long a pod must be outside the ambient mesh before it is reported: Istio enrolls it after its start.
const ENROLLMENT_GRACE: Duration = Duration::from_secs(60);

/// A pass over one pod.
pub(super) struct Pass<'a> {
    pub(super) tools: &'a Tools,
    pub(super) installed: &'a [Installed],
    /// The time for the pod, and the clock at that time.
    pub(super) began: (Instant, Instant),
    pub(super) observed: &'a ObservedPod,
    pub(super) namespace: Option<&'a Arc<Namespace>>,
    /// Whether the observed state of pods and namespaces is current.
    pub(super) is_current: bool,
    /// The pod's sandbox, if it has saved state.
    pub(super) sandbox: Option<&'a Sandbox>,
}

/// The error of a pass and, if a repair failed, why the pod needed it.
type Failure = (Error, Option<Cause>);

impl Pass<'_> {
    /// Gives the pod the rules that an ADD would give it now, and checks whether it is in the ambient mesh.
    pub(super) fn run(&self, state: &mut PodState) {
        state.begin(self.now());
        if self.observed.has_ended {
            return state.rest();
        }
        let suspected = suspect(self.installed, self.observed, self.namespace.map(|namespace| &**namespace));
        let checked = match (self.sandbox, suspected) {
            (Some(sandbox), suspected) => {
                let repair = suspected.and_then(|(_, suspicion)| diagnose(suspicion, None));
                let repeated = self.repeat(sandbox, (suspected.is_some(), repair), state);
                repeated.map(Some).map_err(|error| (error, repair))
            }
            (None, Some((installed, suspicion))) => self.repair(installed, suspicion, state).map(|()| None),
            (None, None) => {
                state.rest();
                Ok(None)
            }
        };
        match checked.and_then(|netns| self.check_ambient(netns, state).map_err(|error| (error, None))) {
            Ok(()) => state.succeed(),
            Err(failure) => self.fail(failure, state),
        }
    }

    fn fail(&self, (error, repair): Failure, state: &mut PodState) {
        let (Tools { settings, metrics, .. }, now) = (self.tools, self.now());
        let lasts = state.fail(&error, &self.observed.full_name(), now);
        if let Some(cause) = repair.filter(|_| settings.repair != RepairMode::Off) {
            metrics.count("repairs", [("type", settings.repair.name()), ("result", "failed")]);
            state.report_hourly(texts::repair_failed(cause, &error.to_string()), now);
            return;
        }
        metrics.count("look_failures", [("reason", error.code.name())]);
        if self.sandbox.is_some() {
            metrics.count("policy_changes", [("result", "failed")]);
        }
        if lasts {
            state.report_hourly(texts::failed(&error), now);
        }
    }

    /// Repeats the ADD of a pod with saved state. `repair` is set if its validation has failed. Returns its network namespace.
    fn repeat(
        &self,
        sandbox: &Sandbox,
        (is_meshed, repair): (bool, Option<Cause>),
        state: &mut PodState,
    ) -> Result<PathBuf, Error> {
        let Tools { settings, metrics, .. } = self.tools;
        let is_known = state.container_id.as_ref() == Some(&sandbox.container_id);
        // The facts of a new sandbox's ADD may be newer than those that a watch observed which is not current.
        let evaluates = settings.live_policy && (self.is_current || is_known && self.namespace.is_some());
        let checks = state.next_check(self.now()) <= self.now();
        let repeated = self.run_add(sandbox, evaluates, checks && settings.repair != RepairMode::Off)?;
        let now = self.now();
        if evaluates || !settings.live_policy {
            state.container_id = Some(sandbox.container_id.clone());
        }
        if checks {
            state.last_check = Some(now);
        }
        // A change of the pod is followed by a comparison of the rules.
        let next = if checks { now + self.interval() } else { state.next_check(now) };
        let is_meshed = is_meshed || repeated.has_rules;
        state.due = is_meshed.then_some(next);
        if evaluates || !state.has(Finding::Rejected) {
            state.finding = repeated.has_rules.then(|| (Finding::Current, String::new()));
        }
        if evaluates && is_meshed {
            self.report_absent(&repeated, state);
            if !std::mem::replace(&mut state.unguarded, repeated.unguarded) && repeated.unguarded {
                state.events.push(texts::unguarded());
            }
        }
        if let Some(rejected) = repeated.rejected {
            self.report_rejected(rejected, state);
        }
        if repeated.has_committed || !repeated.change.is_empty() {
            state.count_change(now);
        }
        if !repeated.change.is_empty() {
            metrics.count("policy_changes", [("result", "applied")]);
            state.events.push(texts::changed(&repeated.change));
        } else if repeated.has_committed {
            metrics.count("drift", []);
            let older = || older_connections(self.observed, &sandbox.container_id, &repeated.netns);
            let older = if repeated.is_redirected { older() } else { 0 };
            self.report_repaired(RepairMode::InPlace, texts::repaired(Cause::Drift, older), state);
        }
        self.check_validation(repair, state);
        Ok(repeated.netns)
    }

    fn run_add(&self, sandbox: &Sandbox, evaluates: bool, restores: bool) -> Result<Repeated, Error> {
        let pod = self.observed.pod.clone();
        let unknown = || Namespace { name: pod.namespace.clone(), ..Namespace::default() };
        let namespace = self.namespace.map_or_else(unknown, |namespace| Namespace::clone(namespace));
        let facts = Facts { pod, namespace: Some(namespace) };
        let installed: Vec<&NetConf> = self.installed.iter().map(|installed| &installed.conf).collect();
        let (root, facts) = (self.tools.node.root(), evaluates.then_some(&facts));
        let run = |found: Option<&Path>| {
            RepeatedAdd { root, facts, installed: &installed, restores, found }.run(&sandbox.container_id)
        };
        match run(None) {
            // The runtime's path can be one below /proc, which does not lead to it from here.
            Err(error) if error.code == Code::InvalidNetns => match self.tools.find(&self.observed.pod) {
                Ok(Some(found)) => run(Some(&found.netns)),
                _ => Err(error),
            },
            result => result,
        }
    }

    /// Reports the requests of the pod that count as absent, and the parts of its facts that are unknown, once until they
    /// change.
    fn report_absent(&self, repeated: &Repeated, state: &mut PodState) {
        let absent = texts::absent(&repeated.absent, self.unknown().as_deref());
        if !absent.is_empty() {
            state.finding = Some((Finding::Rejected, absent.clone()));
        }
        if state.absent != absent && !absent.is_empty() {
            self.tools.metrics.count("policy_changes", [("result", "rejected")]);
            state.events.push(Event { warning: true, reason: "DetourPolicyRejected".into(), message: absent.clone() });
        }
        state.absent = absent;
    }

    /// Counts what the pod's guard has rejected since the last pass, and reports it.
    fn report_rejected(&self, rejected: Rejected, state: &mut PodState) {
        let new = rejected.since(std::mem::replace(&mut state.rejected, rejected));
        for (direction, count) in [("outbound", new.outbound), ("inbound", new.inbound)] {
            self.tools.metrics.add("guard_rejected", [("direction", direction)], count);
        }
        if new.is_any() {
            state.report_hourly(texts::rejected(new, &self.observed.pod), self.now());
        }
    }

    /// Returns the object of which the agent knows only a part.
    fn unknown(&self) -> Option<String> {
        let pod = &self.observed.pod;
        if self.observed.incomplete {
            return Some(format!("pod {}", self.observed.full_name()));
        }
        let is_unknown = self.namespace.is_none_or(|namespace| namespace.incomplete);
        is_unknown.then(|| format!("namespace {}", pod.namespace))
    }

    /// Reports a pod with the desired rules whose validation fails for long: for another reason.
    fn check_validation(&self, failed: Option<Cause>, state: &mut PodState) {
        let (now, mode) = (self.now(), self.tools.settings.repair);
        let Some(cause) = failed.filter(|_| mode != RepairMode::Off) else {
            state.suspected_since = None;
            return;
        };
        let why = "its rules are the desired ones; see the log of its init container";
        if now >= *state.suspected_since.get_or_insert(now) + VALIDATION_GRACE
            && state.report_hourly(texts::repair_failed(cause, why), now)
        {
            self.tools.metrics.count("repairs", [("type", mode.name()), ("result", "failed")]);
        }
    }

    /// Repairs a pod without saved state if its traffic bypasses the sidecar.
    fn repair(&self, installed: &Installed, suspicion: Suspicion, state: &mut PodState) -> Result<(), Failure> {
        let (mode, now) = (self.tools.settings.repair, self.now());
        (state.due, state.finding) = (Some(now + self.interval()), None);
        let looked = if suspicion.settled { self.look() } else { Ok((None, None)) };
        let status = looked.as_ref().ok().and_then(|(_, status)| status.as_ref());
        let cause = diagnose(suspicion, status);
        if cause.is_some() && status.is_some_and(ContainerStatus::is_bare) {
            state.finding = Some((Finding::NoRules, "the plugin was not called for it".to_owned()));
        }
        let Some(cause) = cause.filter(|_| mode != RepairMode::Off) else {
            state.suspected_since = None;
            return looked.map(drop).map_err(|error| (error, None));
        };
        let since = *state.suspected_since.get_or_insert(now);
        let grace = if mode == RepairMode::InPlace { GRACE } else { GRACE_BEFORE_DELETION };
        if cause == Cause::NoRules && now < since + grace {
            state.due = Some(since + grace);
            return Ok(());
        }
        let failed = |error| (error, Some(cause));
        if mode == RepairMode::InPlace {
            let added = looked.and_then(|looked| add(self.observed, (installed, suspicion), looked));
            let older = added.map_err(failed)?;
            self.report_repaired(mode, texts::repaired(cause, older), state);
            // The pod has saved state now.
            state.wake(now);
            return Ok(());
        }
        check_deletable(self.observed, suspicion).map_err(failed)?;
        if let Some(next) = self.tools.deletions.borrow_mut().next(now) {
            tracing::info!(
                pod = self.observed.full_name(),
                "deletion deferred: too many pods were deleted; check whether new pods are redirected"
            );
            state.due = Some(next);
            return Ok(());
        }
        self.tools.deletions.borrow_mut().take(now);
        state.deletion = Some(cause);
        Ok(())
    }

    fn report_repaired(&self, mode: RepairMode, event: Event, state: &mut PodState) {
        self.tools.metrics.count("repairs", [("type", mode.name()), ("result", "done")]);
        state.events.push(event);
    }

    /// Finds the pod's network namespace, and reads its state.
    fn look(&self) -> Result<(Option<FoundNetns>, Option<ContainerStatus>), Error> {
        let found = self.locate()?;
        let status = |found: &FoundNetns| {
            let id = found.container_id.as_deref()?;
            Some(running::container_status(id, &found.netns, LOCK_TIMEOUT))
        };
        let status = found.as_ref().and_then(status).transpose()?;
        Ok((found, status))
    }

    /// Finds the pod's network namespace. A sandbox that was found may be a previous one, and the addresses are those of the
    /// previous sandbox until all ADD calls for the new one have returned.
    ///
    /// # Errors
    /// The network namespace that was found has none of the pod's addresses, or it can't be read.
    fn locate(&self) -> Result<Option<FoundNetns>, Error> {
        let Some(found) = self.tools.find(&self.observed.pod)? else { return Ok(None) };
        if found.has_any_address(&self.observed.addresses, LOCK_TIMEOUT)? {
            return Ok(Some(found));
        }
        let msg = format!("the network namespace that was found has none of the pod's addresses: {}", found.evidence);
        Err(Error::new(Code::InvalidNetns, msg))
    }

    /// Reports a pod that is enrolled in the ambient mesh and outside of it. What is missing is Istio's, so nothing is
    /// repaired.
    fn check_ambient(&self, netns: Option<PathBuf>, state: &mut PodState) -> Result<(), Error> {
        let ObservedPod { pod, addresses, is_deleting, .. } = self.observed;
        let is_enrolled = enrolled_by(pod, self.namespace.map(|namespace| &**namespace)).is_some();
        if !is_enrolled || *is_deleting || addresses.is_empty() {
            state.outside_since = None;
            return Ok(());
        }
        let netns = match netns {
            Some(netns) => Some(netns),
            None => self.locate()?.map(|found| found.netns),
        };
        let lacking = netns.map(|netns| running::lacks_of_ambient(&netns, LOCK_TIMEOUT)).transpose()?.flatten();
        let now = self.now();
        state.wake(now + self.interval());
        let Some(lacking) = lacking else {
            state.outside_since = None;
            return Ok(());
        };
        let reported = *state.outside_since.get_or_insert(now) + ENROLLMENT_GRACE;
        if now < reported {
            state.wake(reported);
            return Ok(());
        }
        state.report_hourly(texts::outside_mesh(&lacking), now);
        state.finding = Some((Finding::OutsideMesh, lacking));
        Ok(())
    }

    fn now(&self) -> Instant {
        self.began.0 + self.began.1.elapsed()
    }

    /// Returns the interval between two passes over a pod with the right rules: between half of and the whole
    /// [`INTERVAL`], different for each pod, so that the passes are spread.
    fn interval(&self) -> Duration {
        let part = BuildHasherDefault::<DefaultHasher>::default().hash_one(&self.observed.pod.uid) % 1000;
        INTERVAL / 2 + INTERVAL / 2 * u32::try_from(part).unwrap_or(0) / 1000
    }
}
