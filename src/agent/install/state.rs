//! The states that an installation compares, as values: what a node should have ([`DesiredState`]), what it has
//! ([`FoundState`]), and what earlier installations did ([`InstallRecord`]).

use super::digest::Digest;
use crate::host_path::HostPath;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// What a node should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredState {
    /// The name of the installer: the agent's pod, or the command line.
    pub installer: String,
    /// The digest of the program.
    pub program: Digest,
    /// The paths that get a copy of the program.
    pub programs: Vec<HostPath>,
    /// Path and text of the kubeconfig; `None` if the plugin uses another one.
    pub kubeconfig: Option<(HostPath, String)>,
    /// Path and text of the node configuration; `None` if the plugin would not look there.
    pub node: Option<(HostPath, String)>,
    /// The configuration with which runtimes or Multus call the plugin.
    pub configuration: ConfigurationTarget,
}

/// The place of the plugin's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigurationTarget {
    /// A file of its own.
    Own {
        /// The file.
        path: HostPath,
        /// Its whole text.
        text: String,
    },
    /// An entry in the plugin list of the cluster network.
    Listed {
        /// The directory of the list.
        dir: HostPath,
        /// The name of the list's file; `None` for the one that runtimes would use.
        file: Option<String>,
        /// The plugin's entry; it has a `type`.
        entry: Value,
    },
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
    /// Temporary files of installations that were killed.
    pub leftovers: Vec<HostPath>,
    /// Warnings, one line each.
    pub notes: Vec<String>,
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfFile {
    /// Its name in the directory.
    pub name: String,
    /// Its contents.
    pub contents: Vec<u8>,
    /// Its permission bits.
    pub mode: u32,
}

/// The record of an installation: everything that an uninstallation removes or restores.
///
/// It is written before the first change, so that it covers the changes of an installation that was killed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InstallRecord {
    /// The last writer. If two agents run on a node, as during an upgrade, the earlier one yields to it.
    pub installer: String,
    /// Files that belong to the installation as a whole.
    pub files: BTreeMap<HostPath, Owned>,
    /// Plugin lists with an entry of the installation.
    pub lists: BTreeMap<HostPath, EditedList>,
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
}

/// The purpose of a file, in the order of removal: each file is removed before those that it refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The plugin's own configuration.
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

/// A plugin list with an entry of the installation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditedList {
    /// The `type` of the entry.
    pub kind: String,
    /// The digests of the entries that the installation may have left there, as in [`Owned::ours`].
    pub ours: Vec<Digest>,
    /// Path, text and permission bits of the single-plugin configuration from which the list was made.
    pub single: Option<(HostPath, String, u32)>,
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
