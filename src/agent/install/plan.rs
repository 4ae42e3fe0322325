//! An installation plan: the file operations that change a node, and their diffs.

use super::record::{FileRecord, InstallRecord, Role};
use super::state::{FoundState, PRIVATE_MODE};
use crate::host_path::HostPath;
use similar::TextDiff;
use std::fmt;

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
