//! What an installation compares and does, as values: what a node should have ([`DesiredState`]), what it has
//! ([`FoundState`]), and the difference ([`InstallPlan`]), whose operations have diffs. A plan never replaces a file of
//! another owner.

use super::conflist::{ConfList, UnusableList};
use super::record::{Digest, FileRecord, InstallRecord, Role, with_newest};
use super::settings::token_in;
pub use crate::cni::OWN_LIST;
use crate::cni::PROGRAM;
use crate::host_path::HostPath;
use serde_json::Value;
use similar::TextDiff;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

/// What a node should have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DesiredState {
    /// The DaemonSet of the agent, as NAMESPACE/NAME; `None` for an installation from the command line.
    pub owner: Option<String>,
    /// The name of the platform.
    pub platform: Option<String>,
    /// The files that are written as a whole, each behind those that it refers to.
    pub files: Vec<DesiredFile>,
    /// The entry in the configuration list of the cluster network.
    pub entry: Option<ListEntry>,
    /// The directory of Multus's auxiliary chain, with one of the files; `None` if it is unused.
    pub multus_chain: Option<HostPath>,
    /// Why the token in the kubeconfig can't be used, although it is written.
    pub expired: Option<String>,
    /// Why a newer configuration than that of this state is not in use.
    pub rejected: Option<String>,
}

/// A file of the installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredFile {
    /// The file.
    pub path: HostPath,
    /// Its purpose.
    pub role: Role,
    /// What it contains.
    pub content: Content,
}

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// That of this file of the running process, and its digest.
    Program(PathBuf, Digest),
    /// This text.
    Text(String),
    /// The credentials of the plugin, which are unknown now for this reason: the file on the node stays as it is.
    Unknown(String),
}

/// The plugin's entry in the configuration list of the cluster network, or in a copy of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListEntry {
    /// The directory of the list.
    pub dir: HostPath,
    /// The name of the list's file; `None` for the one that runtimes would use.
    pub file: Option<String>,
    /// The entry; it has a `type`.
    pub value: Value,
    /// Whether the entry is in a copy of the list, which runtimes use instead: the own list ([`OWN_LIST`]).
    pub own_list: bool,
}

impl DesiredState {
    /// Returns the paths that the installation writes as a whole.
    pub(super) fn paths(&self) -> impl Iterator<Item = &HostPath> {
        self.files.iter().map(|file| &file.path)
    }

    /// Returns the directories of its files and of the cluster network's list.
    pub(super) fn directories(&self) -> BTreeSet<HostPath> {
        self.paths().map(HostPath::parent).chain(self.entry.iter().map(|entry| entry.dir.clone())).collect()
    }

    /// Returns the paths of the program.
    pub(super) fn programs(&self) -> impl Iterator<Item = &HostPath> {
        self.files.iter().filter(|file| file.role == Role::Program).map(|file| &file.path)
    }
}

/// What a node has, limited to what an installation can change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundState {
    /// The record of earlier installations; empty if there was none.
    pub record: InstallRecord,
    /// The existing files among those that are desired, in the record, or configurations of the cluster network.
    pub files: BTreeMap<HostPath, FoundFile>,
    /// The configurations in the directory of the cluster network's list, by name.
    pub configurations: BTreeMap<String, ConfFile>,
    /// The names in directories of programs: those of the installation and of all platforms.
    pub programs: BTreeMap<HostPath, BTreeSet<String>>,
    /// Why Multus skips the whole auxiliary chain: each invalid file of another tool, with the reason.
    pub invalid_chain_files: Vec<String>,
    /// The files in the record that can't be changed here, each with the reason: they stay in the record.
    pub unreachable: BTreeMap<HostPath, String>,
    /// The programs that the runtime needs, or may need, to delete running pods, each with the reason: their saved
    /// configuration lists name the program.
    pub needed_programs: BTreeMap<HostPath, String>,
    /// The pods that keep a guard after an uninstallation, as NAMESPACE/NAME.
    pub guarded_pods: BTreeSet<String>,
    /// Warnings, one line each.
    pub notes: Vec<String>,
}

impl FoundState {
    /// Returns the digest of the file if an installation wrote it, or may have written it before it was killed.
    pub(super) fn own_digest(&self, path: &HostPath) -> Option<Digest> {
        let (FileRecord { sha256, .. }, file) = self.record.files.get(path).zip(self.files.get(path))?;
        sha256.contains(&file.digest).then(|| file.digest.clone())
    }

    /// Returns the text of a file, or an empty text if the file is missing.
    pub(super) fn text(&self, path: &HostPath) -> &str {
        self.files.get(path).and_then(|file| file.text.as_deref()).unwrap_or_default()
    }

    /// Returns the change of a file, with its current text.
    pub(super) fn action(&self, path: &HostPath, role: Role, change: Change) -> FileAction {
        let before = self.files.get(path).and_then(|file| file.text.clone());
        FileAction { path: path.clone(), role, change, before }
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

impl FoundFile {
    /// Returns the digests of what an installation has there: of the whole file, or of its entries in another owner's
    /// list.
    pub(super) fn digests(&self, record: &FileRecord) -> Result<Vec<Digest>, UnusableList> {
        match (record.role, &record.plugin) {
            (Role::Entry, Some(kind)) => Ok(ConfList::parse(self.text.as_deref().unwrap_or_default())?.digests(kind)),
            _ => Ok(vec![self.digest.clone()]),
        }
    }
}

/// A configuration in the directory that runtimes read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfFile {
    /// The list in it, or the one that is made of its single plugin.
    pub list: Result<ConfList, UnusableList>,
    /// Why another user than root can change the file; `None` if only root can.
    pub untrusted: Option<String>,
}

/// One change of the node's file system. It takes effect as a whole or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileAction {
    /// The file.
    pub path: HostPath,
    /// Its purpose. Another owner's list keeps its owner and is written where a symbolic link at `path` leads.
    pub role: Role,
    /// What changes.
    pub change: Change,
    /// Its current text.
    pub before: Option<String>,
}

/// What changes in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It becomes a copy of this file of the running process.
    Program(PathBuf),
    /// It gets this text and these permission bits.
    Text(String, u32),
    /// It is removed.
    Remove,
}

impl FileAction {
    /// Returns the change as a unified diff, or as a comment if the file is binary or secret.
    #[must_use]
    pub fn diff(&self) -> String {
        let (before, after) = match &self.change {
            Change::Text(text, _) => (self.before.as_deref(), Some(text.as_str())),
            _ => (self.before.as_deref(), None),
        };
        let name = |prefix: &str, text: Option<&str>| {
            text.map_or("/dev/null".to_owned(), |_| format!("{prefix}{}", self.path))
        };
        let diff = TextDiff::from_lines(before.unwrap_or_default(), after.unwrap_or_default());
        let diff = diff.unified_diff().header(&name("a", before), &name("b", after)).to_string();
        match self.role {
            Role::Program | Role::Kubeconfig => format!("# {self}\n"),
            _ if diff.is_empty() => format!("# {self}\n"),
            _ => diff,
        }
    }
}

impl fmt::Display for FileAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, role, change, .. } = self;
        match change {
            Change::Program(_) => write!(f, "copy this program to {path}"),
            Change::Text(_, mode) => {
                let hidden = if *role == Role::Kubeconfig { ", contents not shown" } else { "" };
                write!(f, "write {path} (mode {mode:04o}{hidden})")
            }
            Change::Remove => write!(f, "remove {path}"),
        }
    }
}

/// The kind of an obstacle, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// A file of another owner, another directory of programs, or an error. The plan adds no file, and only restores those
    /// in the record.
    Failed,
    /// The installation on the node belongs to another DaemonSet.
    Occupied,
    /// Something is missing that another tool must provide.
    Waits,
    /// Multus skips its auxiliary chain because of another tool's file.
    ChainSkipped,
}

/// The changes of a node, in order, and the installation record that covers them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InstallPlan {
    /// The changes. The node works after each of them: a configuration never names a program or kubeconfig that is
    /// missing.
    pub actions: Vec<FileAction>,
    /// The record to write before the first change.
    pub record: InstallRecord,
    /// Warnings: what was found and left unchanged, and why; one line each.
    pub notes: Vec<String>,
    /// Whether something stays that an uninstallation should remove, and the user must act. A program that running pods
    /// need does not count.
    pub incomplete: bool,
    /// Why the plugin is not installed, or not called.
    pub obstacle: Option<(Obstacle, String)>,
    /// The invalid files of other tools because of which Multus skips its whole auxiliary chain, each with the reason.
    pub invalid_chain_files: Vec<String>,
    /// What the plugin lacks when the plan is applied, and an installation can't provide now: its credentials.
    pub lacks: Option<String>,
    /// Whether the only change is that the own list follows its source: it was as the installation wrote it.
    pub follows: bool,
    /// Why the newest configuration is not in use.
    pub rejected: Option<String>,
}

impl InstallPlan {
    /// Returns a plan without changes, because of this obstacle.
    #[must_use]
    pub fn impossible(obstacle: Obstacle, why: String) -> Self {
        Self { obstacle: Some((obstacle, why)), ..Self::default() }
    }

    /// Adds an obstacle. The worst one counts, and the first one of its kind.
    pub(super) fn add(&mut self, obstacle: Obstacle, why: String) {
        if self.obstacle.as_ref().is_none_or(|(known, _)| obstacle < *known) {
            self.obstacle = Some((obstacle, why));
        }
    }

    /// Returns the obstacle that remains after the plan, and that another tool or the user must remove.
    #[must_use]
    pub fn unmet(&self) -> Option<&str> {
        self.obstacle.as_ref().map(|(_, why)| why.as_str())
    }

    /// Writes a file, unless it is as desired. A file of another owner refuses the plan.
    pub(super) fn write(&mut self, desired: &DesiredFile, found: &FoundState) {
        let DesiredFile { path, role, content } = desired;
        let (digest, change) = match content {
            Content::Program(file, digest) => (digest.clone(), Change::Program(file.clone())),
            Content::Text(text) => (Digest::of(text.as_bytes()), Change::Text(text.clone(), role.mode())),
            Content::Unknown(why) => {
                self.lacks =
                    Some(format!("credentials of the plugin ({path}), without which pods with a sidecar wait: {why}"));
                let recorded = found.record.files.get(path);
                self.record.files.extend(recorded.map(|file| (path.clone(), file.clone())));
                return;
            }
        };
        let file = found.files.get(path);
        if let Some(file) = file.filter(|file| file.digest != digest && is_foreign(path, *role, file, found)) {
            return self.refuse(path, *role, file);
        }
        if file.is_none_or(|file| file.digest != digest || file.mode != role.mode() || !file.trusted) {
            self.actions.push(found.action(path, *role, change));
        }
        let sha256 = with_newest(found.own_digest(path), digest);
        self.record.files.insert(path.clone(), FileRecord { role: *role, sha256, plugin: None, source: None });
    }

    /// Refuses the plan because of a file of another owner. The message names the owner as far as known, and two ways out.
    pub(super) fn refuse(&mut self, path: &HostPath, role: Role, file: &FoundFile) {
        let name = path.name();
        let plugin = file.text.as_deref().and_then(plugin_of);
        let is_istio = name == "istio-cni" || plugin.as_deref() == Some("istio-cni");
        let owner = match (&plugin, role) {
            _ if is_istio => {
                "probably of Istio's CNI plugin (its chart, or an IstioCNI of an operator; docs/migrate.md and \
                              docs/openshift.md describe both)"
                    .to_owned()
            }
            (Some(plugin), _) => format!("a configuration of the plugin {plugin:?}"),
            (None, Role::Program) => "another program".to_owned(),
            (None, _) => "unknown".to_owned(),
        };
        let other = match role {
            Role::Program => "install without this name (--name, or type in the configuration)",
            Role::Configuration => "select another file (--conf-name, cniConfFileName; attachments: another name)",
            Role::OwnList => "install with --own-list=false (cni.ownList=false)",
            Role::Entry => "use an attachment (--chained=false)",
            _ => "move its settings to the file of --config",
        };
        let why = format!(
            "can't write {path}: it belongs to another owner: {owner}; uninstall that tool or remove the file, or {other}"
        );
        self.add(Obstacle::Failed, why);
    }
}

/// Whether another owner wrote the file. A file in the record that was edited is still the installation's, unless it has
/// become another configuration, or another program that is not named `detour`.
pub(super) fn is_foreign(path: &HostPath, role: Role, file: &FoundFile, found: &FoundState) -> bool {
    let text = file.text.as_deref().unwrap_or_default();
    let is_recorded = found.record.files.contains_key(path);
    let is_changed = found.own_digest(path).is_none();
    match role {
        Role::Program => is_changed && *path.name() != *PROGRAM,
        Role::OwnList => !is_recorded && !ConfList::parse(text).is_ok_and(|list| list.is_own()),
        Role::Kubeconfig => !is_recorded && token_in(text).is_none(),
        Role::Configuration if is_recorded => is_changed && plugin_of(text).is_some() && !has_own_key(text),
        Role::Configuration | Role::Node | Role::Entry => !is_recorded,
    }
}

/// Whether a configuration has a key that each one of an installation has, and none of another tool.
fn has_own_key(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|conf| conf["kubernetes"]["cni_bin_dir"].is_string())
}

fn plugin_of(text: &str) -> Option<String> {
    let conf: Value = serde_json::from_str(text).ok()?;
    let plugin = conf["type"].as_str().or_else(|| conf["plugins"].as_array()?.last()?["type"].as_str());
    plugin.map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_or_removed_file_is_compared_with_dev_null() {
        let diff = |before: Option<&str>, change| {
            let (path, before) = ("/x".parse().expect("a path"), before.map(str::to_owned));
            FileAction { path, role: Role::Node, change, before }.diff()
        };
        let text = |text: &str| Change::Text(text.to_owned(), 0o600);
        assert_eq!(diff(None, text("a\nb\n")), "--- /dev/null\n+++ b/x\n@@ -0,0 +1,2 @@\n+a\n+b\n");
        let removed = "--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n\\ No newline at end of file\n";
        assert_eq!(diff(Some("a"), Change::Remove), removed);
        assert_eq!(diff(Some("a"), text("a")), "# write /x (mode 0600)\n");
    }
}
