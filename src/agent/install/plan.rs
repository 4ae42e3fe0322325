//! What an installation compares and does, as values: what a node should have ([`DesiredState`]), what it has
//! ([`FoundState`]), and the difference ([`InstallPlan`]), whose operations have diffs. A plan never replaces a file of
//! another owner.

use super::conflist;
use super::record::{Digest, FileRecord, InstallRecord, Role, with_newest};
use super::settings::token_in;
pub use crate::cni::OWN_LIST;
use crate::cni::PROGRAM;
use crate::host_path::HostPath;
use serde_json::Value;
use similar::TextDiff;
use std::collections::BTreeMap;
use std::fmt;

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

/// One change of the node's file system. It takes effect as a whole or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileAction {
    /// Copies the running program.
    CopyProgram {
        /// The destination.
        path: HostPath,
    },
    /// Writes a text file.
    Write {
        /// The file.
        path: HostPath,
        /// Its new text.
        text: String,
        /// Its new permission bits.
        mode: u32,
        /// Its current text.
        before: Option<String>,
        /// Whether a symbolic link at `path` is followed; otherwise it is replaced.
        follow: bool,
        /// Whether the text is hidden in output.
        secret: bool,
    },
    /// Removes a file.
    Remove {
        /// The file.
        path: HostPath,
        /// Its current text; `None` if it is hidden in output.
        before: Option<String>,
    },
}

impl FileAction {
    /// Returns the file.
    #[must_use]
    pub fn path(&self) -> &HostPath {
        match self {
            Self::CopyProgram { path } | Self::Write { path, .. } | Self::Remove { path, .. } => path,
        }
    }

    /// Returns the change as a unified diff, or as a comment if the file is binary or secret.
    #[must_use]
    pub fn diff(&self) -> String {
        let diff = match self {
            Self::Write { path, text, before, secret: false, .. } => unified_diff(path, before.as_deref(), Some(text)),
            Self::Remove { path, before: Some(before) } => unified_diff(path, Some(before), None),
            _ => String::new(),
        };
        if diff.is_empty() { format!("# {self}\n") } else { diff }
    }
}

impl fmt::Display for FileAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CopyProgram { path } => write!(f, "copy this program to {path}"),
            Self::Write { path, mode, secret, .. } => {
                let hidden = if *secret { ", contents not shown" } else { "" };
                write!(f, "write {path} (mode {mode:04o}{hidden})")
            }
            Self::Remove { path, .. } => write!(f, "remove {path}"),
        }
    }
}

/// Returns the change of a file in the form of `diff -u`; empty if nothing changes. `None` is a file that does not exist.
fn unified_diff(path: &HostPath, before: Option<&str>, after: Option<&str>) -> String {
    let name = |prefix: &str, text: Option<&str>| text.map_or("/dev/null".into(), |_| format!("{prefix}{path}"));
    let diff = TextDiff::from_lines(before.unwrap_or_default(), after.unwrap_or_default());
    diff.unified_diff().header(&name("a", before), &name("b", after)).to_string()
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
    /// Why nothing new is installed: a file of another owner, or another directory of programs. The plan then only keeps
    /// the files in the record as they should be.
    pub refused: Option<String>,
    /// What is missing on the node before the installation can be completed.
    pub waits_for: Option<String>,
    /// Whether the last copy of the cluster network's list stays because another process may just be writing that list. The
    /// plan must be made again after a few seconds.
    pub is_settling: bool,
    /// What another tool must correct so that Multus runs the plugins of its auxiliary chain.
    pub invalid_chain: Option<String>,
    /// What the plugin lacks when the plan is applied, and an installation can't provide now: its credentials.
    pub lacks: Option<String>,
}

impl InstallPlan {
    /// Returns why the node is not ready after the plan, and another tool or the user must act.
    #[must_use]
    pub fn unmet(&self) -> Option<String> {
        let missing = self.waits_for.as_ref().or(self.invalid_chain.as_ref());
        self.refused.clone().or_else(|| missing.map(|what| format!("missing: {what}")))
    }

    /// Whether the plan writes the own list.
    #[must_use]
    pub fn writes_own_list(&self) -> bool {
        let is_copy = |path| self.record.files.get(path).is_some_and(|file| file.role == Role::OwnList);
        self.actions.iter().any(|action| matches!(action, FileAction::Write { path, .. } if is_copy(path)))
    }

    /// Whether the only change is that the own list follows its source: it was as the installation wrote it.
    #[must_use]
    pub fn follows(&self, found: &FoundState) -> bool {
        let [FileAction::Write { path, .. }] = &self.actions[..] else { return false };
        let is_intact = found.files.get(path).is_some_and(|file| file.mode == PRIVATE_MODE && file.trusted);
        self.writes_own_list() && is_intact && found.own_digest(path).is_some()
    }

    /// Adds a file to the record.
    pub(super) fn add(&mut self, path: &HostPath, record: FileRecord) {
        self.record.files.insert(path.clone(), record);
    }
}

/// Writes a text, unless the file has it already.
pub(super) fn add_text(path: &HostPath, role: Role, text: &str, found: &FoundState, plan: &mut InstallPlan) {
    let desired = Digest::of(text.as_bytes());
    let file = found.files.get(path);
    if let Some(file) = file.filter(|file| file.digest != desired)
        && is_foreign(path, role, file, found)
    {
        return refuse(path, role, file, plan);
    }
    if file.is_none_or(|file| file.digest != desired || file.mode != PRIVATE_MODE || !file.trusted) {
        plan.actions.push(FileAction::Write {
            path: path.clone(),
            text: text.to_owned(),
            mode: PRIVATE_MODE,
            before: file.and_then(|file| file.text.clone()),
            follow: false,
            secret: role == Role::Kubeconfig,
        });
    }
    plan.add(path, written(path, role, desired, found));
}

/// Returns the record of a file that is written, with its current digest if an installation wrote it.
pub(super) fn written(path: &HostPath, role: Role, desired: Digest, found: &FoundState) -> FileRecord {
    FileRecord { role, sha256: with_newest(found.own_digest(path), desired), plugin: None, source: None }
}

/// Whether another owner wrote the file. A file in the record that was edited is still the installation's, unless it has
/// become another configuration, or another program that is not named `detour`.
pub(super) fn is_foreign(path: &HostPath, role: Role, file: &FoundFile, found: &FoundState) -> bool {
    let text = file.text.as_deref().unwrap_or_default();
    let is_recorded = found.record.files.contains_key(path);
    let is_changed = found.own_digest(path).is_none();
    match role {
        Role::Program => is_changed && *path.name() != *PROGRAM,
        Role::OwnList => !is_recorded && !conflist::is_own_list(text),
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

/// Refuses the plan because of a file of another owner. The message names the owner as far as known, and two ways out.
pub(super) fn refuse(path: &HostPath, role: Role, file: &FoundFile, plan: &mut InstallPlan) {
    let name = path.name();
    let plugin = file.text.as_deref().and_then(plugin_of);
    let is_istio = name == "istio-cni" || plugin.as_deref() == Some("istio-cni");
    let owner = match (&plugin, role) {
        _ if is_istio => "probably of Istio's CNI plugin (its chart, or an IstioCNI of an operator)".to_owned(),
        (Some(plugin), _) => format!("a configuration of the plugin {plugin:?}"),
        (None, Role::Program) => "another program".to_owned(),
        (None, _) => "unknown".to_owned(),
    };
    let other = match role {
        Role::Program => format!("install without the name {name:?} (--name, or type in the configuration)"),
        Role::Configuration => {
            "select another file (--conf-name, cniConfFileName; attachments: another name)".to_owned()
        }
        Role::OwnList => "install with --own-list=false (cni.ownList=false)".to_owned(),
        _ => "move its settings to the file of --config".to_owned(),
    };
    let guide = if is_istio {
        "; docs/migrate.md describes both, docs/openshift.md for OpenShift Service Mesh and Sail"
    } else {
        ""
    };
    plan.refused.get_or_insert_with(|| {
        format!(
            "can't write {path}: it belongs to another owner: {owner}; uninstall that tool or remove the file, or \
             {other}{guide}"
        )
    });
}

/// Replaces the text of another owner's list, which keeps its owner and mode.
pub(super) fn write_list(path: &HostPath, text: String, file: &FoundFile) -> FileAction {
    let before = file.text.clone();
    FileAction::Write { path: path.clone(), text, mode: file.mode, before, follow: true, secret: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_or_removed_file_is_compared_with_dev_null() {
        let path: HostPath = "/x".parse().expect("a path");
        let added = unified_diff(&path, None, Some("a\nb\n"));
        assert_eq!(added, "--- /dev/null\n+++ b/x\n@@ -0,0 +1,2 @@\n+a\n+b\n");
        let removed = unified_diff(&path, Some("a"), None);
        assert_eq!(removed, "--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n\\ No newline at end of file\n");
        assert_eq!(unified_diff(&path, Some("a"), Some("a")), "");
    }
}
