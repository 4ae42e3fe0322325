//! Makes the sets of one pod sandbox match its running containers when the runtime reports one, and reports the changes: log,
//! Events, metrics.

use super::registry::{Applied, NamedContainer, Observed, Registry, START_BUDGET};
use crate::agent::metrics::Metrics;
use crate::agent::nri::{NriContainer, NriHandler, NriPod};
use crate::agent::pod_reports::PodReports;
use crate::cgroup::{CgroupHierarchy, ContainerGroup};
use crate::cluster::Event;
use crate::cni::{Code, Error};
use crate::host_path::HostRoot;
use crate::netns::find;
use crate::plugin::running::containers::{
    ContainerChanges, ExcludedContainers, ObservedContainers, RunningContainer, saved_policy,
};
use crate::pod::PodRef;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// The limit of unfinished changes of one sandbox. Each change has its own thread, so that a network namespace in which
/// the kernel is slow delays no other pod.
const MAX_CHANGES: usize = 4;

/// Changes the sets of pod sandboxes, and reports the changes.
#[derive(Clone)]
pub(super) struct Reconciler {
    pub(super) root: HostRoot,
    /// Gets the pods whose sets are missing; `None` if the agent does not repair pods.
    pub(super) damaged: Option<mpsc::Sender<PodRef>>,
    pub(super) registry: Registry,
    pub(super) reports: PodReports,
    pub(super) metrics: Metrics,
}

/// The named containers that run.
#[derive(Default)]
struct Running {
    /// Each with its control group, and whether that has a process already.
    containers: Vec<(RunningContainer, ContainerGroup, bool)>,
    /// The first failure to find a control group.
    problem: Option<Error>,
}

impl Reconciler {
    /// Reads which containers the sandbox excludes; `None` if it excludes none.
    ///
    /// # Errors
    /// As [`ExcludedContainers::find`].
    pub(super) fn find(&self, sandbox_id: &str) -> Result<Option<ExcludedContainers>, Error> {
        let excluded = ExcludedContainers::find(sandbox_id, &self.root);
        match &excluded {
            Ok(found) => self.registry.set_policy(sandbox_id, found.as_ref().map(ExcludedContainers::policy)),
            // It excludes containers, but its network namespace is gone or not visible.
            Err(error) if error.code == Code::InvalidNetns => {
                self.registry.set_policy(sandbox_id, Some(&saved_policy(sandbox_id)?));
            }
            Err(_) => {}
        }
        excluded
    }

    /// Makes the sets of a sandbox match its containers, within `timeout`, which includes the reading of saved state. Does
    /// nothing if `only` is the name of a container that the sandbox does not exclude. What takes longer continues.
    ///
    /// # Errors
    /// The saved state can't be read, the kernel refuses the change, a control group is missing, or the timeout expires.
    pub(super) fn reconcile(&self, sandbox_id: &str, only: Option<&str>, timeout: Duration) -> Result<(), Error> {
        let result = self.start_change(sandbox_id, only.map(str::to_owned), timeout);
        result.map_err(|error| if error.code == Code::Drift { self.lost(sandbox_id, error) } else { error })
    }

    fn start_change(&self, sandbox_id: &str, only: Option<String>, timeout: Duration) -> Result<(), Error> {
        let failed = |why: &str| Error::new(Code::TryAgain, why);
        let Some(turn) = self.registry.turn(sandbox_id) else { return Ok(()) };
        // The registry and this function have one reference each.
        if Arc::strong_count(&turn) > MAX_CHANGES + 2 {
            return Err(failed("earlier changes of the pod's rules have not ended; the agent retries"));
        }
        let (sender, done) = channel();
        let (own, id) = (self.clone(), sandbox_id.to_owned());
        let change = move || {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            let excluded = own.find(&id).map(|found| {
                found.filter(|found| only.is_none_or(|name| found.policy().containers.iter().any(|it| it.name == name)))
            });
            let changed = excluded.and_then(|found| found.map_or(Ok(()), |found| own.change(&id, &found)));
            // After the timeout, the other end is closed.
            let _ = sender.send(changed);
        };
        let started = thread::Builder::new().name("container".into()).spawn(change);
        started.map_err(|error| failed("can't start a thread").with_details(error.to_string()))?;
        done.recv_timeout(timeout).unwrap_or_else(|error| match error {
            RecvTimeoutError::Timeout => {
                let milliseconds = timeout.as_millis();
                Err(failed(&format!(
                    "the rules of the pod were not changed within {milliseconds} ms; the agent retries"
                )))
            }
            RecvTimeoutError::Disconnected => Err(failed("the change panicked; the agent retries")),
        })
    }

    /// Requests a check of the pod's rules, which restores lost sets. Returns the error with the next step.
    fn lost(&self, sandbox_id: &str, error: Error) -> Error {
        let Some(damaged) = &self.damaged else {
            let next = "; set the agent's flag --repair=repair or delete the pod";
            return Error { msg: format!("{}{next}", error.msg), ..error };
        };
        if let Some(pod) = self.pod(sandbox_id) {
            // If too many requests wait, the next failure makes another one.
            let _ = damaged.try_send(pod);
        }
        Error { msg: format!("{}; the agent restores it from saved state", error.msg), ..error }
    }

    /// Makes the sets match now. Changes of one sandbox run one after another: otherwise, one that began earlier would
    /// remove the elements of a container that it does not know.
    fn change(&self, sandbox_id: &str, excluded: &ExcludedContainers) -> Result<(), Error> {
        let Some(observed) = self.registry.observe(sandbox_id) else { return Ok(()) };
        let Running { containers, problem } = self.running(sandbox_id, &observed)?;
        // Again, because some may have exited.
        let Some(Observed { exited, complete, .. }) = self.registry.observe(sandbox_id) else {
            return Ok(());
        };
        let running = containers.iter().map(|(container, ..)| container).filter(|one| !exited.contains(&one.id));
        let running: Vec<RunningContainer> = running.cloned().collect();
        let observed =
            ObservedContainers { running: &running, exited: &exited, complete: complete && problem.is_none() };
        let changes = excluded.reconcile(observed)?;
        let applied = Applied {
            running: containers.into_iter().map(|(it, group, has_process)| (it.id, group, has_process)).collect(),
            exited,
            added: changes.added.iter().map(|(name, _)| name.clone()).collect(),
            bypassing: changes.live.iter().filter_map(|one| Some(one.container.as_ref()?.name.clone())).collect(),
        };
        let late = self.registry.applied(sandbox_id, &applied);
        self.report(sandbox_id, &changes, &late);
        problem.map_or(Ok(()), Err)
    }

    /// Returns the named containers that run. Records those that have exited.
    fn running(&self, sandbox_id: &str, observed: &Observed) -> Result<Running, Error> {
        let (mut found, mut exited) = (Running::default(), Vec::new());
        if observed.named.is_empty() {
            return Ok(found);
        }
        let hierarchy = CgroupHierarchy::find(&self.root)?;
        for container in &observed.named {
            let group = match &container.group {
                Some(known) => Some(known.clone()).filter(|known| hierarchy.has_container(known)),
                None => match hierarchy.container(&container.id, &container.cgroups_path, container.pid) {
                    Ok(group) => Some(group),
                    // Its first process can exit before the runtime's report is handled.
                    Err(_) if container.is_ending || hierarchy.has_exited(container.pid) => None,
                    Err(_) if container.has_started && container.pid == 0 => None,
                    Err(error) => {
                        found.problem = found.problem.or(Some(error));
                        continue;
                    }
                },
            };
            let is_empty = |group: &ContainerGroup| hierarchy.is_populated(&group.path) == Some(false);
            let may_have_exited = container.has_started || container.is_ending;
            let NamedContainer { name, id, .. } = container.clone();
            match group.map(|group| (is_empty(&group), group)) {
                Some((is_empty, group)) if !(is_empty && may_have_exited) => {
                    let running = RunningContainer { name, id, cgroup: group.id };
                    found.containers.push((running, group, !is_empty));
                }
                _ => exited.push(id),
            }
        }
        self.registry.mark_exited(sandbox_id, &exited);
        Ok(found)
    }

    /// Reports the changes of a sandbox's sets, and the containers that had started captured.
    fn report(&self, sandbox_id: &str, changes: &ContainerChanges, late: &[String]) {
        if changes.added.is_empty() {
            return;
        }
        let pod = self.pod(sandbox_id);
        for (container, scope) in &changes.added {
            tracing::info!(pod = pod_name(pod.as_ref()), container, %scope, "the container's traffic bypasses the sidecar");
        }
        for container in late {
            let why = "the agent was not registered at the container runtime when it started; its new connections bypass \
                       the sidecar from now on";
            self.report_event(pod.as_ref(), sandbox_id, captured(container, why));
        }
    }

    /// Records a failure to change the sets, and logs each cause once.
    pub(super) fn report_failure(&self, sandbox_id: &str, why: &str) {
        if self.registry.failed(sandbox_id, why) {
            let pod = pod_name(self.pod(sandbox_id).as_ref());
            tracing::warn!(pod, sandbox = sandbox_id, "can't update the excluded containers: {why}");
        }
    }

    /// Reports that a container started captured, once.
    pub(super) fn report_capture(&self, sandbox_id: &str, container: &str, why: &str) {
        if self.registry.report_capture(sandbox_id, container) {
            self.report_event(self.pod(sandbox_id).as_ref(), sandbox_id, captured(container, why));
        }
    }

    /// Logs an Event and creates it.
    pub(super) fn report_event(&self, pod: Option<&PodRef>, sandbox_id: &str, event: Event) {
        let name = pod_name(pod);
        let sandbox = pod.is_none().then_some(sandbox_id);
        match event.warning {
            true => tracing::warn!(pod = name, sandbox, "{}", event.message),
            false => tracing::info!(pod = name, sandbox, "{}", event.message),
        }
        if let Some(pod) = pod {
            self.reports.event(pod, event);
        }
    }

    /// Returns the pod of a sandbox: as the runtime reports it, or as fallback from cached CNI results.
    pub(super) fn pod(&self, sandbox_id: &str) -> Option<PodRef> {
        self.registry.pod(sandbox_id).or_else(|| {
            let pod = find::pod_of_sandbox(&self.root, sandbox_id).inspect_err(|error| tracing::debug!("{error}"));
            pod.ok().flatten().inspect(|pod| self.registry.set_pod(sandbox_id, pod))
        })
    }
}

fn pod_name(pod: Option<&PodRef>) -> Option<String> {
    pod.map(|pod| format!("{}/{}", pod.namespace, pod.name))
}

/// Returns the Event for a container whose traffic is captured from its start on.
pub(super) fn captured(container: &str, why: &str) -> Event {
    let message = format!("container {container} started captured: {why}");
    Event { warning: true, reason: "DetourContainerCaptured".into(), message }
}

impl NriHandler for Reconciler {
    fn synchronize(&mut self, pods: Vec<NriPod>, containers: Vec<NriContainer>) {
        self.registry.synchronize(&pods, containers);
    }

    fn start(&mut self, pod: &NriPod, container: &NriContainer) {
        let started = Instant::now();
        self.registry.add(pod, container, true);
        if let Some(result) = self.exclude(pod, container) {
            self.metrics.container_start(result);
        }
        self.metrics.nri_request(started.elapsed());
    }

    fn started(&mut self, pod: &NriPod, container: &NriContainer) {
        self.registry.add(pod, container, false);
    }

    fn stopped(&mut self, pod: &NriPod, container: &NriContainer) {
        self.registry.stopped(pod, container);
    }

    fn removed(&mut self, pod: &NriPod, container: &NriContainer) {
        self.registry.removed(pod, container);
    }
}

impl Reconciler {
    /// Lets the container's traffic bypass the sidecar if it is excluded. Returns the result for the metric; `None` if
    /// it is not excluded, or has exited already.
    fn exclude(&self, pod: &NriPod, container: &NriContainer) -> Option<&'static str> {
        let name = &container.name;
        let began = Instant::now();
        let is_known = self.registry.excludes(&pod.id, name).is_some();
        // The saved state of a new sandbox has not been read yet.
        let timeout = if is_known { self.registry.start_timeout(&pod.id) } else { START_BUDGET };
        let result = self.reconcile(&pod.id, Some(name), timeout);
        self.registry.waited(&pod.id, began.elapsed());
        match (self.registry.excludes(&pod.id, name), &result) {
            (Some(true), _) => {}
            (None, Err(error)) => {
                let pod = format!("{}/{}", pod.namespace, pod.name);
                tracing::warn!(pod, container = name, "can't read which containers are excluded: {error}");
                return None;
            }
            _ => return None,
        }
        match result {
            // An error may be about another container of the pod.
            _ if self.registry.is_bypassing(&pod.id, &container.id) => Some("excluded"),
            _ if !self.registry.runs(&pod.id, &container.id) => None,
            Ok(()) => Some("captured"),
            Err(error) => {
                self.report_failure(&pod.id, &error.to_string());
                self.report_capture(&pod.id, name, &error.to_string());
                Some("error")
            }
        }
    }
}
