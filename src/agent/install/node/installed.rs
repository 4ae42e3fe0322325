//! The plugin's configurations as they are installed on a node, for repairs.

use super::NodeFiles;
use crate::agent::install::error::InstallError;
use crate::agent::install::state::Role;
use crate::cni::{NetConf, configuration};
use crate::host_path::HostPath;
use crate::sub_plugins::SubPlugin;
use std::path::PathBuf;

/// The plugin's configuration as it is installed on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// The configuration without the parts that only the runtime's calls use: executables in the sub-plugin chain,
    /// which may not tolerate a second ADD, and the networks of a primary plugin.
    pub conf: NetConf,
    /// Whether the plugin is called for every pod, not only for pods that select its network.
    pub for_every_pod: bool,
}

impl NodeFiles {
    /// Returns the release's installed configurations, that of the cluster network first; none if the plugin is not
    /// installed.
    ///
    /// # Errors
    /// The installation record or a configuration can't be read or parsed.
    pub fn installed(&self) -> Result<Vec<Installed>, String> {
        let record = self.record(&self.release).map_err(|error| error.to_string())?;
        let own = record.files.iter().filter(|(_, owned)| owned.role == Role::Configuration).map(|(path, _)| path);
        let all = record.lists.keys().map(|path| (path, true)).chain(own.map(|path| (path, false)));
        all.filter_map(|(path, is_list)| self.installed_at(path, is_list).transpose()).collect()
    }

    fn installed_at(&self, path: &HostPath, is_list: bool) -> Result<Option<Installed>, String> {
        let file = self.file(path).map_err(|error| InstallError::file("read", path, &error).to_string())?;
        let Some(text) = file.and_then(|file| file.text) else { return Ok(None) };
        let mut conf = configuration(path.as_path(), text.as_bytes()).map_err(|error| error.to_string())?;
        let for_every_pod = is_list || conf.primary.is_some();
        conf.primary = None;
        conf.chain.retain(|block| SubPlugin::of(block).is_some());
        let source = &mut conf.kubernetes;
        let paths = [&mut source.agent_socket, &mut source.kubeconfig, &mut source.manifests_dir];
        for path in paths.into_iter().flatten() {
            *path = self.reach_path(path.clone()).map_err(|error| error.to_string())?;
        }
        conf.group_file = self.group_file(conf.group_file);
        Ok(Some(Installed { conf, for_every_pod }))
    }

    /// Returns the path of the node's group file. If it is not mounted, the root directory of the node's first process
    /// has it (proc_pid_root(5)).
    fn group_file(&self, path: PathBuf) -> PathBuf {
        let of_first_process = self.root().join("proc/1/root").join(path.strip_prefix("/").unwrap_or(&path));
        self.reach_path(path).ok().filter(|path| path.exists()).unwrap_or(of_first_process)
    }

    fn reach_path(&self, path: PathBuf) -> Result<PathBuf, InstallError> {
        HostPath::new(&path).map_or(Ok(path), |path| self.reach(&path))
    }
}
