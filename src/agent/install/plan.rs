//! An installation plan: the file operations that change a node, their diffs, and the plan that reverts an
//! installation.

use super::conflist;
use super::state::{
    EditedList, FoundState, InstallRecord, OriginalList, Owned, PreviousContent, RENAMED_OWN_LIST, Role,
};
use crate::host_path::HostPath;
use similar::algorithms::{Capture, myers};
use similar::udiff::UnifiedHunkHeader;
use similar::{DiffOp, DiffTag, group_diff_ops};
use std::fmt;
use std::time::Duration;

/// One change of the node's file system. It takes effect as a whole or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileAction {
    /// Keeps another vendor's program under a second name before the plugin replaces it.
    SetAside {
        /// The program.
        path: HostPath,
        /// Its second name.
        aside: HostPath,
    },
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
    /// Moves a program back that was set aside.
    Restore {
        /// Its second name.
        aside: HostPath,
        /// Its original name.
        path: HostPath,
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
    /// Returns the change as a unified diff, or as a comment if the file is binary or secret.
    #[must_use]
    pub fn diff(&self) -> String {
        match self {
            Self::Write { path, text, before, secret: false, .. } => {
                let diff = unified_diff(path, before.as_deref(), Some(text));
                if diff.is_empty() { format!("# {self}\n") } else { diff }
            }
            Self::Remove { path, before: Some(before) } => unified_diff(path, Some(before), None),
            _ => format!("# {self}\n"),
        }
    }
}

impl fmt::Display for FileAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SetAside { path, aside } => write!(f, "back up {path} as {aside}"),
            Self::CopyProgram { path } => write!(f, "copy this program to {path}"),
            Self::Write { path, mode, secret, .. } => {
                let hidden = if *secret { ", contents not shown" } else { "" };
                write!(f, "write {path} (mode {mode:04o}{hidden})")
            }
            Self::Restore { aside, path } => write!(f, "move {aside} back to {path}"),
            Self::Remove { path, .. } => write!(f, "remove {path}"),
        }
    }
}

/// The number of unchanged lines before and after a change.
const DIFF_CONTEXT: usize = 3;

/// Returns the change of a file in the form of `diff -u`, which patch(1) can apply; empty if nothing changes. `None`
/// is a file that does not exist. `TextDiff` of the same crate would add 140 KB of other algorithms to the binary.
fn unified_diff(path: &HostPath, before: Option<&str>, after: Option<&str>) -> String {
    let (old, new) = (lines(before), lines(after));
    let mut operations = Capture::new();
    let Ok(()) = myers::diff(&mut operations, &old, 0..old.len(), &new, 0..new.len());
    let hunks = group_diff_ops(operations.into_ops(), DIFF_CONTEXT);
    if hunks.is_empty() {
        return String::new();
    }
    let name = |prefix: &str, text: Option<&str>| text.map_or("/dev/null".into(), |_| format!("{prefix}{path}"));
    let mut diff = format!("--- {}\n+++ {}\n", name("a", before), name("b", after));
    for hunk in hunks {
        diff += &format!("{}\n", UnifiedHunkHeader::new(&hunk));
        for (tag, old_range, new_range) in hunk.iter().map(DiffOp::as_tag_tuple) {
            if tag == DiffTag::Equal {
                diff += &signed(' ', &old[old_range]);
            } else {
                diff += &(signed('-', &old[old_range]) + &signed('+', &new[new_range]));
            }
        }
    }
    diff
}

fn lines(text: Option<&str>) -> Vec<&str> {
    text.unwrap_or_default().split_inclusive('\n').collect()
}

fn signed(sign: char, lines: &[&str]) -> String {
    let end = |line: &str| if line.ends_with('\n') { "" } else { "\n\\ No newline at end of file\n" };
    lines.iter().map(|line| format!("{sign}{line}{}", end(line))).collect()
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
    /// Whether something stays that an uninstallation should revert, and the user must act. A program that running pods
    /// need does not count.
    pub incomplete: bool,
    /// What is missing on the node before the installation can be completed.
    pub waits_for: Option<String>,
    /// What another tool must correct so that Multus runs the plugins of its auxiliary chain.
    pub invalid_chain: Option<String>,
    /// What the plugin lacks when the plan is applied, and an installation can't provide now: its credentials.
    pub lacks: Option<String>,
    /// Whether the only change is that the own list follows its source, which is not a repair.
    pub follows: bool,
    /// The source of the own list is unusable, perhaps because another process is writing it: another file may replace it
    /// after this time.
    pub source_timeout: Option<Duration>,
}

impl InstallPlan {
    /// Returns what another tool must provide or correct before the node is ready.
    #[must_use]
    pub fn unmet(&self) -> Option<&str> {
        self.waits_for.as_deref().or(self.invalid_chain.as_deref())
    }

    /// Whether the plan removes an own list that Cilium renamed.
    #[must_use]
    pub fn removes_renamed_list(&self) -> bool {
        let is_renamed =
            |action: &FileAction| matches!(action, FileAction::Remove { path, .. } if path.name() == RENAMED_OWN_LIST);
        self.actions.iter().any(is_renamed)
    }

    /// Whether the plan writes the own list.
    #[must_use]
    pub fn writes_own_list(&self) -> bool {
        let is_copy = |path| self.record.files.get(path).is_some_and(|owned| owned.copy_of.is_some());
        self.actions.iter().any(|action| matches!(action, FileAction::Write { path, .. } if is_copy(path)))
    }
}

/// Returns the plan that reverts everything in the installation record and removes temporary files of interrupted
/// installations.
///
/// Programs that the runtime needs to delete running pods stay.
#[must_use]
pub fn undo(found: &FoundState) -> InstallPlan {
    let mut plan = revert(&found.record, found);
    let leftovers = found.leftovers.iter().map(|path| FileAction::Remove { path: path.clone(), before: None });
    plan.actions.extend(leftovers);
    if plan.record.files.keys().any(|path| found.needed_programs.contains_key(path)) {
        plan.notes.push("delete these pods (drain the node), then run `detour uninstall` again".to_owned());
    }
    plan
}

/// Returns the plan that reverts everything in `record`: configurations first, then kubeconfigs, then programs.
///
/// What another process changed stays, with a note, and stays in the plan's record. While such a configuration exists,
/// the files that it may need stay too, and so does a program that the runtime needs to delete running pods.
pub(super) fn revert(record: &InstallRecord, found: &FoundState) -> InstallPlan {
    let mut plan = InstallPlan { record: record.without_files(), ..InstallPlan::default() };
    for (path, listed) in &record.lists {
        match revert_list(path, listed, found) {
            Ok(actions) => plan.actions.extend(actions),
            Err(reason) => {
                plan.notes.push(format!("{path} is not reverted: {reason}"));
                plan.incomplete = true;
                plan.record.lists.insert(path.clone(), listed.clone());
            }
        }
    }
    let mut files: Vec<_> = record.files.iter().collect();
    files.sort_by_key(|(_, owned)| owned.role);
    let mut is_needed = !plan.record.lists.is_empty();
    for (path, owned) in files {
        let needs_others = owned.role == Role::Configuration;
        let actions = if is_needed && !needs_others { Err(Obstacle::Needed) } else { revert_file(path, owned, found) };
        match actions {
            Ok(actions) => plan.actions.extend(actions),
            Err(reason) => {
                is_needed |= needs_others;
                plan.incomplete |= !matches!(reason, Obstacle::Pods(_));
                plan.notes.push(format!("{path} is not reverted: {reason}"));
                plan.record.files.insert(path.clone(), owned.clone());
            }
        }
    }
    let is_removed = |action: &FileAction| match action {
        FileAction::Remove { path, .. } => record.files.get(path).is_some_and(|owned| owned.role == Role::Program),
        _ => false,
    };
    if plan.actions.iter().any(is_removed) {
        let note = |problem: &String| format!("pods that need the program for their deletion may exist: {problem}");
        plan.notes.extend(found.unread_results.iter().map(note));
        plan.incomplete |= !found.unread_results.is_empty();
    }
    plan
}

/// Why a file is not reverted.
#[derive(Debug, thiserror::Error)]
enum Obstacle {
    #[error("another process changed it after the installation")]
    Edited,
    #[error(
        "another process changed it after the installation; runtimes use it instead of the cluster network's list; \
         delete it, and uninstall again"
    )]
    EditedOwnList,
    #[error("a configuration that was not reverted needs it")]
    Needed,
    /// The number of pods.
    #[error("the runtime needs it to delete pods whose saved configuration lists name it (pods: {0})")]
    Pods(usize),
}

fn revert_file(path: &HostPath, owned: &Owned, found: &FoundState) -> Result<Vec<FileAction>, Obstacle> {
    let Some(file) = found.files.get(path) else { return Ok(Vec::new()) };
    let before = file.text.clone().filter(|_| matches!(owned.role, Role::Configuration | Role::Node));
    // Another tool added a plugin to the own list. The cluster network's list still exists.
    let is_own_list = owned.copy_of.is_some() && file.text.as_deref().is_some_and(conflist::is_own_list);
    if !owned.ours.contains(&file.digest) && !is_own_list {
        // An installation that was killed had not replaced the file yet.
        return match &owned.before {
            PreviousContent::Text(text, _) if file.text.as_ref() == Some(text) => Ok(Vec::new()),
            PreviousContent::Aside(aside) => match found.files.get(aside) {
                None => Ok(Vec::new()),
                Some(same) if same.digest == file.digest => {
                    Ok(vec![FileAction::Remove { path: aside.clone(), before: None }])
                }
                Some(_) => Err(Obstacle::Edited),
            },
            _ if owned.copy_of.is_some() => Err(Obstacle::EditedOwnList),
            _ => Err(Obstacle::Edited),
        };
    }
    let pods = found.needed_programs.get(path).copied().unwrap_or_default();
    Ok(vec![match &owned.before {
        PreviousContent::Text(text, mode) => write(path, text, *mode, before),
        PreviousContent::Aside(aside) if found.files.contains_key(aside) => {
            FileAction::Restore { aside: aside.clone(), path: path.clone() }
        }
        PreviousContent::Aside(_) | PreviousContent::Nothing if pods > 0 => {
            return Err(Obstacle::Pods(pods));
        }
        PreviousContent::Aside(_) | PreviousContent::Nothing => FileAction::Remove { path: path.clone(), before },
    }])
}

fn revert_list(path: &HostPath, listed: &EditedList, found: &FoundState) -> Result<Vec<FileAction>, String> {
    let Some(file) = found.files.get(path) else { return Ok(Vec::new()) };
    let text = file.text.as_deref().ok_or("expected UTF-8")?;
    if let Some(original) = &listed.original
        && original.edited.contains(&file.digest)
    {
        return Ok(restore_list(path, original, text, found));
    }
    let entries = conflist::digests(text, &listed.kind).map_err(|error| error.to_string())?;
    if !entries.iter().all(|entry| listed.ours.contains(entry)) {
        return Err(format!(
            "another process changed the entry of the plugin {:?} after the installation",
            listed.kind
        ));
    }
    let reverted = conflist::without(text, &listed.kind).map_err(|error| error.to_string())?;
    Ok(reverted.map(|reverted| write(path, &reverted, file.mode, Some(text.to_owned()))).into_iter().collect())
}

/// Restores the configuration from which the list at `path` was made. `text` is the list.
fn restore_list(path: &HostPath, original: &OriginalList, text: &str, found: &FoundState) -> Vec<FileAction> {
    if original.path == *path {
        return vec![write(path, &original.text, original.mode, Some(text.to_owned()))];
    }
    // Its owner may have written the single-plugin configuration again.
    let is_there = found.files.contains_key(&original.path);
    let restored = (!is_there).then(|| write(&original.path, &original.text, original.mode, None));
    let removed = FileAction::Remove { path: path.clone(), before: Some(text.to_owned()) };
    restored.into_iter().chain([removed]).collect()
}

fn write(path: &HostPath, text: &str, mode: u32, before: Option<String>) -> FileAction {
    FileAction::Write { path: path.clone(), text: text.to_owned(), mode, before, follow: true, secret: false }
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
