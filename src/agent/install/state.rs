//! The states that an installation compares, as values: what a node should have ([`DesiredState`]) and what it has
//! ([`FoundState`]), with the record of earlier installations.

use super::record::{Digest, FileRecord, InstallRecord};
pub use crate::cni::OWN_LIST;
use crate::host_path::HostPath;
use serde_json::Value;
use std::collections::BTreeMap;

pub(super) const PROGRAM_MODE: u32 = 0o755;
/// Configurations and kubeconfigs can hold secrets or name them (CIS Kubernetes Benchmark, 1.1.9).
pub(super) const PRIVATE_MODE: u32 = 0o600;

/// What a node should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredState {
    /// The name of the installer: the agent's pod, or the command line.
    pub installer: String,
    /// The DaemonSet of the agent, as NAMESPACE/NAME; `None` for an installation from the command line.
    pub owner: Option<String>,
    /// The name of the platform.
    pub platform: Option<String>,
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
    /// Returns the paths that the installation writes as a whole.
    pub(super) fn paths(&self) -> impl Iterator<Item = &HostPath> {
        let configurations = self.configurations.iter().filter_map(ConfigurationTarget::file);
        let node = self.node.iter().map(|(path, _)| path);
        self.programs.iter().chain(self.kubeconfig.iter().map(|(path, _)| path)).chain(node).chain(configurations)
    }

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
    /// Whether no file in that directory was added, removed or written in the last seconds.
    pub is_settled: bool,
    /// The program of Multus, if it is beside the desired programs.
    pub multus: Option<HostPath>,
    /// Why Multus skips the whole auxiliary chain: each invalid file of another tool, with the reason.
    pub invalid_chain_files: Vec<String>,
    /// The files in the record that can't be changed here, each with the reason: they stay in the record.
    pub unreachable: BTreeMap<HostPath, String>,
    /// The configurations that other configurations name, each with the file that names it.
    pub named: BTreeMap<HostPath, HostPath>,
    /// Temporary files of installations that were killed.
    pub leftovers: Vec<HostPath>,
    /// The programs that the runtime needs to delete running pods, with the number of these pods: their saved
    /// configuration lists name the program.
    pub needed_programs: BTreeMap<HostPath, usize>,
    /// The pods that keep a guard after an uninstallation, as NAMESPACE/NAME.
    pub guarded_pods: Vec<String>,
    /// Why `needed_programs` may be incomplete, one line each.
    pub unread_results: Vec<String>,
    /// Warnings, one line each.
    pub notes: Vec<String>,
}

impl FoundState {
    /// Returns the digest of the file if an installation wrote it, or may have written it before it was killed.
    pub(super) fn own_digest(&self, path: &HostPath) -> Option<Digest> {
        let (FileRecord { sha256, .. }, file) = self.record.files.get(path).zip(self.files.get(path))?;
        sha256.contains(&file.digest).then(|| file.digest.clone())
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
    /// Its plugins, if none of them is in the directory of the desired programs.
    pub missing_programs: Option<MissingPrograms>,
}

/// Plugins of a list that are not in the directory of the desired programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingPrograms {
    /// Their types.
    pub types: String,
    /// The directory.
    pub own: HostPath,
    /// The directory that has one of them, if it is visible here.
    pub elsewhere: Option<HostPath>,
}
