//! A pod sandbox: its containers as the runtime reports them, and the bypass of the excluded ones. A check reads from saved
//! state which containers are excluded, finds their control groups, and updates the sets in the network namespace.

use crate::agent::metrics::Metrics;
use crate::agent::nri::{NriContainer, START_TIMEOUT, Stage};
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
/// The time without a registration after which captures are reported: a restarting runtime returns earlier.
const GRACE: Duration = Duration::from_secs(2);
/// The limit of different failures of a sandbox that are logged: a pod can make them alternate.
const MAX_LOGGED: usize = 8;
/// Saved state that changed less than this time ago is read again: two changes can have the same time stamp, which the
/// kernel takes from a clock with ticks of at most 10 ms.
const TIME_STAMP_PRECISION: Duration = Duration::from_millis(100);

/// Why a container started captured.
const LATE: &str = "the pod's rules were not changed within 1000 ms; the agent retries";
const NOT_REGISTERED: &str = "the agent was not registered at the container runtime when it started; its new connections \
                              bypass the sidecar from now on";

/// What all checks use.
pub(super) struct Tools {
    pub(super) root: HostRoot,
    pub(super) metrics: Metrics,
    pub(super) reports: PodReports,
    /// Gets the pods whose sets are missing; `None` if the agent does not repair pods.
    pub(super) damaged: Option<mpsc::Sender<PodRef>>,
}

/// The connection to the runtime.
pub(super) enum Connection {
    /// `why` is `None` until the first attempt to connect ends.
    Disconnected { why: Option<String>, since: Instant },
    /// Name and version of the runtime. All running containers are known.
    Registered(String),
}

/// A pod sandbox.
#[derive(Default)]
pub(super) struct Sandbox {
    id: String,
    /// Since when its saved state excludes containers; `None` if it does not.
    excluding_since: Option<Instant>,
    saved: Saved,
    /// Its containers by ID.
    containers: BTreeMap<String, Container>,
    /// The starts without an answer by container ID, each with its time; the sender is `None` if the runtime does not wait.
    answers: BTreeMap<String, (Option<oneshot::Sender<()>>, Instant)>,
    /// When the next check is due; `None` if the saved state must change first.
    due: Option<Instant>,
    /// When the running check began; `None` if no check runs.
    pub(super) checking: Option<Instant>,
    /// Whether the last check took longer than the runtime waits.
    is_slow: bool,
    /// The requests for the status that wait for the end of the check.
    pub(super) questions: Vec<oneshot::Sender<ContainersStatus>>,
    /// The last failure; empty after a success.
    pub(super) failure: String,
    /// The failures that were logged.
    logged: BTreeSet<String>,
    /// The names of the containers that were reported as started captured.
    reported: BTreeSet<String>,
}

/// The saved state of a sandbox.
#[derive(Clone, Default)]
struct Saved {
    /// When it changed; `None` without saved state, or if it must be read again.
    modified: Option<SystemTime>,
    /// `None` if it excludes no container.
    excluded: Option<Arc<ExcludedContainers>>,
}

/// A container that runs, is about to start, or has ended a moment ago.
#[derive(Clone)]
struct Container {
    reported: NriContainer,
    /// Whether it has had a process: it was seen with one, or the runtime reported that it had started. Before, its
    /// control group may be empty.
    has_started: bool,
    state: ContainerState,
}

/// The state of a container.
#[derive(Clone, PartialEq)]
enum ContainerState {
    /// It has no element.
    Starting,
    /// It has an element with this control group.
    Bypassing(ContainerGroup),
    /// It has exited, and may still have an element.
    Ended,
}

/// A check, which blocks, and its results.
pub(super) struct Check {
    pub(super) sandbox_id: String,
    saved: Saved,
    containers: BTreeMap<String, Container>,
    /// Whether these are all running containers.
    is_complete: bool,
    /// The changes of the sets; `None` if they failed.
    changes: Option<ContainerChanges>,
    /// Why they failed, or why the control group of a container was not found.
    failure: Option<Error>,
}

/// Returns when the saved state of a sandbox changed; `None` without saved state.
pub(super) fn modified(sandbox_id: &str) -> Option<SystemTime> {
    fs::symlink_metadata(Path::new(ROOT).join(sandbox_id)).and_then(|it| it.modified()).ok()
}

impl Saved {
    /// Reads the saved state if it has changed.
    fn refresh(&mut self, root: &HostRoot, sandbox_id: &str) -> Result<(), Error> {
        let modified = modified(sandbox_id);
        if modified.is_none() || modified != self.modified {
            let is_old = |time: &SystemTime| time.elapsed().is_ok_and(|age| age > TIME_STAMP_PRECISION);
            let mut excluded = ExcludedContainers::find(sandbox_id)?;
            let pod = excluded.as_mut().map(|excluded| &mut excluded.pod);
            // The runtime may not pass the UID to the plugin.
            if let Some(pod) = pod.filter(|pod| pod.as_ref().is_none_or(|pod| pod.uid.is_none())) {
                *pod = pod_of_sandbox(root, sandbox_id).ok().flatten().or(pod.take());
            }
            *self = Self { modified: modified.filter(is_old), excluded: excluded.map(Arc::new) };
        }
        Ok(())
    }

    fn excludes(&self, container: &Container) -> bool {
        self.excluded.as_ref().is_some_and(|it| it.policy.container_scope(&container.reported.name).is_some())
    }
}

impl Container {
    /// Finds the container's control group, and whether the container has exited.
    fn look(&mut self, hierarchy: &CgroupHierarchy) -> Result<(), Error> {
        let NriContainer { id, pid, .. } = &self.reported;
        let group = match &self.state {
            ContainerState::Bypassing(known) => Some(known.clone()).filter(|known| hierarchy.has_container(known)),
            _ => match hierarchy.container(id, self.reported.cgroups_path(), *pid) {
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

impl Check {
    /// Reads the saved state, finds the control groups of the excluded containers, and updates the sets.
    pub(super) fn run(mut self, root: &HostRoot) -> Self {
        if let Err(error) = self.update(root) {
            self.failure = Some(error);
        }
        self
    }

    fn update(&mut self, root: &HostRoot) -> Result<(), Error> {
        self.saved.refresh(root, &self.sandbox_id)?;
        let Some(excluded) = &self.saved.excluded else {
            self.changes = Some(ContainerChanges::default());
            return Ok(());
        };
        let (mut running, mut exited, mut hierarchy) = (Vec::new(), Vec::new(), None);
        for (id, container) in &mut self.containers {
            if container.state != ContainerState::Ended && self.saved.excludes(container) {
                let hierarchy = match &hierarchy {
                    Some(hierarchy) => hierarchy,
                    None => hierarchy.insert(CgroupHierarchy::find(root)?),
                };
                if let Err(error) = container.look(hierarchy) {
                    self.failure.get_or_insert(error);
                }
            }
            match &container.state {
                ContainerState::Starting => {}
                ContainerState::Bypassing(group) => {
                    let name = container.reported.name.clone();
                    running.push(RunningContainer { name, id: id.clone(), cgroup: group.id });
                }
                ContainerState::Ended => exited.push(id.clone()),
            }
        }
        let complete = self.is_complete && self.failure.is_none();
        let observed = ObservedContainers { running: &running, exited: &exited, complete };
        self.changes = Some(excluded.reconcile(root, observed)?);
        Ok(())
    }
}

impl Sandbox {
    pub(super) fn new(id: &str) -> Self {
        Self { id: id.to_owned(), ..Self::default() }
    }

    /// Returns the excluded containers that run.
    fn running(&self) -> impl Iterator<Item = &Container> {
        self.containers.values().filter(|one| one.state != ContainerState::Ended && self.saved.excludes(one))
    }

    /// Returns whether a check is due. Without `has_room`, only one for which the runtime waits.
    pub(super) fn is_due(&self, has_room: bool) -> bool {
        !self.answers.is_empty() || has_room && self.due.is_some_and(|due| due <= Instant::now())
    }

    /// Returns whether nothing is known about the sandbox anymore.
    pub(super) fn is_unused(&self) -> bool {
        self.checking.is_none() && self.saved.modified.is_none() && self.containers.is_empty() && self.due.is_none()
    }

    /// Returns whether the running check, or the last one if none runs, takes longer than the runtime waits.
    fn is_slow(&self) -> bool {
        self.checking.map_or(self.is_slow, |began| began.elapsed() > START_TIMEOUT)
    }

    /// Makes a check due.
    pub(super) fn wake(&mut self) {
        self.due = Some(Instant::now());
    }

    /// Makes a check due if the saved state has changed. After a failure, one is due anyway.
    pub(super) fn scanned(&mut self, modified: Option<SystemTime>) {
        if self.checking.is_none() && modified != self.saved.modified && self.failure.is_empty() {
            self.wake();
        }
    }

    /// Records the stage of a container. An excluded one that stops still bypasses until its control group has no process:
    /// runtimes report the end before the last process has exited. The report of a start may come after the exit.
    pub(super) fn set_stage(&mut self, stage: Stage, reported: NriContainer) {
        let (id, is_slow) = (reported.id.clone(), self.is_slow());
        let new = || Container { reported, has_started: false, state: ContainerState::Starting };
        let known = self.containers.entry(id.clone()).or_insert_with(new);
        match stage {
            Stage::Start(answer) => {
                // The runtime does not wait for a sandbox whose checks are slow.
                self.answers.insert(id, ((!is_slow).then_some(answer), Instant::now()));
            }
            Stage::Started => known.has_started = true,
            Stage::Stopped => (known.has_started, known.reported.pid) = (true, 0),
            Stage::Removed => known.state = ContainerState::Ended,
        }
        self.wake();
    }

    /// Forgets all containers except these: the runtime has registered the agent, and runs no others.
    pub(super) fn retain(&mut self, ids: &BTreeSet<String>) {
        self.containers.retain(|id, _| ids.contains(id));
        self.answers.clear();
    }

    /// Begins a check of the containers that are known now.
    pub(super) fn begin(&mut self, is_complete: bool) -> Check {
        (self.due, self.checking) = (None, Some(Instant::now()));
        let (saved, containers) = (self.saved.clone(), self.containers.clone());
        Check { sandbox_id: self.id.clone(), saved, containers, is_complete, changes: None, failure: None }
    }

    /// Ends a check: the runtime does not wait any longer for its containers. A failure is logged unless it was before, or no
    /// excluded container is affected.
    pub(super) fn end(&mut self, mut check: Check, connection: &Connection, tools: &Tools) {
        (self.is_slow, self.checking) = (self.is_slow(), None);
        self.saved = take(&mut check.saved);
        self.failure = check.failure.as_ref().map_or_else(String::new, |error| self.text_of(error, tools));
        for (id, container) in take(&mut check.containers) {
            self.checked(&id, container, &check, tools);
        }
        let (failure, may_run) = (&self.failure, self.running().next().is_some());
        let is_news = !failure.is_empty() && self.logged.len() < MAX_LOGGED && !self.logged.contains(failure);
        if is_news && (may_run || self.saved.excluded.is_none()) {
            tracing::warn!(pod = self.pod_name(), sandbox = self.id, "can't update the excluded containers: {failure}");
            self.logged.insert(self.failure.clone());
        }
        match &self.saved.excluded {
            Some(_) => self.excluding_since = self.excluding_since.or_else(|| Some(Instant::now())),
            None => (self.excluding_since, self.reported) = (None, BTreeSet::new()),
        }
        if let Some(changes) = &check.changes {
            for (container, scope) in &changes.added {
                tracing::info!(pod = self.pod_name(), container, %scope, "the container's traffic bypasses the sidecar");
            }
            self.report_captured(changes, connection, tools);
        }
        if self.saved.excluded.is_some() || !self.failure.is_empty() {
            let is_known = check.is_complete && check.changes.is_some();
            let next = Instant::now() + if may_run || !is_known { CHECK_INTERVAL } else { REST_INTERVAL };
            self.due = Some(self.due.map_or(next, |due| due.min(next)));
        }
    }

    /// Records the result for a container of the check. One that has ended since then ends with the next check.
    fn checked(&mut self, id: &str, container: Container, check: &Check, tools: &Tools) {
        let in_time = self.answers.remove(id).map(|(answer, since)| {
            let answer = answer.inspect(|_| tools.metrics.runtime_waited(since.elapsed().as_secs_f64()));
            answer.is_some_and(|answer| answer.send(()).is_ok())
        });
        let (has_ended, name) = (container.state == ContainerState::Ended, &container.reported.name);
        if has_ended && check.changes.is_some() {
            self.containers.remove(id);
            return;
        }
        let is_excluded = self.saved.excludes(&container);
        let is_known = |known: &&mut Container| known.state != ContainerState::Ended;
        let Some(known) = self.containers.get_mut(id).filter(is_known) else { return };
        let was_starting = known.state == ContainerState::Starting;
        if has_ended || check.changes.is_some() {
            known.has_started |= container.has_started;
            known.state = container.state.clone();
        }
        if has_ended || !is_excluded {
            return;
        }
        let is_bypassing = check.changes.is_some() && container.state != ContainerState::Starting;
        if let Some(in_time) = in_time {
            let result = if in_time && is_bypassing { "excluded" } else { "error" };
            tools.metrics.count("container_starts", [("result", result)]);
        }
        // Without an addition, its element is from an earlier agent.
        let is_added = |changes: &ContainerChanges| changes.added.iter().any(|(added, _)| added == name);
        let was_captured = was_starting && check.changes.as_ref().is_some_and(is_added);
        match in_time {
            _ if !is_bypassing && was_starting => self.report(name, &self.failure.clone(), tools),
            Some(true) => drop(self.reported.remove(name)),
            Some(false) if was_captured => self.report(name, LATE, tools),
            None if was_captured => self.report(name, NOT_REGISTERED, tools),
            _ => {}
        }
    }

    /// Returns the text of a failure. The reconciler of pods restores sets that are missing.
    fn text_of(&self, error: &Error, tools: &Tools) -> String {
        match (error.code == Code::Drift, &tools.damaged) {
            (true, Some(damaged)) => {
                // If too many requests wait, the next failure makes another one.
                self.pod().into_iter().for_each(|pod| drop(damaged.try_send(pod.clone())));
                format!("{error}; the agent restores it from saved state")
            }
            (true, None) => format!("{error}; set the agent's flag --repair=repair or delete the pod"),
            _ => error.to_string(),
        }
    }

    /// Reports a container that started captured, once.
    fn report(&mut self, name: &str, why: &str, tools: &Tools) {
        if !self.reported.insert(name.to_owned()) {
            return;
        }
        let message = format!("container {name} started captured: {why}");
        let event = Event { warning: true, reason: "DetourContainerCaptured".into(), message };
        match self.pod() {
            Some(pod) => tools.reports.report(pod, event),
            None => tracing::warn!(sandbox = self.id, "{}", event.message),
        }
    }

    /// Reports the excluded containers that start captured because the check takes longer than the runtime waits.
    pub(super) fn report_late(&mut self, tools: &Tools) {
        let is_late = |answer: &Option<oneshot::Sender<()>>| answer.as_ref().is_none_or(oneshot::Sender::is_closed);
        let late = self.answers.iter().filter(|(_, (answer, _))| is_late(answer));
        let late = late.filter_map(|(id, _)| self.containers.get(id)).filter(|one| self.saved.excludes(one));
        let names: Vec<String> = late.map(|one| one.reported.name.clone()).collect();
        names.iter().for_each(|name| self.report(name, LATE, tools));
    }

    /// Reports the excluded containers without an element, if the agent was not registered when the pod began to exclude
    /// containers.
    fn report_captured(&mut self, changes: &ContainerChanges, connection: &Connection, tools: &Tools) {
        let Connection::Disconnected { why: Some(why), since } = connection else { return };
        if since.elapsed() < GRACE || self.excluding_since < Some(*since) {
            return;
        }
        let excluded = self.saved.excluded.clone();
        let why = format!("the agent is not registered at the container runtime: {why}");
        for one in excluded.iter().flat_map(|excluded| &excluded.policy.containers) {
            if !changes.live.iter().filter_map(|live| live.container.as_ref()).any(|live| live.name == one.name) {
                self.report(&one.name, &why, tools);
            }
        }
    }

    /// Returns the elements that the sets must have; `None` while a container's control group is unknown.
    pub(super) fn expected(&self) -> Option<Vec<BypassingContainer>> {
        let policy = &self.saved.excluded.as_ref()?.policy;
        let element = |container: &Container| {
            let ContainerState::Bypassing(group) = &container.state else { return None };
            let NriContainer { name, id, .. } = container.reported.clone();
            let scope = policy.container_scope(&name)?;
            Some(BypassingContainer { name, id, cgroup: group.id, scope })
        };
        self.running().map(element).collect()
    }

    fn pod(&self) -> Option<&PodRef> {
        self.saved.excluded.as_ref()?.pod.as_ref()
    }

    fn pod_name(&self) -> Option<String> {
        self.pod().map(|pod| format!("{}/{}", pod.namespace, pod.name))
    }
}

#[cfg(test)]
mod tests;
