//! What is to be done on a node, as a value.

use super::HostPath;
use super::diff::unified;
use super::record::InstallLog;
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
