//! One check of a pod sandbox: reads which containers it excludes, finds their control groups, and makes the sets in its
//! network namespace match. It blocks.

use crate::agent::nri::NriContainer;
use crate::cgroup::{CgroupHierarchy, ContainerGroup};
use crate::cni::Error;
use crate::host_path::HostRoot;
use crate::netns::find;
use crate::plugin::running::containers::{ContainerChanges, ExcludedContainers, ObservedContainers, RunningContainer};
use crate::pod::PodRef;
use crate::state::ROOT;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Saved state that changed less than this time ago is read again: two changes can have the same time stamp, which the
/// kernel takes from a clock with ticks of at most 10 ms.
const TIME_STAMP_PRECISION: Duration = Duration::from_millis(100);

/// What saved state says about a sandbox.
#[derive(Debug, Clone, Default)]
pub(super) struct Saved {
    /// When it changed; `None` without saved state, or if it must be read again.
    pub(super) modified: Option<SystemTime>,
    /// `None` if it excludes no container.
    pub(super) excluded: Option<Arc<ExcludedContainers>>,
}

/// A container that runs or is about to start.
#[derive(Debug, Clone)]
pub(super) struct Observed {
    pub(super) reported: NriContainer,
    /// Its control group, once known.
    pub(super) group: Option<ContainerGroup>,
    /// Whether it has had a process: it was seen with one, or the runtime reported that it had started. Before, its
    /// control group may be empty.
    pub(super) has_started: bool,
}

/// What the check needs to know, and its result.
#[derive(Debug, Default)]
pub(super) struct Check {
    pub(super) sandbox_id: String,
    /// What saved state said at the last check, and then what it says now; `None` if it can't be read.
    pub(super) saved: Option<Saved>,
    pub(super) containers: Vec<Observed>,
    /// The IDs of the containers whose first instruction the runtime delays.
    pub(super) awaited: Vec<String>,
    /// The IDs of containers that have exited; the check adds those that it finds.
    pub(super) exited: Vec<String>,
    /// Whether `containers` has all running containers of the sandbox.
    pub(super) is_complete: bool,
    /// Whether the sets are compared also if the sandbox excludes none of the awaited containers.
    pub(super) is_full: bool,
    /// Result: the pod, if the saved state was read again.
    pub(super) pod: Option<PodRef>,
    /// Result: the excluded containers that run, each with its control group, and whether that has a process.
    pub(super) running: Vec<(String, ContainerGroup, bool)>,
    /// Result: the changes of the sets, if the kernel applied them.
    pub(super) applied: Option<ContainerChanges>,
    /// Result: the failure that ended the check, or the first one to find a control group.
    pub(super) error: Option<Error>,
}

impl Check {
    pub(super) fn run(mut self, root: &HostRoot) -> Self {
        if let Err(error) = self.fill(root) {
            self.error = Some(error);
        }
        self
    }

    fn fill(&mut self, root: &HostRoot) -> Result<(), Error> {
        let known = self.saved.take().unwrap_or_default();
        let saved = self.saved.insert(read(&self.sandbox_id, known, root, &mut self.pod)?);
        let Some(excluded) = saved.excluded.clone() else { return Ok(()) };
        let named = || self.containers.iter().filter(|one| names(&excluded, &one.reported.name));
        if !self.is_full && !named().any(|one| self.awaited.contains(&one.reported.id)) {
            return Ok(());
        }
        let (mut running, mut hierarchy) = (Vec::new(), None);
        for container in named() {
            let hierarchy = match &mut hierarchy {
                Some(hierarchy) => hierarchy,
                none => none.insert(CgroupHierarchy::find(root)?),
            };
            let NriContainer { name, id, .. } = container.reported.clone();
            match container.group(hierarchy) {
                Ok(Some((group, has_process))) => {
                    running.push(RunningContainer { name, id: id.clone(), cgroup: group.id });
                    self.running.push((id, group, has_process));
                }
                Ok(None) => self.exited.push(id),
                Err(error) => self.error = self.error.take().or(Some(error)),
            }
        }
        let complete = self.is_complete && self.error.is_none();
        let observed = ObservedContainers { running: &running, exited: &self.exited, complete };
        self.applied = Some(excluded.reconcile(root, observed)?);
        Ok(())
    }
}

/// Reads the saved state if it has changed since it was `known`, and finds the pod.
fn read(sandbox_id: &str, known: Saved, root: &HostRoot, pod: &mut Option<PodRef>) -> Result<Saved, Error> {
    let directory = Path::new(ROOT).join(sandbox_id);
    let modified = fs::symlink_metadata(directory).and_then(|metadata| metadata.modified()).ok();
    if modified.is_some() && modified == known.modified {
        return Ok(known);
    }
    let is_old = |time: &SystemTime| time.elapsed().is_ok_and(|age| age > TIME_STAMP_PRECISION);
    let excluded = ExcludedContainers::find(sandbox_id)?.map(Arc::new);
    if excluded.is_some() {
        // Without it, Events are only logged.
        *pod = find::pod_of_sandbox(root, sandbox_id).ok().flatten();
    }
    Ok(Saved { modified: modified.filter(is_old), excluded })
}

impl Observed {
    /// Returns the container's control group, and whether that has a process; `None` if the container has exited.
    fn group(&self, hierarchy: &CgroupHierarchy) -> Result<Option<(ContainerGroup, bool)>, Error> {
        let NriContainer { id, cgroups_path, pid, .. } = &self.reported;
        let group = match &self.group {
            Some(known) => Some(known.clone()).filter(|known| hierarchy.has_container(known)),
            None => match hierarchy.container(id, cgroups_path, *pid) {
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

/// Returns whether a sandbox excludes the container of this name.
pub(super) fn names(excluded: &ExcludedContainers, name: &str) -> bool {
    excluded.policy().containers.iter().any(|one| one.name == name)
}
