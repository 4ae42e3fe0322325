//! A pod sandbox: its containers as the runtime reports them, and the bypass of the excluded ones. A check has two steps.
//! The first one reads from saved state which containers are excluded. The second one finds their control groups and
//! updates the sets in the network namespace.

use crate::agent::metrics::Metrics;
use crate::agent::nri::{NriContainer, START_TIMEOUT};
use crate::agent::pod_reports::PodReports;
use crate::cgroup::{CgroupHierarchy, ContainerGroup};
use crate::cluster::Event;
use crate::cluster::agent::{BypassingContainer, ContainersStatus};
use crate::cni::{Code, Error};
use crate::host_path::HostRoot;
use crate::netns::find::pod_of_sandbox;
use crate::plugin::running::containers::{ContainerChanges, ExcludedContainers, ObservedContainers, RunningContainer};
use crate::pod::PodRef;
use crate::state::ROOT;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::mem::take;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{mpsc, oneshot};

/// The interval of the checks while excluded containers run or may run, and after a failure.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The interval of the checks while no excluded container runs.
const REST_INTERVAL: Duration = Duration::from_secs(30);
/// The limit of different failures of a sandbox that are logged: a pod can make them alternate.
const MAX_LOGGED: usize = 8;
/// Saved state that changed less than this time ago is read again: two changes can have the same time stamp, which the
/// kernel takes from a clock with ticks of at most 10 ms.
const TIME_STAMP_PRECISION: Duration = Duration::from_millis(100);

/// What all checks use.
pub(super) struct Tools {
    pub(super) root: HostRoot,
    pub(super) metrics: Metrics,
    pub(super) reports: PodReports,
    /// Gets the pods whose sets are missing; `None` if the agent does not repair pods.
    pub(super) damaged: Option<mpsc::Sender<PodRef>>,
}

/// A pod sandbox.
#[derive(Default)]
pub(super) struct Sandbox {
    pub(super) id: String,
    pub(super) pod: Option<PodRef>,
    containers: Containers,
    /// The answers that the runtime waits for, each with the time of its request, by container ID.
    answers: BTreeMap<String, (oneshot::Sender<()>, Instant)>,
    /// When saved state changed; `None` without saved state, or if it must be read again.
    modified: Option<SystemTime>,
    /// `None` if saved state excludes no container.
    excluded: Option<Arc<ExcludedContainers>>,
    /// Since when the sandbox is known to exclude containers.
    excluding_since: Option<Instant>,
    /// When the next check is due; `None` if the saved state must change first.
    due: Option<Instant>,
    /// When the running check began; `None` if no check runs.
    pub(super) checking: Option<Instant>,
    /// Whether the last check took longer than the runtime waits.
    is_slow: bool,
    /// The requests for the status that wait for the end of the check.
    pub(super) questions: Vec<oneshot::Sender<ContainersStatus>>,
    /// The names of the containers that have elements; `None` before the first check.
    bypassing: Option<BTreeSet<String>>,
    /// The last failure; empty after a success.
    pub(super) failure: String,
    /// The failures that were logged.
    logged: BTreeSet<String>,
    /// The names of the containers that were reported as started captured.
    reported: BTreeSet<String>,
}

/// The containers of a sandbox by ID.
pub(super) type Containers = BTreeMap<String, Container>;

/// A container that runs, is about to start, or has ended a moment ago.
#[derive(Clone)]
pub(super) struct Container {
    reported: NriContainer,
    /// Whether it has had a process: it was seen with one, or the runtime reported that it had started. Before, its
    /// control group may be empty.
    has_started: bool,
    state: ContainerState,
}

/// The state of a container.
#[derive(Clone)]
pub(super) enum ContainerState {
    /// It has no element.
    Starting,
    /// It has an element with this control group.
    Bypassing(ContainerGroup),
    /// It has exited, and may still have an element.
    Ended,
}

/// A step of a check, which blocks.
pub(super) type Step = Box<dyn FnOnce() -> Done + Send>;

/// The result of a step.
pub(super) enum Done {
    /// The saved state that was read; `None` if it has not changed.
    Read(Result<Option<Saved>, Error>),
    /// The containers as they were found, and the changes of the sets.
    Updated(Containers, Updated),
}

/// The changes of the sets, and the error of a container whose control group was not found.
pub(super) type Updated = Result<(ContainerChanges, Option<Error>), Error>;

/// When saved state changed, which containers it excludes, and their pod if it was unknown.
#[derive(Default)]
pub(super) struct Saved {
    modified: Option<SystemTime>,
    excluded: Option<ExcludedContainers>,
    pod: Option<PodRef>,
}

impl Container {
    const fn is_ended(&self) -> bool {
        matches!(self.state, ContainerState::Ended)
    }

    /// Finds the container's control group, and whether the container has exited.
    fn look(&mut self, hierarchy: &CgroupHierarchy) -> Result<(), Error> {
        let NriContainer { id, cgroups_path, pid, .. } = &self.reported;
        let group = match &self.state {
            ContainerState::Bypassing(known) => Some(known.clone()).filter(|known| hierarchy.has_container(known)),
            _ => match hierarchy.container(id, cgroups_path, *pid) {
                Ok(group) => Some(group),
                // Its first process can exit before the runtime's report is handled.
                Err(_) if hierarchy.has_exited(*pid) || (self.has_started && *pid == 0) => None,
                Err(error) => return Err(error),
            },
        };
        let has_process = group.as_ref().is_some_and(|group| hierarchy.is_populated(&group.path) != Some(false));
        let group = group.filter(|_| has_process || !self.has_started);
        self.has_started |= has_process;
        self.state = group.map_or(ContainerState::Ended, ContainerState::Bypassing);
        Ok(())
    }
}

impl Sandbox {
    pub(super) fn new(id: &str) -> Self {
        Self { id: id.to_owned(), ..Self::default() }
    }

    fn excludes(&self, name: &str) -> bool {
        self.excluded.as_ref().is_some_and(|excluded| excludes(excluded, name))
    }

    /// Returns the excluded containers that run.
    fn running(&self) -> impl Iterator<Item = &Container> {
        self.containers.values().filter(|one| !one.is_ended() && self.excludes(&one.reported.name))
    }

    /// Returns whether the runtime waits for a container of the sandbox.
    pub(super) fn is_awaited(&mut self) -> bool {
        self.answers.retain(|id, _| self.containers.contains_key(id));
        !self.answers.is_empty()
    }

    /// Returns whether a check is due.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| due <= now)
    }

    /// Returns whether nothing is known about the sandbox anymore.
    pub(super) fn is_unused(&self) -> bool {
        self.checking.is_none() && self.modified.is_none() && self.containers.is_empty() && self.due.is_none()
    }

    /// Returns whether the running check, or the last one if none runs, takes longer than the runtime waits.
    fn is_slow(&self) -> bool {
        self.checking.map_or(self.is_slow, |began| began.elapsed() > START_TIMEOUT)
    }

    /// Makes a check due.
    pub(super) fn wake(&mut self) {
        self.due = Some(Instant::now());
    }

    /// Makes a check due if the saved state has changed.
    pub(super) fn scanned(&mut self, modified: Option<SystemTime>) {
        // After a failure to read it, the next check is due.
        if self.checking.is_none() && modified != self.modified && self.due.is_none_or(|_| self.failure.is_empty()) {
            self.wake();
        }
    }

    /// Adds a container that is about to start. The runtime waits for `answer`, unless the checks of the sandbox take too
    /// long.
    pub(super) fn start(&mut self, container: NriContainer, answer: oneshot::Sender<()>, tools: &Tools) {
        if self.is_slow() {
            let why = "earlier changes of the pod's rules took too long; the agent retries";
            if self.excludes(&container.name) {
                tools.metrics.count("container_starts", [("result", "error")]);
                self.report(&container.name, why, &tools.reports);
            }
            self.failed(why);
            self.wake();
        } else {
            self.answers.insert(container.id.clone(), (answer, Instant::now()));
        }
        let added = Container { reported: container, has_started: false, state: ContainerState::Starting };
        self.containers.insert(added.reported.id.clone(), added);
    }

    /// Adds a container that has started. The report may come after the exit.
    pub(super) fn started(&mut self, container: NriContainer) {
        let id = container.id.clone();
        let new = || Container { reported: container, has_started: true, state: ContainerState::Starting };
        self.containers.entry(id).or_insert_with(new).has_started = true;
        self.wake();
    }

    /// Records the end of a container. An excluded one stays until its control group has no process: runtimes report the
    /// end before the last process has exited.
    pub(super) fn stopped(&mut self, container: &NriContainer) {
        if !self.excludes(&container.name) {
            self.containers.remove(&container.id);
        } else if let Some(known) = self.containers.get_mut(&container.id) {
            (known.has_started, known.reported.pid) = (true, 0);
            self.wake();
        }
    }

    /// Records the removal of a container: its exclusion ends, whatever is known about its control group.
    pub(super) fn removed(&mut self, container: NriContainer) {
        self.containers.remove(&container.id);
        if self.excludes(&container.name) {
            let ended = Container { reported: container, has_started: true, state: ContainerState::Ended };
            self.containers.insert(ended.reported.id.clone(), ended);
            self.wake();
        }
    }

    /// Replaces all containers by those from the runtime's list.
    pub(super) fn listed(&mut self, containers: Vec<NriContainer>) {
        let mut known = take(&mut self.containers);
        for container in containers {
            let (id, before) = (container.id.clone(), known.remove(&container.id));
            let new = || Container { reported: container, has_started: true, state: ContainerState::Starting };
            self.containers.insert(id, before.unwrap_or_else(new));
        }
        self.wake();
    }

    /// Begins a check. Returns its first step: it reads the saved state if it has changed.
    pub(super) fn begin(&mut self, tools: Arc<Tools>) -> Step {
        (self.due, self.checking) = (None, Some(Instant::now()));
        let (id, known, needs_pod) = (self.id.clone(), self.modified, self.pod.is_none());
        Box::new(move || {
            let modified =
                fs::symlink_metadata(Path::new(ROOT).join(&id)).and_then(|metadata| metadata.modified()).ok();
            if modified.is_some() && modified == known {
                return Done::Read(Ok(None));
            }
            let is_old = |time: &SystemTime| time.elapsed().is_ok_and(|age| age > TIME_STAMP_PRECISION);
            let modified = modified.filter(is_old);
            Done::Read(ExcludedContainers::find(&id).map(|excluded| {
                // Without the pod, Events are only logged.
                let find_pod = |_: &_| pod_of_sandbox(&tools.root, &id).ok().flatten();
                let pod = excluded.as_ref().filter(|_| needs_pod).and_then(find_pod);
                Some(Saved { modified, excluded, pod })
            }))
        })
    }

    /// Continues or ends a check. Returns the next step, if any. `is_complete`: all running containers are known.
    pub(super) fn proceed(&mut self, done: Done, is_complete: bool, tools: &Arc<Tools>) -> Option<Step> {
        match done {
            Done::Read(Err(error)) => {
                let failure = format!("can't read which containers are excluded: {error}");
                self.end(&self.checked(), Some(failure), false, tools);
            }
            Done::Read(Ok(saved)) => {
                saved.into_iter().for_each(|saved| self.set_saved(saved));
                let mut containers = self.checked();
                let Some(excluded) = self.excluded.clone() else {
                    self.end(&containers, None, is_complete, tools);
                    return None;
                };
                // Others wait only for the saved state.
                for (id, _) in containers.iter().filter(|(_, one)| !excludes(&excluded, &one.reported.name)) {
                    self.answer(id, &tools.metrics);
                }
                let tools = Arc::clone(tools);
                return Some(Box::new(move || {
                    let result = update(&tools.root, &excluded, &mut containers, is_complete);
                    Done::Updated(containers, result)
                }));
            }
            Done::Updated(containers, result) => self.updated(&containers, result, is_complete, tools),
        }
        None
    }

    /// Returns the containers of the check that runs. Those that are about to start since it began wait for the next one.
    fn checked(&self) -> Containers {
        let is_later = |id: &String| self.answers.get(id).is_some_and(|(_, since)| Some(*since) > self.checking);
        self.containers.iter().filter(|(id, _)| !is_later(id)).map(|(id, one)| (id.clone(), one.clone())).collect()
    }

    fn set_saved(&mut self, Saved { modified, excluded, pod }: Saved) {
        self.pod = self.pod.take().or(pod);
        (self.modified, self.excluded) = (modified, excluded.map(Arc::new));
        if self.excluded.is_none() {
            self.containers.retain(|_, container| !container.is_ended());
            (self.excluding_since, self.bypassing) = (None, None);
            self.reported.clear();
        } else {
            self.excluding_since.get_or_insert_with(Instant::now);
        }
    }

    /// Records the result of the second step.
    fn updated(&mut self, containers: &Containers, result: Updated, is_complete: bool, tools: &Tools) {
        for (id, _) in containers.iter().filter(|(_, container)| container.is_ended()) {
            self.answer(id, &tools.metrics);
            self.containers.entry(id.clone()).and_modify(|known| known.state = ContainerState::Ended);
        }
        let result = result.and_then(|(changes, error)| {
            self.apply(containers, changes, tools);
            error.map_or(Ok(()), Err)
        });
        let is_lost = result.as_ref().is_err_and(|error| error.code == Code::Drift);
        let failure = result.err().map(|error| match (is_lost, tools.damaged.is_some()) {
            (true, true) => format!("{error}; the agent restores it from saved state"),
            (true, false) => format!("{error}; set the agent's flag --repair=repair or delete the pod"),
            _ => error.to_string(),
        });
        self.end(containers, failure, is_complete, tools);
        if let (true, Some(pod), Some(damaged)) = (is_lost, &self.pod, &tools.damaged) {
            // If too many requests wait, the next failure makes another one.
            let _ = damaged.try_send(pod.clone());
        }
    }

    /// Records the changes of the sets. A container that has ended during the check ends with the next one.
    fn apply(&mut self, checked: &Containers, changes: ContainerChanges, tools: &Tools) {
        self.containers.retain(|id, _| !checked.get(id).is_some_and(Container::is_ended));
        self.bypassing = Some(changes.live.into_iter().filter_map(|one| Some(one.container?.name)).collect());
        for (container, scope) in &changes.added {
            let pod = self.pod_name();
            tracing::info!(pod, container, %scope, "the container's traffic bypasses the sidecar");
        }
        for (id, Container { reported, has_started, state }) in checked {
            let known = self.containers.get_mut(id).filter(|known| !known.is_ended());
            let (ContainerState::Bypassing(_), Some(known)) = (state, known) else { continue };
            let is_added = changes.added.iter().any(|(added, _)| *added == reported.name);
            let was_captured = is_added && matches!(known.state, ContainerState::Starting);
            known.state = state.clone();
            known.has_started |= has_started;
            let why = match self.answer(id, &tools.metrics) {
                Some(true) => {
                    tools.metrics.count("container_starts", [("result", "excluded")]);
                    self.reported.remove(&reported.name);
                    continue;
                }
                Some(false) => {
                    tools.metrics.count("container_starts", [("result", "error")]);
                    "the pod's rules were not changed in time"
                }
                None => "the agent was not registered at the container runtime when it started",
            };
            if was_captured {
                let why = format!("{why}; its new connections bypass the sidecar from now on");
                self.report(&reported.name, &why, &tools.reports);
            }
        }
    }

    /// Ends a check of these containers: the runtime does not wait for them any longer.
    fn end(&mut self, checked: &Containers, failure: Option<String>, is_complete: bool, tools: &Tools) {
        (self.is_slow, self.checking) = (self.is_slow(), None);
        for (id, Container { reported, .. }) in checked {
            let is_awaited = self.answer(id, &tools.metrics).is_some();
            let is_starting = |known: &Container| matches!(known.state, ContainerState::Starting);
            let is_captured = self.containers.get(id).is_some_and(is_starting) && self.excludes(&reported.name);
            if let Some(failure) = failure.as_ref().filter(|_| is_captured) {
                if is_awaited {
                    tools.metrics.count("container_starts", [("result", "error")]);
                }
                self.report(&reported.name, failure, &tools.reports);
            }
        }
        if self.excluded.is_some() || failure.is_some() {
            let may_run = !is_complete || self.running().next().is_some();
            let next = Instant::now() + if may_run { CHECK_INTERVAL } else { REST_INTERVAL };
            self.due = Some(self.due.map_or(next, |due| due.min(next)));
        }
        self.failure.clear();
        failure.iter().for_each(|failure| self.failed(failure));
    }

    /// Answers the runtime, and returns whether it still waited; `None` if no request for the container is open.
    fn answer(&mut self, id: &str, metrics: &Metrics) -> Option<bool> {
        self.answers.remove(id).map(|(answer, since)| {
            metrics.runtime_waited(since.elapsed().as_secs_f64());
            answer.send(()).is_ok()
        })
    }

    /// Records a failure. It is logged unless it was before, or no excluded container is affected.
    fn failed(&mut self, why: &str) {
        why.clone_into(&mut self.failure);
        let is_affected = self.excluded.is_none() || self.running().next().is_some();
        if is_affected && self.logged.len() < MAX_LOGGED && self.logged.insert(why.to_owned()) {
            let pod = self.pod_name();
            tracing::warn!(pod, sandbox = self.id, "can't update the excluded containers: {why}");
        }
    }

    /// Reports a container that started captured, once.
    fn report(&mut self, name: &str, why: &str, reports: &PodReports) {
        if !self.reported.insert(name.to_owned()) {
            return;
        }
        let message = format!("container {name} started captured: {why}");
        let event = Event { warning: true, reason: "DetourContainerCaptured".into(), message };
        match &self.pod {
            Some(pod) => reports.report(pod, event),
            None => tracing::warn!(sandbox = self.id, "{}", event.message),
        }
    }

    /// Reports the excluded containers that start captured because the check takes longer than the runtime waits.
    pub(super) fn report_late(&mut self, tools: &Tools) {
        let late = self.answers.iter().filter(|(_, (_, since))| since.elapsed() > START_TIMEOUT);
        let names = late.filter_map(|(id, _)| Some(self.containers.get(id)?.reported.name.clone()));
        let why =
            format!("the pod's rules were not changed within {} ms; the agent retries", START_TIMEOUT.as_millis());
        for name in names.filter(|name| self.excludes(name)).collect::<Vec<_>>() {
            self.report(&name, &why, &tools.reports);
        }
    }

    /// Reports the excluded containers that start captured because the agent is not registered since this time.
    pub(super) fn report_disconnection(&mut self, since: Instant, why: &str, tools: &Tools) {
        // An agent that has just started does not know which containers bypass the sidecar until the first check.
        let failed = (!self.failure.is_empty()).then(BTreeSet::new);
        let bypassing = self.bypassing.clone().or(failed).filter(|_| self.excluding_since >= Some(since));
        let (Some(bypassing), Some(excluded)) = (bypassing, self.excluded.clone()) else { return };
        let why = format!("the agent is not registered at the container runtime: {why}");
        let captured = excluded.policy.containers.iter().filter(|one| !bypassing.contains(&one.name));
        captured.for_each(|one| self.report(&one.name, &why, &tools.reports));
    }

    /// Returns the elements that the sets must have; `None` while a container's control group is unknown.
    pub(super) fn expected(&self) -> Option<Vec<BypassingContainer>> {
        let policy = &self.excluded.as_ref()?.policy;
        let element = |container: &Container| {
            let ContainerState::Bypassing(group) = &container.state else { return None };
            let NriContainer { name, id, .. } = container.reported.clone();
            let scope = policy.container_scope(&name)?;
            Some(BypassingContainer { name, id, cgroup: group.id, scope })
        };
        self.running().map(element).collect()
    }

    fn pod_name(&self) -> Option<String> {
        self.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name))
    }
}

fn excludes(excluded: &ExcludedContainers, name: &str) -> bool {
    excluded.policy.container_scope(name).is_some()
}

/// Finds the control groups of the excluded containers, and updates the sets.
fn update(root: &HostRoot, excluded: &ExcludedContainers, containers: &mut Containers, is_complete: bool) -> Updated {
    let (mut running, mut hierarchy, mut failure) = (Vec::new(), None, None);
    for (id, container) in containers.iter_mut() {
        if container.is_ended() || !excludes(excluded, &container.reported.name) {
            continue;
        }
        let hierarchy = match &hierarchy {
            Some(hierarchy) => hierarchy,
            None => hierarchy.insert(CgroupHierarchy::find(root)?),
        };
        if let Err(error) = container.look(hierarchy) {
            failure = failure.or(Some(error));
        } else if let ContainerState::Bypassing(group) = &container.state {
            running.push(RunningContainer { name: container.reported.name.clone(), id: id.clone(), cgroup: group.id });
        }
    }
    let exited = containers.iter().filter(|(_, container)| container.is_ended()).map(|(id, _)| id.clone());
    let exited: Vec<String> = exited.collect();
    let observed =
        ObservedContainers { running: &running, exited: &exited, complete: is_complete && failure.is_none() };
    Ok((excluded.reconcile(root, observed)?, failure))
}

#[cfg(test)]
mod tests;
