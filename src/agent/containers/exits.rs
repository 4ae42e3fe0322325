//! Finds the containers that have exited by the control groups of their elements: without NRI, the runtime does not
//! report exits.

use crate::cgroup::CgroupHierarchy;
use crate::firewall::ContainerElement;
use crate::host_path::HostRoot;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The limit of remembered paths.
const MAX_PATHS: usize = 4096;

/// The paths of control groups, by ID, as far as they were found. Clones share them.
#[derive(Clone, Default)]
pub(super) struct KnownGroups(Arc<Mutex<BTreeMap<u64, String>>>);

impl KnownGroups {
    /// Returns the IDs, as in the elements' comments, of the containers whose control groups have no process or no longer
    /// exist. Searches the hierarchy only for groups whose paths are unknown.
    pub(super) fn exited(&self, live: &[ContainerElement], root: &HostRoot) -> Vec<String> {
        let is_of_node = |hierarchy: &CgroupHierarchy| hierarchy.mount().starts_with(root.mount());
        // Another mount may not contain the groups of all pods.
        let Some(hierarchy) = CgroupHierarchy::find(root).ok().filter(is_of_node) else { return Vec::new() };
        // Nothing is known about an element without a container, which another process added.
        let live = || live.iter().filter(|element| element.container.is_some());
        let ids = live().map(|element| element.cgroup);
        let mut paths: BTreeMap<u64, String> = {
            let known = self.known();
            ids.clone().filter_map(|id| Some((id, known.get(&id)?.clone()))).collect()
        };
        paths.retain(|id, path| hierarchy.id(path).is_ok_and(|found| found == *id));
        let unknown: BTreeSet<u64> = ids.filter(|id| !paths.contains_key(id)).collect();
        let (found, is_complete) = hierarchy.find_paths(unknown);
        self.remember(&found);
        paths.extend(found);
        let has_exited = |element: &&ContainerElement| match paths.get(&element.cgroup) {
            Some(path) => hierarchy.is_populated(path) == Some(false),
            None => is_complete,
        };
        let exited = live().filter(has_exited);
        exited.filter_map(|element| Some(element.container.as_ref()?.id.clone())).collect()
    }

    fn remember(&self, found: &BTreeMap<u64, String>) {
        let mut known = self.known();
        if known.len() + found.len() > MAX_PATHS {
            known.clear();
        }
        known.extend(found.iter().map(|(id, path)| (*id, path.clone())));
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<u64, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
