//! What was put on the node, so that it, and nothing else, can be taken away again.
//!
//! The plugin's configuration as it is on the node, for calls that the agent makes itself.

use super::digest::Digest;
use super::{HostPath, NodeFiles};
use crate::cni::{NetConf, configuration};
use crate::sub_plugins::SubPlugin;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The log of an installation. Written before the first change, so that whatever a killed
/// installation did is in it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InstallLog {
    /// Who wrote it last: of two agents on a node, as there are in an upgrade, the earlier yields.
    pub installer: String,
    /// Files that are ours as a whole.
    pub files: BTreeMap<HostPath, Owned>,
    /// Lists that have our plugin in them.
    pub lists: BTreeMap<HostPath, EditedList>,
}

/// A file that is ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// What it is for.
    pub role: Role,
    /// What may be found there, if nobody else wrote: the last content and the one before.
    pub ours: Vec<Digest>,
    /// What was there before we came.
    pub before: PreviousContent,
}

/// What a file is for; in the order in which files go when all is taken away: first what makes the
/// others needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A configuration of our own.
    Configuration,
    /// The node configuration, which applies to the attachments of others too.
    Node,
    /// The kubeconfig that it names.
    Kubeconfig,
    /// The program that it names.
    Program,
}

/// What stood in a file's place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreviousContent {
    /// Nothing.
    Nothing,
    /// This text, with these permission bits.
    Text(String, u32),
    /// A program that was set aside.
    Aside(HostPath),
}

/// A list with our plugin in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditedList {
    /// The plugin's type.
    pub kind: String,
    /// What may be found as our entry, as for [`Owned::ours`].
    pub ours: Vec<Digest>,
    /// The single plugin's configuration that the list was made of: its path, text and permission
    /// bits.
    pub single: Option<(HostPath, String, u32)>,
}

/// How many contents of one's own are known: an installation that was killed left the old or the new.
const KNOWN: usize = 2;

/// `earlier` and, as the last, `newest`.
pub(super) fn known(earlier: &[Digest], newest: Digest) -> Vec<Digest> {
    let mut ours: Vec<_> = earlier.iter().filter(|digest| **digest != newest).cloned().collect();
    ours.push(newest);
    ours.drain(..ours.len().saturating_sub(KNOWN));
    ours
}

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
