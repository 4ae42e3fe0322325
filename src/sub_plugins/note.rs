//! Notes of the sub-plugins for the log and for `explain`.

use std::collections::HashSet;

/// A line for the log and for `explain`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Note {
    /// How important the note is.
    pub severity: Severity,
    /// The text, one line.
    pub text: String,
}

/// How important a [`Note`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Everything works as configured.
    Info,
    /// A requested setting has no effect.
    Warning,
}

impl Note {
    pub(super) fn info(text: impl Into<String>) -> Self {
        Self { severity: Severity::Info, text: text.into() }
    }

    pub(super) fn warning(text: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, text: text.into() }
    }
}

/// Removes repeated notes and keeps the order.
pub(super) fn without_repetitions(notes: Vec<Note>) -> Vec<Note> {
    let mut seen = HashSet::new();
    notes.into_iter().filter(|note| seen.insert(note.clone())).collect()
}
