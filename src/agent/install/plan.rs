//! What is to be done on a node, as a value.
//!
//! Taking back what the log says: what is still ours, and nothing else.

use super::diff::unified;
use super::reconcile::{FoundFile, FoundState};
use super::record::{EditedList, InstallLog, Owned, PreviousContent, Role};
use super::{HostPath, conflist};
use std::fmt;

/// One change of the node's file system; each is whole or not there at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileAction {
    /// Gives a foreign program a second name, under which it stays when ours takes its place.
    SetAside {
        /// Where it is.
        path: HostPath,
        /// Its second name.
        aside: HostPath,
    },
    /// Puts this program there.
    CopyProgram {
        /// Where it goes.
        path: HostPath,
    },
    /// Writes a text.
    Write {
        /// Where it goes.
        path: HostPath,
        /// All of it.
        text: String,
        /// Permission bits.
        mode: u32,
        /// What is there now.
        before: Option<String>,
        /// Whether the file that a link of this name leads to is meant; else the link is replaced.
        follow: bool,
        /// Whether the text is nobody else's business.
        secret: bool,
    },
    /// Gives a program that was set aside its name back.
    Restore {
        /// Its second name.
        aside: HostPath,
        /// Where it belongs.
        path: HostPath,
    },
    /// Removes a file.
    Remove {
        /// Which one.
        path: HostPath,
        /// What it holds, where that may be shown.
        before: Option<String>,
    },
}

impl FileAction {
    /// What it would change in texts, as a unified diff; a comment for what is no text or secret.
    #[must_use]
    pub fn diff(&self) -> String {
        match self {
            Self::Write { path, text, before, secret: false, .. } => {
                let diff = unified(&path.to_string(), before.as_deref(), Some(text));
                if diff.is_empty() { format!("# {self}\n") } else { diff }
            }
            Self::Remove { path, before: Some(before) } => unified(&path.to_string(), Some(before), None),
            _ => format!("# {self}\n"),
        }
    }
}

impl fmt::Display for FileAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SetAside { path, aside } => write!(f, "keep what is at {path} as {aside}"),
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

/// What is to be done, in this order, and what is known afterwards.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InstallPlan {
    /// The changes. Done only in part, they leave what works: a configuration names a program and
    /// a kubeconfig that are there.
    pub actions: Vec<FileAction>,
    /// What the log says from the first change on.
    pub record: InstallLog,
    /// What was seen and not touched, and why; one line each.
    pub notes: Vec<String>,
    /// What is still missing on the node before all is done.
    pub waits_for: Option<String>,
}

/// What takes back all that the log says, and removes what killed installations left behind.
#[must_use]
pub fn undo(found: &FoundState) -> InstallPlan {
    let mut plan = take_back(&found.record, found);
    let leftovers = found.leftovers.iter().map(|path| FileAction::Remove { path: path.clone(), before: None });
    plan.actions.extend(leftovers);
    plan
}

/// What takes back all that `record` says: configurations first, then kubeconfigs, then programs.
/// What somebody changed since is left, with a note, and stays in the plan's record; as long as
/// such a configuration is left, so is what it may need.
pub(super) fn take_back(record: &InstallLog, found: &FoundState) -> InstallPlan {
    let mut plan = InstallPlan::default();
    plan.record.installer.clone_from(&record.installer);
    for (path, listed) in &record.lists {
        match list(path, listed, found) {
            Ok(actions) => plan.actions.extend(actions),
            Err(why) => {
                plan.notes.push(format!("{path} is left: {why}"));
                plan.record.lists.insert(path.clone(), listed.clone());
            }
        }
    }
    let mut files: Vec<_> = record.files.iter().collect();
    files.sort_by_key(|(_, owned)| owned.role);
    let mut needed = !plan.record.lists.is_empty();
    for (path, owned) in files {
        let taken = if needed && owned.role != Role::Configuration {
            Err("the configuration that is left needs it".to_owned())
        } else {
            file(path, owned, found)
        };
        match taken {
            Ok(actions) => plan.actions.extend(actions),
            Err(why) => {
                needed |= owned.role == Role::Configuration;
                plan.notes.push(format!("{path} is left: {why}"));
                plan.record.files.insert(path.clone(), owned.clone());
            }
        }
    }
    plan
}

const CHANGED: &str = "somebody changed it since";

fn file(path: &HostPath, owned: &Owned, found: &FoundState) -> Result<Vec<FileAction>, String> {
    let Some(there) = found.files.get(path) else { return Ok(Vec::new()) };
    let before = there.text.clone().filter(|_| matches!(owned.role, Role::Configuration | Role::Node));
    if !owned.ours.contains(&there.digest) {
        // What a killed installation had not replaced yet is as it was.
        return match &owned.before {
            PreviousContent::Text(text, _) if there.text.as_ref() == Some(text) => Ok(Vec::new()),
            PreviousContent::Aside(aside) => match found.files.get(aside) {
                None => Ok(Vec::new()),
                Some(same) if same.digest == there.digest => {
                    Ok(vec![FileAction::Remove { path: aside.clone(), before: None }])
                }
                Some(_) => Err(CHANGED.to_owned()),
            },
            _ => Err(CHANGED.to_owned()),
        };
    }
    Ok(vec![match &owned.before {
        PreviousContent::Text(text, mode) => write(path, text, *mode, before),
        PreviousContent::Aside(aside) if found.files.contains_key(aside) => {
            FileAction::Restore { aside: aside.clone(), path: path.clone() }
        }
        PreviousContent::Aside(_) | PreviousContent::Nothing => FileAction::Remove { path: path.clone(), before },
    }])
}

fn list(path: &HostPath, listed: &EditedList, found: &FoundState) -> Result<Vec<FileAction>, String> {
    let Some(there) = found.files.get(path) else { return Ok(Vec::new()) };
    let text = there.text.as_deref().ok_or("it is no text")?;
    let entries = conflist::digests(text, &listed.kind).map_err(|why| format!("it {why}"))?;
    if !entries.iter().all(|entry| listed.ours.contains(entry)) {
        return Err(format!("somebody changed the plugin {} in it since", listed.kind));
    }
    let Some(left) = conflist::without(text, &listed.kind).map_err(|why| format!("it {why}"))? else {
        return Ok(Vec::new());
    };
    let FoundFile { mode, .. } = *there;
    let before = Some(text.to_owned());
    match &listed.single {
        // Whoever wrote it has written it again.
        Some((single, ..)) if found.files.contains_key(single) => {
            Ok(vec![FileAction::Remove { path: path.clone(), before }])
        }
        Some((single, single_text, mode)) if conflist::list_of(single_text).as_ref() == Ok(&left) => {
            let restored = write(single, single_text, *mode, None);
            Ok(vec![restored, FileAction::Remove { path: path.clone(), before }])
        }
        _ => Ok(vec![write(path, &left, mode, before)]),
    }
}

fn write(path: &HostPath, text: &str, mode: u32, before: Option<String>) -> FileAction {
    FileAction::Write { path: path.clone(), text: text.to_owned(), mode, before, follow: true, secret: false }
}
