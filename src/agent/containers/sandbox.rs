//! The state of a pod sandbox: its containers as the runtime reports them, and the bypass of the excluded ones.

use super::check::{Check, Observed, Saved, names};
use crate::agent::metrics::Metrics;
use crate::agent::nri::{NriContainer, NriPod, START_TIMEOUT};
use crate::cluster::Event;
use crate::cluster::agent::BypassingContainer;
use crate::cni::Code;
use crate::pod::PodRef;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::oneshot;

/// The interval of the checks while excluded containers run or may run, and after a failure.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The interval of the checks while no excluded container runs.
const REST_INTERVAL: Duration = Duration::from_secs(30);
/// The limit of different failures of a sandbox that are logged: a pod can make them alternate.
const MAX_LOGGED: usize = 8;

/// A pod sandbox.
#[derive(Default)]
pub(super) struct Sandbox {
    pub(super) id: String,
    pub(super) pod: Option<PodRef>,
    containers: BTreeMap<String, Container>,
    saved: Saved,
    /// Since when the sandbox is known to exclude containers.
    excluding_since: Option<Instant>,
    /// When the running check began.
    checking: Option<Instant>,
    /// When the next full check is due; `None` if the saved state must change first.
    due: Option<Instant>,
    /// Whether the last check took longer than the runtime waits.
    is_slow: bool,
    /// The names of the containers that have elements; `None` before the first check.
    bypassing: Option<BTreeSet<String>>,
    /// The last failure; empty after a success.
    pub(super) failure: String,
    /// The failures that were logged.
    logged: BTreeSet<String>,
    /// The names of the containers whose capture was reported.
    reported: BTreeSet<String>,
    /// New Events of the pod.
    pub(super) events: Vec<Event>,
}

/// A container that runs, is about to start, or has ended a moment ago.
pub(super) struct Container {
    observed: Observed,
    /// Whether the runtime reported it before its first instruction.
    is_from_start: bool,
    state: ContainerState,
}

/// The state of a container.
enum ContainerState {
    /// It has no element. The runtime waits for the answer before the first instruction.
    Starting(Option<Answer>),
    /// It has an element.
    Bypassing,
    /// It has exited, and may still have an element.
    Ended,
}

/// The answer that the runtime waits for, since when.
struct Answer(oneshot::Sender<()>, Instant);

impl Answer {
    /// Answers. Returns whether the runtime still waited.
    fn send(self, metrics: &Metrics) -> bool {
        metrics.nri_seconds.observe([], self.1.elapsed().as_secs_f64());
        self.0.send(()).is_ok()
    }
}

impl Container {
    fn new(reported: NriContainer, has_started: bool, state: ContainerState) -> Self {
        Self { observed: Observed { reported, group: None, has_started }, is_from_start: !has_started, state }
    }

    fn name(&self) -> &str {
        &self.observed.reported.name
    }

    const fn is_awaited(&self) -> bool {
        matches!(self.state, ContainerState::Starting(Some(_)))
    }

    const fn is_ended(&self) -> bool {
        matches!(self.state, ContainerState::Ended)
    }

    /// Answers if the runtime waits for the container. Returns whether it still waited.
    fn answer(&mut self, metrics: &Metrics) -> Option<bool> {
        let ContainerState::Starting(answer) = &mut self.state else { return None };
        answer.take().map(|answer| answer.send(metrics))
    }
}

impl Sandbox {
    pub(super) fn new(id: &str) -> Self {
        Self { id: id.to_owned(), ..Self::default() }
    }

    fn excludes(&self, name: &str) -> bool {
        self.saved.excluded.as_ref().is_some_and(|excluded| names(excluded, name))
    }

    /// Returns the excluded containers that run.
    fn running(&self) -> impl Iterator<Item = &Container> {
        self.containers.values().filter(|container| !container.is_ended() && self.excludes(container.name()))
    }

    /// Returns whether the runtime waits for a container of the sandbox.
    pub(super) fn is_awaited(&self) -> bool {
        self.containers.values().any(Container::is_awaited)
    }

    /// Returns whether nothing is known about the sandbox anymore.
    pub(super) fn is_unused(&self) -> bool {
        self.saved.modified.is_none() && self.containers.is_empty() && self.checking.is_none() && self.due.is_none()
    }

    pub(super) fn set_pod(&mut self, pod: &NriPod) {
        let uid = (!pod.uid.is_empty()).then(|| pod.uid.clone());
        self.pod = Some(PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid });
    }

    /// Makes a full check due.
    pub(super) fn wake(&mut self) {
        self.due = Some(Instant::now());
    }

    /// Makes a check due if the saved state has changed.
    pub(super) fn scanned(&mut self, modified: Option<SystemTime>) {
        // After a failure to read it, the next check is due.
        if modified != self.saved.modified && self.due.is_none_or(|_| self.failure.is_empty()) {
            self.wake();
        }
    }

    /// Adds a container that is about to start. The runtime waits for `answer`, unless it has waited too long for the
    /// pod before.
    pub(super) fn start(&mut self, container: NriContainer, answer: oneshot::Sender<()>, metrics: &Metrics) {
        let (id, name, answer) = (container.id.clone(), container.name.clone(), Answer(answer, Instant::now()));
        let is_slow = self.is_slow || self.checking.is_some_and(|since| since.elapsed() > START_TIMEOUT);
        let mut added = Container::new(container, false, ContainerState::Starting(Some(answer)));
        if is_slow {
            added.answer(metrics);
            self.starts_captured(&name, "earlier changes of the pod's rules took too long", metrics);
            self.wake();
        }
        self.containers.insert(id, added);
    }

    /// Adds a container that has started. The report may come after the exit.
    pub(super) fn started(&mut self, container: NriContainer) {
        let new = || Container::new(container.clone(), true, ContainerState::Starting(None));
        let known = self.containers.entry(container.id.clone()).or_insert_with(new);
        known.observed.has_started = true;
        if !known.is_from_start {
            self.wake();
        }
    }

    /// Records the end of a container. An excluded one stays until its control group has no process: runtimes report the
    /// end before the last process has exited.
    pub(super) fn stopped(&mut self, container: &NriContainer) {
        if !self.excludes(&container.name) {
            self.containers.remove(&container.id);
        } else if let Some(Container { observed, .. }) = self.containers.get_mut(&container.id) {
            (observed.has_started, observed.reported.pid) = (true, 0);
            self.wake();
        }
    }

    /// Records the removal of a container: its exclusion ends, whatever is known about its control group.
    pub(super) fn removed(&mut self, container: NriContainer) {
        self.containers.remove(&container.id);
        if self.excludes(&container.name) {
            self.containers.insert(container.id.clone(), Container::new(container, true, ContainerState::Ended));
            self.wake();
        }
    }

    /// Returns the containers and forgets them, for the runtime's list of all containers.
    pub(super) fn take_containers(&mut self) -> BTreeMap<String, Container> {
        self.wake();
        take(&mut self.containers)
    }

    /// Adds a container from the runtime's list; `known` is what was known about it.
    pub(super) fn listed(&mut self, container: NriContainer, known: Option<Container>) {
        let id = container.id.clone();
        let new = || Container::new(container, true, ContainerState::Starting(None));
        self.containers.insert(id, known.unwrap_or_else(new));
    }

    /// Begins a check if one is necessary and none runs. `is_complete`: the agent is registered.
    pub(super) fn begin(&mut self, is_complete: bool) -> Option<Check> {
        let now = Instant::now();
        let is_full = self.due.is_some_and(|due| due <= now);
        if self.checking.is_some() || !(is_full || self.is_awaited()) {
            return None;
        }
        self.checking = Some(now);
        self.due = self.due.filter(|_| !is_full);
        let ids = |of: fn(&Container) -> bool| {
            let found = self.containers.iter().filter(move |(_, container)| of(container));
            found.map(|(id, _)| id.clone()).collect()
        };
        let running = self.containers.values().filter(|container| !container.is_ended());
        Some(Check {
            sandbox_id: self.id.clone(),
            saved: Some(self.saved.clone()),
            containers: running.map(|container| container.observed.clone()).collect(),
            awaited: ids(Container::is_awaited),
            exited: ids(Container::is_ended),
            is_complete,
            is_full,
            ..Check::default()
        })
    }

    /// Records the result of a check. `is_complete`: the agent is registered; `repairs`: it restores missing sets. Returns
    /// whether a set is missing.
    pub(super) fn finish(
        &mut self,
        mut checked: Check,
        (is_complete, repairs): (bool, bool),
        metrics: &Metrics,
    ) -> bool {
        self.is_slow = self.checking.take().is_some_and(|began| began.elapsed() > START_TIMEOUT);
        self.pod = self.pod.take().or(checked.pod.take());
        let is_unread = checked.saved.is_none();
        if let Some(saved) = checked.saved.take() {
            self.set_saved(saved);
        }
        let error = checked.error.take();
        let is_lost = error.as_ref().is_some_and(|error| error.code == Code::Drift);
        let failure = error.map(|error| match (is_unread, is_lost, repairs) {
            (true, ..) => format!("can't read which containers are excluded: {error}"),
            (_, true, true) => format!("{error}; the agent restores it from saved state"),
            (_, true, false) => format!("{error}; set the agent's flag --repair=repair or delete the pod"),
            _ => error.to_string(),
        });
        let awaited = take(&mut checked.awaited);
        self.apply(checked, metrics);
        for id in awaited {
            let Some(container) = self.containers.get_mut(&id) else { continue };
            let (is_answered, name) = (container.answer(metrics).is_some(), container.name().to_owned());
            if is_answered && self.excludes(&name) {
                metrics.container_starts.count([if failure.is_some() { "error" } else { "captured" }]);
            }
        }
        self.failure.clear();
        if let Some(failure) = failure {
            let captured = self.running().filter(|one| matches!(one.state, ContainerState::Starting(None)));
            let captured: Vec<String> = captured.map(|one| one.name().to_owned()).collect();
            captured.iter().for_each(|name| self.report_capture(name, &failure));
            self.failed(&failure);
        }
        if self.saved.excluded.is_some() || is_unread {
            let may_run = is_unread || !is_complete || self.running().next().is_some();
            let next = Instant::now() + if may_run { CHECK_INTERVAL } else { REST_INTERVAL };
            self.due = Some(self.due.map_or(next, |due| due.min(next)));
        }
        is_lost
    }

    fn set_saved(&mut self, saved: Saved) {
        let is_changed = self.saved.modified != saved.modified;
        self.saved = saved;
        match self.saved.excluded {
            Some(_) => {
                self.excluding_since.get_or_insert_with(Instant::now);
                // The check may have read it only for a container that is not excluded.
                self.due = if is_changed { Some(Instant::now()) } else { self.due };
            }
            None => {
                self.containers.retain(|_, container| !container.is_ended());
                (self.excluding_since, self.bypassing) = (None, None);
                self.reported.clear();
            }
        }
    }

    /// Records the changes of the sets.
    fn apply(&mut self, checked: Check, metrics: &Metrics) {
        for id in &checked.exited {
            if let Some(container) = self.containers.get_mut(id) {
                container.answer(metrics);
                container.state = ContainerState::Ended;
            }
        }
        let Some(applied) = checked.applied else { return };
        self.containers.retain(|id, container| !(container.is_ended() && checked.exited.contains(id)));
        self.bypassing = Some(applied.live.into_iter().filter_map(|one| Some(one.container?.name)).collect());
        for (container, scope) in &applied.added {
            tracing::info!(pod = self.pod_name(), container, %scope, "the container's traffic bypasses the sidecar");
        }
        for (id, group, has_process) in checked.running {
            let Some(container) = self.containers.get_mut(&id).filter(|one| !one.is_ended()) else { continue };
            let (name, is_from_start) = (container.name().to_owned(), container.is_from_start);
            let is_in_time = container.answer(metrics) == Some(true);
            let was_captured = matches!(container.state, ContainerState::Starting(_));
            container.state = ContainerState::Bypassing;
            container.observed.group = Some(group);
            container.observed.has_started |= has_process;
            if is_in_time {
                metrics.container_starts.count(["excluded"]);
                self.reported.remove(&name);
            } else if was_captured && applied.added.iter().any(|(added, _)| *added == name) {
                let why = match is_from_start {
                    true => "the pod's rules were not changed in time",
                    false => "the agent was not registered at the container runtime when it started",
                };
                self.report_capture(&name, &format!("{why}; its new connections bypass the sidecar from now on"));
            }
        }
    }

    /// Records the containers for which the runtime waits no longer.
    pub(super) fn expire(&mut self, metrics: &Metrics) {
        let why = format!("the pod's rules were not changed within {} ms", START_TIMEOUT.as_millis());
        let is_expired = |container: &&mut Container| matches!(&container.state, ContainerState::Starting(Some(answer)) if answer.0.is_closed());
        let mut expired = Vec::new();
        for container in self.containers.values_mut().filter(is_expired) {
            container.answer(metrics);
            expired.push(container.name().to_owned());
        }
        expired.iter().for_each(|name| self.starts_captured(name, &why, metrics));
    }

    fn starts_captured(&mut self, name: &str, why: &str, metrics: &Metrics) {
        let why = format!("{why}; the agent retries");
        if self.excludes(name) {
            metrics.container_starts.count(["error"]);
            self.report_capture(name, &why);
        }
        self.failed(&why);
    }

    /// Records a failure. It is logged unless it was before, or no excluded container is affected.
    fn failed(&mut self, why: &str) {
        why.clone_into(&mut self.failure);
        let is_affected = self.saved.excluded.is_none() || self.running().next().is_some();
        if is_affected && self.logged.len() < MAX_LOGGED && self.logged.insert(why.to_owned()) {
            tracing::warn!(pod = self.pod_name(), sandbox = self.id, "can't update the excluded containers: {why}");
        }
    }

    /// Reports that a container starts captured, once.
    fn report_capture(&mut self, name: &str, why: &str) {
        if self.reported.insert(name.to_owned()) {
            let message = format!("container {name} started captured: {why}");
            self.events.push(Event { warning: true, reason: "DetourContainerCaptured".into(), message });
        }
    }

    /// Reports the excluded containers that start captured because the agent is not registered since this time.
    pub(super) fn report_disconnection(&mut self, since: Instant, why: &str) {
        // An agent that has just started does not know which containers bypass the sidecar until the first check.
        let failed = (!self.failure.is_empty()).then(BTreeSet::new);
        let Some(bypassing) = self.bypassing.clone().or(failed).filter(|_| self.excluding_since >= Some(since)) else {
            return;
        };
        let excluded = self.saved.excluded.iter().flat_map(|excluded| &excluded.policy().containers);
        let captured: Vec<_> = excluded.map(|one| one.name.clone()).filter(|name| !bypassing.contains(name)).collect();
        let why = format!("the agent is not registered at the container runtime: {why}");
        captured.iter().for_each(|name| self.report_capture(name, &why));
    }

    pub(super) fn pod_name(&self) -> Option<String> {
        self.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name))
    }

    /// Returns the elements that the sets must have; `None` while a container's control group is unknown.
    pub(super) fn expected(&self) -> Option<Vec<BypassingContainer>> {
        let policy = self.saved.excluded.as_ref()?.policy();
        let element = |container: &Container| {
            let (NriContainer { name, id, .. }, cgroup) =
                (container.observed.reported.clone(), container.observed.group.as_ref()?.id);
            let scope = policy.container_scope(&name)?;
            Some(BypassingContainer { name, id, cgroup, scope })
        };
        self.running().map(element).collect()
    }
}

#[cfg(test)]
mod tests;
