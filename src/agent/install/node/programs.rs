//! Programs on the node: which exist, who may change them, and which the runtime needs to delete running pods.

use super::NodeFiles;
use crate::agent::install::state::{DesiredState, FoundState, Role};
use crate::host_path::HostPath;
use crate::netns::find::containers_by_type;
use crate::trusted_file;
use std::collections::BTreeSet;

/// The programs of Multus: of its daemon's client, and without a daemon.
const MULTUS: [&str; 2] = ["multus-shim", "multus"];

impl NodeFiles {
    /// Whether one of `directories` has the program `name`; `None` if it is not found and one of the directories does
    /// not exist here, as in a pod that mounts only some of them. The first is the installation's own directory, which
    /// is created if it does not exist.
    #[must_use]
    pub fn has_program(&self, name: &str, directories: &[HostPath]) -> Option<bool> {
        let is_file = |directory: &HostPath| self.root.reach(&directory.join(name)).is_ok_and(|path| path.is_file());
        match directories.iter().any(is_file) {
            true => Some(true),
            false => directories.iter().skip(1).all(|directory| self.has(directory)).then_some(false),
        }
    }

    /// Returns a warning for each program directory from which the plugin refuses to execute plugins.
    pub(super) fn untrusted(&self, desired: &DesiredState) -> Vec<String> {
        let directories: BTreeSet<_> = desired.programs.iter().map(HostPath::parent).collect();
        let warning = |directory: &HostPath| {
            let why = self.untrusted_path(directory)?;
            let problem = format!("{directory}: plugins in this directory are not executed: {why}");
            Some(format!("{problem}; run on the node: chown -R root:root {directory}"))
        };
        directories.iter().filter_map(warning).collect()
    }

    /// Returns why another user than root can change an existing file or directory.
    pub(super) fn untrusted_path(&self, path: &HostPath) -> Option<String> {
        let error = trusted_file::check(&self.root.reach(path).ok()?).err()?;
        (!error.is_not_found()).then(|| error.below(self.root.mount()).to_string())
    }

    /// Finds the programs in the record that are not desired, and that the runtime needs to delete running pods: CRI-O
    /// deletes a pod with the configuration list with which it started, as Multus does with each attachment. containerd
    /// uses its current configuration list.
    pub(super) fn find_needed_programs(&self, desired: Option<&DesiredState>, found: &mut FoundState) {
        let is_desired = |path| desired.is_some_and(|desired| desired.programs.contains(path));
        let programs =
            found.record.files.iter().filter(|(path, owned)| owned.role == Role::Program && !is_desired(path));
        let programs: Vec<_> = programs.map(|(path, _)| path.clone()).collect();
        if programs.is_empty() {
            return;
        }
        let types = programs.iter().map(HostPath::name).map(|name| name.to_string()).collect();
        let (containers, problems) = containers_by_type(&self.root, &types);
        let pods = |path: HostPath| containers.get(&*path.name()).map(BTreeSet::len).map(|pods| (path, pods));
        found.needed_programs = programs.into_iter().filter_map(pods).collect();
        found.unread_results = problems.iter().map(ToString::to_string).collect();
    }

    /// Returns the program of Multus, if it is beside the desired programs.
    pub(super) fn multus(&self, desired: &DesiredState) -> Option<HostPath> {
        let beside = |program: &HostPath| MULTUS.map(|name| program.sibling(name));
        desired.programs.iter().flat_map(beside).find(|program| self.has(program))
    }
}
