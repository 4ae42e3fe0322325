//! The plugin's configuration as it is on the node, for calls that the agent makes itself.

use super::{HostPath, NodeFiles, Role};
use crate::sub_plugins::SubPlugin;
use crate::cni::{NetConf, configuration};
use std::path::PathBuf;

/// What runtimes, or Multus, would call the plugin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// The configuration, less what is for runtimes only: executables in the chain (they are the
    /// node's programs, and may not bear a second ADD) and networks of a primary plugin.
    pub conf: NetConf,
    /// Whether the plugin is called for every pod, and not only for those that select its network.
    pub for_every_pod: bool,
}

impl NodeFiles {
    /// What is installed now; `None` where nothing is.
    ///
    /// # Errors
    /// The log of the installation, or the configuration, can't be read or understood.
    pub fn installed(&self) -> Result<Option<Installed>, String> {
        let record = self.record().map_err(|error| error.to_string())?;
        let own = record.files.iter().find(|(_, owned)| owned.role == Role::Configuration);
        let listed = record.lists.keys().next();
        let Some(path) = listed.or(own.map(|(path, _)| path)) else { return Ok(None) };
        let Some(text) = self.text(path).map_err(|error| error.to_string())? else { return Ok(None) };
        let mut conf = configuration(path.as_path(), text.as_bytes()).map_err(|error| error.to_string())?;
        let for_every_pod = listed.is_some() || conf.primary.is_some();
        conf.primary = None;
        conf.chain.retain(|block| SubPlugin::of(block).is_some());
        let source = &mut conf.kubernetes;
        let paths = [&mut source.agent_socket, &mut source.kubeconfig, &mut source.manifests_dir];
        for path in paths.into_iter().flatten() {
            *path = self.here(path.clone()).map_err(|error| error.to_string())?;
        }
        conf.group_file = self.group_file(conf.group_file);
        Ok(Some(Installed { conf, for_every_pod }))
    }

    /// The node's, which may be in reach by its first process alone (proc_pid_root(5)).
    fn group_file(&self, path: PathBuf) -> PathBuf {
        let of_first = self.root().join("proc/1/root").join(path.strip_prefix("/").unwrap_or(&path));
        self.here(path).ok().filter(|path| path.exists()).unwrap_or(of_first)
    }

    fn here(&self, path: PathBuf) -> Result<PathBuf, super::InstallError> {
        HostPath::new(&path).map_or(Ok(path), |path| self.reach(&path))
    }
}
