//! Excluded containers of a running pod: adds a container's control group to the sets in the pod's network namespace
//! when the container starts, and removes it when the bypass ends. The node's agent calls it.

use crate::cni::{Code, Error, is_identifier};
use crate::firewall::{ContainerElement, ContainerLabel, change_container_elements, required_container_elements};
use crate::host_path::{HostPath, HostRoot};
use crate::netns::NetnsId;
use crate::plugin::netns_state;
use crate::plugin::record::RecordPart;
use crate::policy::{ContainerScope, Policy};
use crate::state::{ROOT, Store};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A running container, or one that the runtime is about to start.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunningContainer {
    /// Its name in the pod.
    pub name: String,
    /// Its ID.
    pub id: String,
    /// The ID of its control group.
    pub cgroup: u64,
}

/// The excluded containers of one pod sandbox, from saved state.
#[derive(Debug)]
pub struct ExcludedContainers {
    /// The path of its network namespace; `None` if no record has one.
    netns: Option<(PathBuf, NetnsId)>,
    /// A policy with the excluded containers of its attachments.
    pub policy: Policy,
}

/// What is known about the pod's containers.
#[derive(Debug, Clone, Copy, Default)]
pub struct ObservedContainers<'a> {
    /// Containers that run. Excluded ones get an element.
    pub running: &'a [RunningContainer],
    /// The IDs of containers that have exited. Their elements are removed.
    pub exited: &'a [String],
    /// Whether `running` lists all running containers of the pod. Then all other elements are removed.
    pub complete: bool,
}

/// The changes of one call, by name of the container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerChanges {
    /// The containers whose traffic now bypasses the sidecar.
    pub added: Vec<(String, ContainerScope)>,
    /// The number of removed elements of containers that have exited.
    pub removed: usize,
    /// The elements after the call.
    pub live: Vec<ContainerElement>,
}

impl ExcludedContainers {
    /// Reads the excluded containers of a pod sandbox (`CNI_CONTAINERID`); `None` if its attachments exclude no
    /// container.
    ///
    /// # Errors
    /// [`Code::State`] and [`Code::Io`]: the saved state can't be read.
    pub fn find(sandbox_id: &str) -> Result<Option<Self>, Error> {
        Self::find_in(&Store::new(ROOT), sandbox_id)
    }

    fn find_in(store: &Store, sandbox_id: &str) -> Result<Option<Self>, Error> {
        // IDs of attachments are identifiers, and the ID becomes part of a path.
        if !is_identifier(sandbox_id) {
            return Ok(None);
        }
        let (shared, parts) = RecordPart::read_all(store, sandbox_id)?;
        let containers: BTreeSet<_> = parts.into_iter().flat_map(|part| part.policy.containers).collect();
        let policy = Policy { containers, ..Policy::default() };
        Ok((!policy.containers.is_empty()).then(|| Self { netns: shared.location(), policy }))
    }

    /// Makes the sets match the observed containers. Takes no lock: it never waits for a call of the plugin.
    ///
    /// # Errors
    /// [`Code::InvalidNetns`]: the network namespace is gone or can't be opened. It can't be entered, or the kernel
    /// refuses the change. [`Code::Drift`]: a set is missing that a bypass which has not ended needs.
    pub fn reconcile(&self, root: &HostRoot, observed: ObservedContainers<'_>) -> Result<ContainerChanges, Error> {
        let netns = match &self.netns {
            Some((path, id)) => netns_state::open_recorded(root, path, *id)?.ok_or_else(|| gone(root, path))?,
            None => return Err(gone(root, Path::new("(unknown)"))),
        };
        netns.enter_without_lock(|| {
            let required = self.policy.containers.iter().map(|one| one.scope).collect();
            let mut live = required_container_elements(&required)?;
            let plan = ElementPlan::new(&self.policy, &live, observed);
            if !(plan.remove.is_empty() && plan.add.is_empty()) {
                change_container_elements(&plan.remove, &plan.add)?;
            }
            let is_replaced = |element: &ContainerElement| plan.add.iter().any(|new| new.has_key_of(element));
            live.retain(|element| !plan.remove.contains(element) && !is_replaced(element));
            live.extend(plan.add);
            Ok(ContainerChanges { live, ..plan.changes })
        })
    }
}

#[cfg(test)]
impl ExcludedContainers {
    /// Returns the excluded containers of this policy, without a network namespace.
    pub(crate) const fn of(policy: Policy) -> Self {
        Self { netns: None, policy }
    }
}

/// Returns an error without the pod sandbox, which the callers name. The directory of a runtime with other settings may
/// not be mounted in an agent's container.
fn gone(root: &HostRoot, netns: &Path) -> Error {
    let directory = netns.parent().and_then(HostPath::new).filter(|_| root.mount() != Path::new("/"));
    let is_hidden = |path: &HostPath| !root.reach(path).is_ok_and(|path| path.is_dir());
    let why = directory.filter(is_hidden).map_or_else(
        || {
            "gone, or not visible in this mount namespace; mount it with the propagation HostToContainer, or delete the \
             pod if it still runs"
                .to_owned()
        },
        |directory| format!("{directory} is not mounted here; set the chart's value cniNetnsDir to this directory"),
    );
    Error::new(Code::InvalidNetns, format!("network namespace {}: {why}", netns.display()))
}

/// The changes of the sets in one transaction.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::plugin) struct ElementPlan {
    pub(in crate::plugin) remove: Vec<ContainerElement>,
    pub(in crate::plugin) add: Vec<ContainerElement>,
    changes: ContainerChanges,
}

impl ElementPlan {
    pub(in crate::plugin) fn new(policy: &Policy, live: &[ContainerElement], observed: ObservedContainers<'_>) -> Self {
        let wanted = |container: &RunningContainer| {
            let scope = policy.container_scope(&container.name)?;
            Some(ContainerElement::new(scope, container.cgroup, &container.name, &container.id))
        };
        let mut plan = Self::default();
        for container in observed.running {
            let Some(element) = wanted(container).filter(|element| !live.contains(element)) else { continue };
            let is_wider = |other: &&ContainerElement| other.scope > element.scope && other.cgroup == element.cgroup;
            if !live.iter().any(|other| is_wider(&other) && other.container == element.container) {
                plan.changes.added.push((container.name.clone(), element.scope));
            }
            plan.add.push(element);
        }
        for element in live {
            if plan.add.iter().any(|new| new.has_key_of(element)) {
                // The transaction replaces the element.
                continue;
            }
            let is_of =
                |id: &str| element.container.as_ref().is_some_and(|it| *it == ContainerLabel::new(&it.name, id));
            let running = observed.running.iter().find(|container| is_of(&container.id));
            let has_ended = running.is_none() && (observed.complete || observed.exited.iter().any(|id| is_of(id)));
            let scope = element.container.as_ref().and_then(|label| policy.container_scope(&label.name));
            let stays = match running {
                Some(container) => wanted(container).as_ref() == Some(element),
                None => !has_ended && scope.is_some_and(|scope| scope >= element.scope),
            };
            if stays {
                continue;
            }
            plan.remove.push(element.clone());
            if has_ended {
                plan.changes.removed += 1;
            } else if running.is_none() {
                plan.add.extend(scope.map(|scope| ContainerElement { scope, ..element.clone() }));
            }
        }
        plan
    }
}

#[cfg(test)]
mod tests;
