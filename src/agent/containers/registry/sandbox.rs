//! A pod sandbox in the registry: its running containers, and the state of its bypass.

use crate::agent::nri::NriContainer;
use crate::cgroup::ContainerGroup;
use crate::cluster::agent::BypassingContainer;
use crate::pod::PodRef;
use crate::policy::Policy;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The interval of the checks of excluded containers that run or may run.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The interval of the checks of sandboxes in which no excluded container runs.
pub(super) const REST_INTERVAL: Duration = Duration::from_secs(30);
/// The total time that the runtime may wait for the starts of a sandbox's containers before the limit of each start
/// applies. On a node with little CPU time, excluded containers must not start captured. A pod with slow changes of its
/// rules must not delay other pods repeatedly. The runtime itself waits for two seconds.
pub(in crate::agent::containers) const START_BUDGET: Duration = Duration::from_secs(1);

/// The minimum time between two log messages about the same cause.
pub(super) const LOG_INTERVAL: Duration = Duration::from_secs(600);
/// The limit of causes that are logged within this time.
pub(super) const MAX_LOGGED: usize = 8;

/// A pod sandbox.
#[derive(Default)]
pub(super) struct Sandbox {
    pub(super) pod: Option<PodRef>,
    /// The running containers, by ID.
    pub(super) containers: BTreeMap<String, Container>,
    /// The IDs of excluded containers that have exited, until their elements are removed.
    pub(super) exited: BTreeSet<String>,
    pub(super) excluding: Option<Excluding>,
    /// Serializes the changes of the sandbox's sets.
    pub(super) turn: Arc<Mutex<()>>,
}

/// The bypass in a sandbox that excludes containers.
pub(super) struct Excluding {
    pub(super) policy: Policy,
    pub(super) due: Instant,
    /// When the sandbox is due because of a report of the runtime since the running check began.
    pub(super) woken: Option<Instant>,
    pub(super) first_seen: Instant,
    /// The last failure.
    pub(super) failure: String,
    /// The names of the containers that have elements; `None` before the first check.
    pub(super) bypassing: Option<BTreeSet<String>>,
    /// The containers whose capture was reported.
    pub(super) reported: BTreeSet<String>,
    /// The rest of [`START_BUDGET`].
    pub(super) start_budget: Duration,
    /// The failures that were logged lately, with the time.
    logged: BTreeMap<String, Instant>,
}

pub(super) struct Container {
    pub(super) name: String,
    pub(super) cgroups_path: String,
    pub(super) pid: u32,
    /// Its control group, once known.
    pub(super) group: Option<ContainerGroup>,
    /// Whether it has had a process: it was seen with one, or the runtime reported that it had started.
    pub(super) had_process: bool,
    pub(super) added: Instant,
    /// Whether the runtime has reported its end.
    pub(super) is_ending: bool,
    pub(super) is_bypassing: bool,
    /// Whether the runtime reported it before its first instruction.
    pub(super) is_from_start: bool,
}

impl Sandbox {
    /// Makes the sandbox due at `time` at the latest.
    pub(super) fn wake(&mut self, time: Instant) {
        if let Some(excluding) = &mut self.excluding {
            excluding.due = excluding.due.min(time);
            excluding.woken = Some(excluding.woken.map_or(time, |earlier| earlier.min(time)));
        }
    }

    /// Returns the elements that the sets must have; `None` while a container's control group is unknown.
    pub(super) fn expected(&self) -> Option<Vec<BypassingContainer>> {
        let excluding = self.excluding.as_ref()?;
        let scope = |container: &Container| excluding.policy.container_scope(&container.name);
        let bypassing = self.containers.iter().filter_map(|(id, container)| Some((id, container, scope(container)?)));
        bypassing
            .map(|(id, container, scope)| {
                let (name, id, cgroup) = (container.name.clone(), id.clone(), container.group.as_ref()?.id);
                Some(BypassingContainer { name, id, cgroup, scope })
            })
            .collect()
    }
}

impl Excluding {
    pub(super) fn new(policy: Policy) -> Self {
        let now = Instant::now();
        Self {
            policy,
            due: now,
            woken: None,
            first_seen: now,
            failure: String::new(),
            bypassing: None,
            reported: BTreeSet::new(),
            start_budget: START_BUDGET,
            logged: BTreeMap::new(),
        }
    }

    /// Returns whether to log a failure, and records it as logged: each cause once per interval, and a limited number of
    /// causes, because a pod can make them alternate.
    pub(super) fn is_new_failure(&mut self, why: &str, now: Instant) -> bool {
        self.logged.retain(|_, logged| now.saturating_duration_since(*logged) < LOG_INTERVAL);
        let is_new = self.logged.len() < MAX_LOGGED && !self.logged.contains_key(why);
        if is_new {
            self.logged.insert(why.to_owned(), now);
        }
        is_new
    }

    pub(super) fn names(&self, name: &str) -> bool {
        self.policy.containers.iter().any(|excluded| excluded.name == name)
    }

    /// Ends a check: the next one follows after `pause`, or earlier if the runtime has reported a change meanwhile.
    pub(super) fn rest(&mut self, pause: Duration) {
        let due = Instant::now() + pause;
        self.due = self.woken.take().map_or(due, |woken| woken.min(due));
    }

    /// Returns the time until the next check.
    pub(super) fn pause(&self, containers: &BTreeMap<String, Container>, is_complete: bool) -> Duration {
        let runs = |name: &str| !is_complete || containers.values().any(|container| container.name == name);
        let may_run = self.policy.containers.iter().any(|excluded| runs(&excluded.name));
        if may_run { CHECK_INTERVAL } else { REST_INTERVAL }
    }
}

impl Container {
    pub(super) fn of(container: &NriContainer, is_from_start: bool) -> Self {
        Self {
            name: container.name.clone(),
            cgroups_path: container.cgroups_path.clone(),
            pid: container.pid,
            group: None,
            had_process: !is_from_start,
            added: Instant::now(),
            is_ending: false,
            is_bypassing: false,
            is_from_start,
        }
    }
}
