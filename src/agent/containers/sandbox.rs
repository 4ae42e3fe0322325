//! A pod sandbox: its containers as the runtime reports them, and the bypass of the excluded ones. Its check reads which
//! containers it excludes, finds their control groups, and makes the sets in its network namespace match.

use crate::agent::metrics::Metrics;
use crate::agent::nri::NriContainer;
use crate::agent::pod_reports::PodReports;
use crate::cgroup::{CgroupHierarchy, ContainerGroup};
use crate::cluster::Event;
use crate::cluster::agent::BypassingContainer;
use crate::cni::{Code, Error};
use crate::host_path::HostRoot;
use crate::netns::find;
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
    containers: BTreeMap<String, Container>,
    /// When saved state changed; `None` without saved state, or if it must be read again.
    modified: Option<SystemTime>,
    /// `None` if saved state excludes no container.
    pub(super) excluded: Option<Arc<ExcludedContainers>>,
    /// Since when the sandbox is known to exclude containers.
    excluding_since: Option<Instant>,
    /// When the next check is due; `None` if the saved state must change first.
    due: Option<Instant>,
    /// Whether the last check took longer than the runtime waits.
    pub(super) is_slow: bool,
    /// The names of the containers that have elements; `None` before the first check.
    bypassing: Option<BTreeSet<String>>,
    /// The last failure; empty after a success.
    pub(super) failure: String,
    /// The failures that were logged.
    logged: BTreeSet<String>,
    pub(super) captures: Captures,
}

/// The containers of a pod that started captured.
#[derive(Debug, Clone, Default)]
pub(super) struct Captures {
    pub(super) pod: Option<PodRef>,
    /// The names of these containers, each with the cause.
    new: Vec<(String, String)>,
    /// The names that were reported.
    reported: BTreeSet<String>,
}

/// A container that runs, is about to start, or has ended a moment ago.
struct Container {
    reported: NriContainer,
    /// Whether it has had a process: it was seen with one, or the runtime reported that it had started. Before, its
    /// control group may be empty.
    has_started: bool,
    state: ContainerState,
}

/// The state of a container.
enum ContainerState {
    /// It has no element. The runtime waits for the answer before the first instruction.
    Starting(Option<Answer>),
    /// It has an element with this control group.
    Bypassing(ContainerGroup),
    /// It has exited, and may still have an element.
    Ended,
}

/// The answer that the runtime waits for, since when.
pub(super) struct Answer(pub(super) oneshot::Sender<()>, pub(super) Instant);

impl Container {
    fn new(reported: NriContainer, has_started: bool, state: ContainerState) -> Self {
        Self { reported, has_started, state }
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
        answer.take().map(|Answer(answer, since)| {
            metrics.runtime_waited(since.elapsed().as_secs_f64());
            answer.send(()).is_ok()
        })
    }

    /// Returns the container's control group, and whether that has a process; `None` if the container has exited.
    fn group(&self, hierarchy: &CgroupHierarchy) -> Result<Option<(ContainerGroup, bool)>, Error> {
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
        let group = group.map(|group| (hierarchy.is_populated(&group.path) != Some(false), group));
        Ok(group.filter(|(has_process, _)| *has_process || !self.has_started).map(|(is, group)| (group, is)))
    }
}

impl Captures {
    pub(super) fn add(&mut self, name: &str, why: &str) {
        self.new.push((name.to_owned(), why.to_owned()));
    }

    /// Adds the names that were reported during a check.
    pub(super) fn add_reported(&mut self, other: &Self) {
        self.reported.extend(other.reported.iter().cloned());
    }

    /// Creates an Event for each name, once.
    pub(super) fn create_events(&mut self, reports: &PodReports) {
        for (name, why) in take(&mut self.new) {
            let message = format!("container {name} started captured: {why}");
            if self.reported.insert(name) {
                tracing::warn!(pod = self.pod_name(), "{message}");
                let event = Event { warning: true, reason: "DetourContainerCaptured".into(), message };
                self.pod.iter().for_each(|pod| reports.event(pod, event.clone()));
            }
        }
    }

    fn pod_name(&self) -> Option<String> {
        self.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name))
    }
}

impl Sandbox {
    pub(super) fn new(id: &str) -> Self {
        Self { id: id.to_owned(), ..Self::default() }
    }

    fn excludes(&self, name: &str) -> bool {
        self.excluded.as_ref().is_some_and(|excluded| excluded.policy.container_scope(name).is_some())
    }

    /// Returns the excluded containers that run.
    fn running(&self) -> impl Iterator<Item = &Container> {
        self.containers.values().filter(|container| !container.is_ended() && self.excludes(&container.reported.name))
    }

    fn running_ids(&self) -> BTreeSet<String> {
        self.running().map(|container| container.reported.id.clone()).collect()
    }

    /// Returns whether the runtime waits for a container of the sandbox.
    pub(super) fn is_awaited(&self) -> bool {
        self.containers.values().any(Container::is_awaited)
    }

    /// Returns whether a check is due.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due.is_some_and(|due| due <= now)
    }

    /// Returns whether nothing is known about the sandbox anymore.
    pub(super) fn is_unused(&self) -> bool {
        self.modified.is_none() && self.containers.is_empty() && self.due.is_none()
    }

    /// Makes a check due.
    pub(super) fn wake(&mut self) {
        self.due = Some(Instant::now());
    }

    /// Makes a check due if the saved state has changed.
    pub(super) fn scanned(&mut self, modified: Option<SystemTime>) {
        // After a failure to read it, the next check is due.
        if modified != self.modified && self.due.is_none_or(|_| self.failure.is_empty()) {
            self.wake();
        }
    }

    /// Adds a container that is about to start. The runtime waits for `answer`; it is `None` if the checks of the sandbox
    /// take too long.
    pub(super) fn start(&mut self, container: NriContainer, answer: Option<Answer>, metrics: &Metrics) {
        if answer.is_none() {
            let why = "earlier changes of the pod's rules took too long; the agent retries";
            if self.excludes(&container.name) {
                metrics.count("container_starts", [("result", "error")]);
                self.captures.add(&container.name, why);
            }
            self.failed(why);
            self.wake();
        }
        let added = Container::new(container, false, ContainerState::Starting(answer));
        self.containers.insert(added.reported.id.clone(), added);
    }

    /// Adds a container that has started. The report may come after the exit.
    pub(super) fn started(&mut self, container: NriContainer) {
        let id = container.id.clone();
        let new = || Container::new(container, true, ContainerState::Starting(None));
        let known = self.containers.entry(id).or_insert_with(new);
        known.has_started = true;
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
            self.containers.insert(container.id.clone(), Container::new(container, true, ContainerState::Ended));
            self.wake();
        }
    }

    /// Replaces all containers by those from the runtime's list.
    pub(super) fn listed(&mut self, containers: Vec<NriContainer>) {
        let mut known = take(&mut self.containers);
        for container in containers {
            let (id, before) = (container.id.clone(), known.remove(&container.id));
            let new = || Container::new(container, true, ContainerState::Starting(None));
            self.containers.insert(id, before.unwrap_or_else(new));
        }
        self.wake();
    }

    /// Returns the containers for which the runtime waits, since when.
    pub(super) fn awaited(&self) -> Vec<(Instant, String)> {
        let since = |container: &Container| match &container.state {
            ContainerState::Starting(Some(Answer(_, since))) => Some((*since, container.reported.name.clone())),
            _ => None,
        };
        self.containers.values().filter_map(since).collect()
    }

    /// Checks the sandbox. `is_complete`: all its running containers are known. Blocks.
    pub(super) fn check(mut self, tools: &Tools, is_complete: bool) -> Self {
        self.due = None;
        let read = self.read(&tools.root);
        let is_unread = read.is_err();
        let result = read.and_then(|()| self.update(tools, is_complete));
        self.finish(result, (is_unread, is_complete), tools);
        self
    }

    /// Reads the saved state if it has changed, and finds the pod.
    fn read(&mut self, root: &HostRoot) -> Result<(), Error> {
        let modified =
            fs::symlink_metadata(Path::new(ROOT).join(&self.id)).and_then(|metadata| metadata.modified()).ok();
        if modified.is_some() && modified == self.modified {
            return Ok(());
        }
        let is_old = |time: &SystemTime| time.elapsed().is_ok_and(|age| age > TIME_STAMP_PRECISION);
        let excluded = ExcludedContainers::find(&self.id)?;
        if excluded.is_some() && self.captures.pod.is_none() {
            // Without it, Events are only logged.
            self.captures.pod = find::pod_of_sandbox(root, &self.id).ok().flatten();
        }
        self.set_saved(modified.filter(is_old), excluded);
        Ok(())
    }

    fn set_saved(&mut self, modified: Option<SystemTime>, excluded: Option<ExcludedContainers>) {
        (self.modified, self.excluded) = (modified, excluded.map(Arc::new));
        if self.excluded.is_none() {
            self.containers.retain(|_, container| !container.is_ended());
            (self.excluding_since, self.bypassing) = (None, None);
            self.captures.reported.clear();
        } else {
            self.excluding_since.get_or_insert_with(Instant::now);
        }
    }

    /// Makes the sets match.
    fn update(&mut self, tools: &Tools, is_complete: bool) -> Result<(), Error> {
        let Some(excluded) = self.excluded.clone() else { return Ok(()) };
        // Others wait only for the saved state.
        let others =
            self.containers.values_mut().filter(|one| excluded.policy.container_scope(&one.reported.name).is_none());
        for container in others {
            container.answer(&tools.metrics);
        }
        let (mut running, mut groups, mut failure) = (Vec::new(), Vec::new(), None);
        let (ids, mut hierarchy) = (self.running_ids(), None);
        for (id, container) in self.containers.iter_mut().filter(|(id, _)| ids.contains(*id)) {
            let hierarchy = match &hierarchy {
                Some(hierarchy) => hierarchy,
                None => hierarchy.insert(CgroupHierarchy::find(&tools.root)?),
            };
            match container.group(hierarchy) {
                Ok(Some((group, has_process))) => {
                    let (name, cgroup) = (container.reported.name.clone(), group.id);
                    running.push(RunningContainer { name, id: id.clone(), cgroup });
                    groups.push((id.clone(), group, has_process));
                }
                Ok(None) => {
                    container.answer(&tools.metrics);
                    container.state = ContainerState::Ended;
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        let exited = self.containers.iter().filter(|(_, one)| one.is_ended()).map(|(id, _)| id.clone());
        let exited: Vec<String> = exited.collect();
        let complete = is_complete && failure.is_none();
        let observed = ObservedContainers { running: &running, exited: &exited, complete };
        let changes = excluded.reconcile(&tools.root, observed)?;
        self.apply(changes, groups, &tools.metrics);
        failure.map_or(Ok(()), Err)
    }

    /// Records the changes of the sets, and the control groups of the excluded containers that run, each with whether it has
    /// a process.
    fn apply(&mut self, changes: ContainerChanges, groups: Vec<(String, ContainerGroup, bool)>, metrics: &Metrics) {
        self.containers.retain(|_, container| !container.is_ended());
        self.bypassing = Some(changes.live.into_iter().filter_map(|one| Some(one.container?.name)).collect());
        for (container, scope) in &changes.added {
            let pod = self.captures.pod_name();
            tracing::info!(pod, container, %scope, "the container's traffic bypasses the sidecar");
        }
        for (id, group, has_process) in groups {
            let Some(container) = self.containers.get_mut(&id) else { continue };
            let name = container.reported.name.clone();
            let is_added = changes.added.iter().any(|(added, _)| *added == name);
            let was_captured = is_added && matches!(container.state, ContainerState::Starting(_));
            let is_in_time = container.answer(metrics);
            container.state = ContainerState::Bypassing(group);
            container.has_started |= has_process;
            let why = match is_in_time {
                Some(true) => {
                    metrics.count("container_starts", [("result", "excluded")]);
                    self.captures.reported.remove(&name);
                    continue;
                }
                Some(false) => {
                    metrics.count("container_starts", [("result", "error")]);
                    "the pod's rules were not changed in time"
                }
                None => "the agent was not registered at the container runtime when it started",
            };
            if was_captured {
                self.captures.add(&name, &format!("{why}; its new connections bypass the sidecar from now on"));
            }
        }
    }

    /// Records the result of a check: whether the saved state is unread, and whether all running containers are known.
    fn finish(&mut self, result: Result<(), Error>, (is_unread, is_complete): (bool, bool), tools: &Tools) {
        let is_lost = result.as_ref().is_err_and(|error| error.code == Code::Drift);
        let failure = result.err().map(|error| match (is_unread, is_lost, tools.damaged.is_some()) {
            (true, ..) => format!("can't read which containers are excluded: {error}"),
            (_, true, true) => format!("{error}; the agent restores it from saved state"),
            (_, true, false) => format!("{error}; set the agent's flag --repair=repair or delete the pod"),
            _ => error.to_string(),
        });
        let (excluded, result) = (self.running_ids(), if failure.is_some() { "error" } else { "captured" });
        for (id, container) in &mut self.containers {
            if container.answer(&tools.metrics).is_some() && excluded.contains(id) {
                tools.metrics.count("container_starts", [("result", result)]);
            }
        }
        self.failure.clear();
        if let Some(failure) = failure {
            let starting = self.running().filter(|one| matches!(one.state, ContainerState::Starting(_)));
            let captured: Vec<String> = starting.map(|one| one.reported.name.clone()).collect();
            captured.iter().for_each(|name| self.captures.add(name, &failure));
            self.failed(&failure);
        }
        if self.excluded.is_some() || is_unread {
            let may_run = is_unread || !is_complete || self.running().next().is_some();
            let next = Instant::now() + if may_run { CHECK_INTERVAL } else { REST_INTERVAL };
            self.due = Some(self.due.map_or(next, |due| due.min(next)));
        }
        if let (true, Some(pod), Some(damaged)) = (is_lost, &self.captures.pod, &tools.damaged) {
            // If too many requests wait, the next failure makes another one.
            let _ = damaged.try_send(pod.clone());
        }
    }

    /// Records a failure. It is logged unless it was before, or no excluded container is affected.
    fn failed(&mut self, why: &str) {
        why.clone_into(&mut self.failure);
        let is_affected = self.excluded.is_none() || self.running().next().is_some();
        if is_affected && self.logged.len() < MAX_LOGGED && self.logged.insert(why.to_owned()) {
            let pod = self.captures.pod_name();
            tracing::warn!(pod, sandbox = self.id, "can't update the excluded containers: {why}");
        }
    }

    /// Reports the excluded containers that start captured because the agent is not registered since this time.
    pub(super) fn report_disconnection(&mut self, since: Instant, why: &str) {
        // An agent that has just started does not know which containers bypass the sidecar until the first check.
        let failed = (!self.failure.is_empty()).then(BTreeSet::new);
        let bypassing = self.bypassing.clone().or(failed).filter(|_| self.excluding_since >= Some(since));
        let (Some(bypassing), Some(excluded)) = (bypassing, self.excluded.clone()) else { return };
        let why = format!("the agent is not registered at the container runtime: {why}");
        let captured = excluded.policy.containers.iter().filter(|one| !bypassing.contains(&one.name));
        captured.for_each(|one| self.captures.add(&one.name, &why));
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
}

#[cfg(test)]
mod tests;
