//! What was put on the node, so that it, and nothing else, can be taken away again.

use super::HostPath;
use super::digest::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
