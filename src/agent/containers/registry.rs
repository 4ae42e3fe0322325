//! The node's running containers as the runtime reports them, by pod sandbox, with what is known about the bypass of
//! each excluded one. The registry's lock is not held during calls of the kernel or the runtime.

mod sandbox;

use crate::agent::nri::{NriContainer, NriPod, NriStatus};
use crate::cgroup::ContainerGroup;
use crate::cluster::agent::ContainersStatus;
use crate::pod::PodRef;
use crate::policy::Policy;
pub(super) use sandbox::START_BUDGET;
use sandbox::{CHECK_INTERVAL, Container, Excluding, REST_INTERVAL, Sandbox};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The pause after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// How long the start of a container may wait if its sandbox has used up its total time. The runtime starts no other
/// container of the node meanwhile.
const START_TIMEOUT: Duration = Duration::from_millis(90);
/// The time without a registration after which the agent reports captures: a restarting runtime returns earlier.
const GRACE: Duration = Duration::from_secs(2);

/// The registry; clones share it.
#[derive(Clone)]
pub(in crate::agent) struct Registry(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// A sandbox is due earlier than before, or the agent ends.
    changed: Condvar,
    started: Instant,
    /// The runtime's NRI socket.
    nri_socket: String,
}

struct State {
    sandboxes: BTreeMap<String, Sandbox>,
    connection: Connection,
    ended: bool,
}

/// The connection to the runtime.
enum Connection {
    /// The first attempt to connect has not ended.
    Starting,
    Disconnected {
        why: String,
        since: Instant,
    },
    /// Name and version of the runtime. The registry has all running containers.
    Registered(String),
}

/// A running container that the policy names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedContainer {
    pub(super) name: String,
    pub(super) id: String,
    pub(super) cgroups_path: String,
    pub(super) pid: u32,
    /// Whether it has had a process, or had time to start one. Before, its control group may be empty.
    pub(super) has_started: bool,
    /// Whether the runtime has reported its end.
    pub(super) is_ending: bool,
    /// Its control group, once known.
    pub(super) group: Option<ContainerGroup>,
}

/// What is known about a sandbox before its sets are changed.
pub(super) struct Observed {
    pub(super) named: Vec<NamedContainer>,
    pub(super) exited: Vec<String>,
    pub(super) complete: bool,
}

/// An excluded container that starts captured, and why.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Capture {
    pub(super) sandbox_id: String,
    pub(super) container: String,
    pub(super) why: String,
}

/// A change of the sets that succeeded.
#[derive(Default)]
pub(super) struct Applied {
    /// The containers that run, each with its control group, and whether that has a process.
    pub(super) running: Vec<(String, ContainerGroup, bool)>,
    /// The IDs of the containers that have exited, whose elements are removed.
    pub(super) exited: Vec<String>,
    /// The names of the containers that have new elements.
    pub(super) added: Vec<String>,
    /// The names of the containers that have elements now.
    pub(super) bypassing: BTreeSet<String>,
}

impl Registry {
    /// Creates an empty registry. `nri_socket` is where the runtime is expected to report its containers.
    pub(super) fn new(nri_socket: String) -> Self {
        let connection = Connection::Starting;
        let state = Mutex::new(State { sandboxes: BTreeMap::new(), connection, ended: false });
        Self(Arc::new(Shared { state, changed: Condvar::new(), started: Instant::now(), nri_socket }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change of the state is complete before code that can panic.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `work` for a sandbox; returns `None` if it is not known to exclude containers.
    fn with_excluding<R>(&self, sandbox_id: &str, work: impl FnOnce(&mut Excluding) -> R) -> Option<R> {
        self.state().sandboxes.get_mut(sandbox_id)?.excluding.as_mut().map(work)
    }

    /// Ends [`Self::wait`].
    pub(super) fn end(&self) {
        self.state().ended = true;
        self.0.changed.notify_all();
    }

    /// Waits for at most `timeout` until a sandbox is due. Returns all due sandboxes; `None` if the agent ends.
    pub(super) fn wait(&self, timeout: Duration) -> Option<Vec<String>> {
        let until = Instant::now() + timeout;
        let mut state = self.state();
        loop {
            let now = Instant::now();
            if state.ended {
                return None;
            }
            let due: Vec<String> = state.due(now);
            if !due.is_empty() || now >= until {
                return Some(due);
            }
            let next = state.next_due().map_or(until, |next| next.min(until));
            let waited = self.0.changed.wait_timeout(state, next.saturating_duration_since(now));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records a change of the connection to the runtime.
    pub(super) fn report(&self, status: &NriStatus) {
        let mut state = self.state();
        state.connection = match status {
            NriStatus::Registered { runtime, version } => Connection::Registered(format!("{runtime} {version}")),
            NriStatus::Disconnected(why) => {
                let since = match &state.connection {
                    Connection::Disconnected { since, .. } => *since,
                    Connection::Starting => self.0.started,
                    Connection::Registered(_) => Instant::now(),
                };
                Connection::Disconnected { why: why.clone(), since }
            }
        };
        // Whether the registry has all running containers may have changed.
        let now = Instant::now();
        state.sandboxes.values_mut().for_each(|sandbox| sandbox.wake(now));
        self.0.changed.notify_all();
    }

    /// Replaces all containers by those that the runtime lists.
    pub(super) fn synchronize(&self, pods: &[NriPod], containers: Vec<NriContainer>) {
        let mut state = self.state();
        let now = Instant::now();
        let mut before: BTreeMap<String, Container> = BTreeMap::new();
        for sandbox in state.sandboxes.values_mut() {
            before.extend(std::mem::take(&mut sandbox.containers));
            sandbox.wake(now);
        }
        for pod in pods {
            state.sandboxes.entry(pod.id.clone()).or_default().pod = Some(pod_ref(pod));
        }
        for container in containers.into_iter().filter(|container| container.running) {
            let known = before.remove(&container.id);
            let sandbox = state.sandboxes.entry(container.pod_id.clone()).or_default();
            sandbox.containers.insert(container.id.clone(), known.unwrap_or_else(|| Container::of(&container, false)));
        }
        state.remove_unused();
        self.0.changed.notify_all();
    }

    /// Adds a container that is about to start, or that has started.
    pub(super) fn add(&self, pod: &NriPod, container: &NriContainer, is_from_start: bool) {
        let mut state = self.state();
        let sandbox = state.sandboxes.entry(pod.id.clone()).or_default();
        sandbox.pod = Some(pod_ref(pod));
        sandbox.exited.remove(&container.id);
        let is_new = !sandbox.containers.contains_key(&container.id);
        let new = || Container::of(container, is_from_start);
        sandbox.containers.entry(container.id.clone()).or_insert_with(new);
        if is_new {
            // The caller excludes a container before its start.
            let now = Instant::now();
            sandbox.wake(if is_from_start { now + CHECK_INTERVAL } else { now });
        }
        self.0.changed.notify_all();
    }

    /// Records the end of a container. A container that the policy names stays until its control group has no process:
    /// runtimes report the end before the last process has exited.
    pub(super) fn stopped(&self, pod: &NriPod, container: &NriContainer) {
        let mut state = self.state();
        let Some(sandbox) = state.sandboxes.get_mut(&pod.id) else { return };
        let is_named = sandbox.excluding.as_ref().is_some_and(|excluding| excluding.names(&container.name));
        if is_named {
            if let Some(container) = sandbox.containers.get_mut(&container.id) {
                container.is_ending = true;
            }
            sandbox.wake(Instant::now());
        } else {
            sandbox.containers.remove(&container.id);
        }
        state.remove_unused();
        self.0.changed.notify_all();
    }

    /// Records the removal of a container: its exclusion ends, whatever is known about its control group.
    pub(super) fn removed(&self, pod: &NriPod, container: &NriContainer) {
        let mut state = self.state();
        let Some(sandbox) = state.sandboxes.get_mut(&pod.id) else { return };
        sandbox.containers.remove(&container.id);
        if sandbox.excluding.as_ref().is_some_and(|excluding| excluding.names(&container.name)) {
            sandbox.exited.insert(container.id.clone());
            sandbox.wake(Instant::now());
        }
        state.remove_unused();
        self.0.changed.notify_all();
    }

    /// Returns whether the sandbox is known to exclude the container of this name; `None` if it is not known to exclude
    /// any.
    pub(super) fn excludes(&self, sandbox_id: &str, name: &str) -> Option<bool> {
        self.with_excluding(sandbox_id, |excluding| excluding.names(name))
    }

    /// Returns how long the start of a container of the sandbox may take.
    pub(super) fn start_timeout(&self, sandbox_id: &str) -> Duration {
        let budget = self.with_excluding(sandbox_id, |excluding| excluding.start_budget);
        budget.unwrap_or_default().max(START_TIMEOUT)
    }

    /// Records how long the start of a container has taken.
    pub(super) fn waited(&self, sandbox_id: &str, time: Duration) {
        self.with_excluding(sandbox_id, |it| it.start_budget = it.start_budget.saturating_sub(time));
    }

    /// Records the sandbox's excluded containers; `None` if it excludes none, or no longer exists.
    pub(super) fn set_policy(&self, sandbox_id: &str, policy: Option<&Policy>) {
        let mut state = self.state();
        let Some(policy) = policy else {
            if let Some(sandbox) = state.sandboxes.get_mut(sandbox_id) {
                sandbox.excluding = None;
                sandbox.exited.clear();
            }
            return state.remove_unused();
        };
        let sandbox = state.sandboxes.entry(sandbox_id.to_owned()).or_default();
        // Only the excluded containers: a policy can have many exclusions of other kinds.
        let policy = Policy { containers: policy.containers.clone(), ..Policy::default() };
        match &mut sandbox.excluding {
            Some(excluding) if excluding.policy == policy => {}
            Some(excluding) => {
                excluding.policy = policy;
                excluding.due = Instant::now();
            }
            None => sandbox.excluding = Some(Excluding::new(policy)),
        }
        self.0.changed.notify_all();
    }

    /// Returns the lock that serializes the changes of a sandbox's sets.
    pub(super) fn turn(&self, sandbox_id: &str) -> Option<Arc<Mutex<()>>> {
        let mut state = self.state();
        let sandbox = state.sandboxes.get_mut(sandbox_id)?;
        // The caller reads the registry later than this.
        sandbox.excluding.iter_mut().for_each(|excluding| excluding.woken = None);
        Some(Arc::clone(&sandbox.turn))
    }

    /// Returns what is known about a sandbox; `None` if it is not known to exclude containers.
    pub(super) fn observe(&self, sandbox_id: &str) -> Option<Observed> {
        let state = self.state();
        let sandbox = state.sandboxes.get(sandbox_id)?;
        let excluding = sandbox.excluding.as_ref()?;
        let named = sandbox.containers.iter().filter(|(_, container)| excluding.names(&container.name));
        let named = named.map(|(id, container)| {
            let (name, cgroups_path) = (container.name.clone(), container.cgroups_path.clone());
            let has_started = container.had_process || container.added.elapsed() > CHECK_INTERVAL;
            let (pid, is_ending, group) = (container.pid, container.is_ending, container.group.clone());
            NamedContainer { name, id: id.clone(), cgroups_path, pid, has_started, is_ending, group }
        });
        Some(Observed {
            named: named.collect(),
            exited: sandbox.exited.iter().cloned().collect(),
            complete: matches!(state.connection, Connection::Registered(_)),
        })
    }

    /// Records that these containers have exited.
    pub(super) fn mark_exited(&self, sandbox_id: &str, ids: &[String]) {
        let mut state = self.state();
        let Some(sandbox) = state.sandboxes.get_mut(sandbox_id) else { return };
        for id in ids {
            sandbox.containers.remove(id);
            sandbox.exited.insert(id.clone());
        }
    }

    /// Records a change of the sets. Returns the names of the containers that had started captured.
    pub(super) fn applied(&self, sandbox_id: &str, applied: &Applied) -> Vec<String> {
        let mut state = self.state();
        let is_complete = matches!(state.connection, Connection::Registered(_));
        let Some(sandbox) = state.sandboxes.get_mut(sandbox_id) else { return Vec::new() };
        let Some(excluding) = &mut sandbox.excluding else { return Vec::new() };
        sandbox.exited.retain(|id| !applied.exited.contains(id));
        excluding.failure.clear();
        excluding.bypassing = Some(applied.bypassing.clone());
        let mut late = Vec::new();
        for (id, group, has_process) in &applied.running {
            let Some(container) = sandbox.containers.get_mut(id) else { continue };
            let is_bypassing = excluding.policy.container_scope(&container.name).is_some();
            let is_new = is_bypassing && !container.is_bypassing && applied.added.contains(&container.name);
            if is_new && !container.is_from_start && excluding.reported.insert(container.name.clone()) {
                late.push(container.name.clone());
            }
            if is_bypassing && container.is_from_start {
                excluding.reported.remove(&container.name);
            }
            container.group = Some(group.clone());
            container.had_process |= has_process;
            container.is_bypassing = is_bypassing;
        }
        excluding.rest(excluding.pause(&sandbox.containers, is_complete));
        late
    }

    /// Records a failure to change the sets. Returns whether to log it: an excluded container runs, and the failure was
    /// not logged lately.
    pub(super) fn failed(&self, sandbox_id: &str, why: &str) -> bool {
        let mut state = self.state();
        let Some(sandbox) = state.sandboxes.get_mut(sandbox_id) else { return false };
        let Some(excluding) = &mut sandbox.excluding else { return false };
        let is_affected = sandbox.containers.values().any(|container| excluding.names(&container.name));
        excluding.rest(if is_affected { RETRY_DELAY } else { REST_INTERVAL });
        why.clone_into(&mut excluding.failure);
        is_affected && excluding.is_new_failure(why, Instant::now())
    }

    /// Records that a container's capture is reported. Returns whether it was not before.
    pub(super) fn report_capture(&self, sandbox_id: &str, name: &str) -> bool {
        self.with_excluding(sandbox_id, |it| it.reported.insert(name.to_owned())).unwrap_or(true)
    }

    /// Returns whether the traffic of a running container is known to bypass the sidecar.
    pub(super) fn is_bypassing(&self, sandbox_id: &str, id: &str) -> bool {
        let state = self.state();
        let container = state.sandboxes.get(sandbox_id).and_then(|sandbox| sandbox.containers.get(id));
        container.is_some_and(|container| container.is_bypassing)
    }

    /// Returns whether a container of a sandbox is not known to have exited.
    pub(super) fn runs(&self, sandbox_id: &str, id: &str) -> bool {
        self.state().sandboxes.get(sandbox_id).is_some_and(|sandbox| sandbox.containers.contains_key(id))
    }

    /// Returns the excluded containers that start captured because the agent is not registered, each once.
    pub(super) fn captured_by_disconnection(&self) -> Vec<Capture> {
        let mut state = self.state();
        let State { sandboxes, connection, .. } = &mut *state;
        let Connection::Disconnected { why, since } = connection else { return Vec::new() };
        if since.elapsed() < GRACE {
            return Vec::new();
        }
        let mut captured = Vec::new();
        for (sandbox_id, sandbox) in sandboxes {
            let Some(excluding) = sandbox.excluding.as_mut().filter(|excluding| excluding.first_seen >= *since) else {
                continue;
            };
            // An agent that has just started does not know which containers bypass the sidecar until the first check.
            let failed = (!excluding.failure.is_empty()).then(BTreeSet::new);
            let Some(bypassing) = excluding.bypassing.clone().or(failed) else { continue };
            for excluded in excluding.policy.containers.iter().filter(|excluded| !bypassing.contains(&excluded.name)) {
                if excluding.reported.insert(excluded.name.clone()) {
                    let (sandbox_id, container) = (sandbox_id.clone(), excluded.name.clone());
                    captured.push(Capture { sandbox_id, container, why: why.clone() });
                }
            }
        }
        captured
    }

    /// Returns the pod of a sandbox, if the runtime reported it.
    pub(super) fn pod(&self, sandbox_id: &str) -> Option<PodRef> {
        self.state().sandboxes.get(sandbox_id)?.pod.clone()
    }

    /// Records the pod of a sandbox.
    pub(super) fn set_pod(&self, sandbox_id: &str, pod: &PodRef) {
        if let Some(sandbox) = self.state().sandboxes.get_mut(sandbox_id) {
            sandbox.pod.get_or_insert_with(|| pod.clone());
        }
    }

    /// Returns the answer to CHECK and `doctor` about a sandbox.
    pub(in crate::agent) fn status(&self, sandbox_id: &str) -> ContainersStatus {
        let state = self.state();
        let sandbox = state.sandboxes.get(sandbox_id);
        let failure = || sandbox.and_then(|sandbox| Some(sandbox.excluding.as_ref()?.failure.clone()));
        let (runtime, error) = match &state.connection {
            Connection::Starting => (None, "the agent has just started".to_owned()),
            Connection::Disconnected { why, .. } => (None, why.clone()),
            Connection::Registered(runtime) => (Some(runtime.clone()), failure().unwrap_or_default()),
        };
        let expected = sandbox.filter(|_| runtime.is_some()).and_then(Sandbox::expected);
        ContainersStatus { runtime, socket: Some(self.0.nri_socket.clone()), error, expected }
    }
}

impl State {
    fn due(&self, now: Instant) -> Vec<String> {
        let is_due = |sandbox: &Sandbox| sandbox.excluding.as_ref().is_some_and(|excluding| excluding.due <= now);
        self.sandboxes.iter().filter(|(_, sandbox)| is_due(sandbox)).map(|(id, _)| id.clone()).collect()
    }

    fn next_due(&self) -> Option<Instant> {
        self.sandboxes.values().filter_map(|sandbox| sandbox.excluding.as_ref()).map(|excluding| excluding.due).min()
    }

    fn remove_unused(&mut self) {
        self.sandboxes.retain(|_, sandbox| sandbox.excluding.is_some() || !sandbox.containers.is_empty());
    }
}

fn pod_ref(pod: &NriPod) -> PodRef {
    let uid = (!pod.uid.is_empty()).then(|| pod.uid.clone());
    PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid }
}

#[cfg(test)]
mod tests;
