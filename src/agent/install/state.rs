//! The states that an installation compares, as values: what a node should have ([`DesiredState`]), what it has
//! ([`FoundState`]), and what earlier installations did ([`InstallRecord`]).

use super::digest::Digest;
pub use crate::cni::OWN_LIST;
use crate::host_path::HostPath;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

pub(super) const PROGRAM_MODE: u32 = 0o755;
/// Configurations and kubeconfigs can hold secrets or name them (CIS Kubernetes Benchmark, 1.1.9).
pub(super) const PRIVATE_MODE: u32 = 0o600;

/// The name to which Cilium with `cni.exclusive=true` renames the own list.
pub(super) const RENAMED_OWN_LIST: &str = "00-detour.conflist.cilium_bak";

/// What a node should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredState {
    /// The name of the installer: the agent's pod, or the command line.
    pub installer: String,
    /// The DaemonSet of the agent, as NAMESPACE/NAME; `None` for an installation from the command line.
    pub owner: Option<String>,
    /// The digest of the program.
    pub program: Digest,
    /// The paths that get a copy of the program.
    pub programs: Vec<HostPath>,
    /// Path and text of the kubeconfig, or why it has no text now: then the file on the node stays as it is. `None` if the
    /// plugin uses another kubeconfig.
    pub kubeconfig: Option<(HostPath, Result<String, String>)>,
    /// Path and text of the node configuration.
    pub node: Option<(HostPath, String)>,
    /// The configurations with which runtimes or Multus call the plugin; at most one of them is an entry in a list.
    pub configurations: Vec<ConfigurationTarget>,
    /// The directory of Multus's auxiliary chain, with one of the configurations; `None` if it is unused.
    pub multus_chain: Option<HostPath>,
    /// Why the token in the kubeconfig can't be used, although it is written.
    pub expired: Option<String>,
}

impl DesiredState {
    /// Returns what the plugin lacks and an installation can't provide now. Everything else is installed, and the node is not
    /// ready without it.
    pub(super) fn lacks(&self) -> Option<String> {
        let unwritten = |(path, text): &(HostPath, Result<String, String>)| {
            let why = text.as_ref().err()?;
            Some(format!("credentials of the plugin ({path}), without which pods with a sidecar wait: {why}"))
        };
        self.kubeconfig.as_ref().and_then(unwritten).or_else(|| self.expired.clone())
    }
}

/// The place of one of the plugin's configurations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigurationTarget {
    /// A file of its own.
    Own {
        /// The file.
        path: HostPath,
        /// Its whole text.
        text: String,
    },
    /// An entry in the configuration list of the cluster network, or in a copy of it.
    Listed {
        /// The directory of the list.
        dir: HostPath,
        /// The name of the list's file; `None` for the one that runtimes would use.
        file: Option<String>,
        /// The plugin's entry; it has a `type`.
        entry: Value,
        /// Whether the entry is in a copy of the list, which runtimes use instead: the own list ([`OWN_LIST`]).
        own_list: bool,
    },
}

impl ConfigurationTarget {
    /// Returns the configuration's own file; `None` for an entry in a list.
    pub(super) fn file(&self) -> Option<&HostPath> {
        match self {
            Self::Own { path, .. } => Some(path),
            Self::Listed { .. } => None,
        }
    }

    /// Returns the directory of its file or list.
    #[must_use]
    pub fn directory(&self) -> HostPath {
        match self {
            Self::Own { path, .. } => path.parent(),
            Self::Listed { dir, .. } => dir.clone(),
        }
    }
}

/// What a node has, limited to what an installation can change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundState {
    /// The record of earlier installations; empty if there was none.
    pub record: InstallRecord,
    /// The existing files among those that are desired or in the record.
    pub files: BTreeMap<HostPath, FoundFile>,
    /// The configuration files in the directory of the cluster network's list.
    pub configurations: Vec<ConfFile>,
    /// Whether the source of the own list has been unusable for so long that another one may replace it.
    pub source_expired: bool,
    /// The program of Multus, if it is beside the desired programs.
    pub multus: Option<HostPath>,
    /// Why Multus skips the whole auxiliary chain: each invalid file of another tool, with the reason.
    pub invalid_chain_files: Vec<String>,
    /// Temporary files of installations that were killed, and own lists that Cilium renamed.
    pub leftovers: Vec<HostPath>,
    /// The programs that the runtime needs to delete running pods, with the number of these pods: their saved
    /// configuration lists name the program.
    pub needed_programs: BTreeMap<HostPath, usize>,
    /// Why `needed_programs` may be incomplete, one line each.
    pub unread_results: Vec<String>,
    /// Warnings, one line each.
    pub notes: Vec<String>,
}

impl FoundState {
    /// Whether an installation wrote the current contents of the file, or may have written them before it was killed.
    pub(super) fn is_ours(&self, path: &HostPath) -> bool {
        let recorded = self.record.files.get(path).zip(self.files.get(path));
        recorded.is_some_and(|(owned, file)| owned.ours.contains(&file.digest))
    }
}

/// An existing file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFile {
    /// The digest of its contents.
    pub digest: Digest,
    /// Its contents; `None` if they are not UTF-8 or too large for a configuration.
    pub text: Option<String>,
    /// Its permission bits.
    pub mode: u32,
    /// Whether root owns it; the plugin ignores its own files otherwise.
    pub trusted: bool,
}

/// A configuration file in the directory that runtimes read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConfFile {
    /// Its name in the directory.
    pub name: String,
    /// Its contents.
    pub contents: Vec<u8>,
    /// Its permission bits.
    pub mode: u32,
    /// Why another user than root can change it; `None` if only root can.
    pub untrusted: Option<String>,
    /// Whether its plugins are in files of the directory NAME beside it (libcni 1.3): the list itself has none.
    pub has_directory: bool,
}

/// The record of an installation: everything that an uninstallation removes or restores.
///
/// It is written before the first change, so that it covers the changes of an installation that was killed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InstallRecord {
    /// The last writer. If two agents of a DaemonSet run on a node, as during an upgrade, the earlier one yields to it.
    pub installer: String,
    /// The DaemonSet that owns the installation, as NAMESPACE/NAME: no other one may change it. `None` for an
    /// installation from the command line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Files that belong to the installation as a whole.
    pub files: BTreeMap<HostPath, Owned>,
    /// Configuration lists with an entry of the installation.
    pub lists: BTreeMap<HostPath, EditedList>,
    /// The directory of Multus's auxiliary chain, if one of the files is there: Multus runs the plugin for every pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multus_chain: Option<HostPath>,
}

impl InstallRecord {
    /// Returns the record without its files and lists.
    pub(super) fn without_files(&self) -> Self {
        Self { installer: self.installer.clone(), owner: self.owner.clone(), ..Self::default() }
    }

    /// Whether nothing is installed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.lists.is_empty()
    }
}

/// A file that belongs to the installation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// The purpose of the file.
    pub role: Role,
    /// The digests of the contents that the installation may have left there: the previous one and the last one. A
    /// file with other contents was edited by another process.
    pub ours: Vec<Digest>,
    /// What was at this path before the first installation.
    pub before: PreviousContent,
    /// The list of which this file is a copy with the plugin's entry: this file is the own list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_of: Option<CopiedList>,
}

/// The cluster network's list of which the own list is a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedList {
    /// The name of its file, in the directory of the own list.
    pub source: String,
    /// The `type` of the plugin's entry in the own list.
    pub kind: String,
}

impl Owned {
    /// Returns the path of the program that was moved aside.
    pub(super) fn aside(&self) -> Option<&HostPath> {
        match &self.before {
            PreviousContent::Aside(aside) => Some(aside),
            PreviousContent::Nothing | PreviousContent::Text(..) => None,
        }
    }
}

/// The purpose of a file, in the order of removal: each file is removed before those that it refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The plugin's own configuration; in records of earlier versions also that of an OCI hook, which names a program.
    #[serde(alias = "hook")]
    Configuration,
    /// The node configuration, which applies to attachments with other configurations too.
    Node,
    /// The kubeconfig that the configurations name.
    Kubeconfig,
    /// The program that the configurations name.
    Program,
}

/// What an uninstallation restores at the path of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PreviousContent {
    /// Nothing.
    Nothing,
    /// This text, with these permission bits.
    Text(String, u32),
    /// The program that was moved to this path.
    Aside(HostPath),
}

/// A configuration list with an entry of the installation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditedList {
    /// The `type` of the entry.
    pub kind: String,
    /// The digests of the entries that the installation may have left there, as in [`Owned::ours`].
    pub ours: Vec<Digest>,
    /// The configuration before the installation added the entry; `None` if another process changed the list since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original: Option<OriginalList>,
}

/// The configuration from which an installation made the list with the plugin's entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OriginalList {
    /// Its path. A single-plugin configuration becomes a list of another name.
    pub path: HostPath,
    /// Its text.
    pub text: String,
    /// Its permission bits.
    pub mode: u32,
    /// The digests of the lists that the installation may have written in its place. It is restored if the list is one
    /// of them.
    pub edited: Vec<Digest>,
}

/// The contents that an installation may have left: one that was killed left the previous or the new one.
const MAX_DIGESTS: usize = 2;

/// Appends `newest` to the digests in `earlier`, without a duplicate, and keeps the last [`MAX_DIGESTS`].
pub(super) fn with_newest(earlier: &[Digest], newest: Digest) -> Vec<Digest> {
    let mut digests: Vec<_> = earlier.iter().filter(|digest| **digest != newest).cloned().collect();
    digests.push(newest);
    digests.drain(..digests.len().saturating_sub(MAX_DIGESTS));
    digests
}
