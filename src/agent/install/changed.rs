//! How a node differs from what its log says was installed: what `install` would put right.

use super::conflist;
use super::digest::Digest;
use super::reconcile::{Found, PRIVATE, PROGRAM_MODE};
use super::record::{Listed, Owned, Role};
use super::{FoundFile, HostPath};

/// The differences, one line each; none where all is as it was left.
#[must_use]
pub fn changed(found: &Found) -> Vec<String> {
    let files = found.record.files.iter().filter_map(|(path, owned)| file(path, owned, found.files.get(path)));
    let lists = found.record.lists.iter().filter_map(|(path, listed)| list(path, listed, found.files.get(path)));
    let leftovers = found.leftovers.iter().map(|path| format!("{path} is left of an installation that was killed"));
    files.chain(lists).chain(leftovers).chain(found.notes.iter().cloned()).collect()
}

fn file(path: &HostPath, owned: &Owned, there: Option<&FoundFile>) -> Option<String> {
    let Some(there) = there else { return Some(format!("{path} is gone")) };
    let mode = if owned.role == Role::Program { PROGRAM_MODE } else { PRIVATE };
    if owned.ours.last() != Some(&there.digest) {
        Some(format!("{path} is not what was written there"))
    } else if there.mode != mode {
        Some(format!("{path} has mode {:04o}, not {mode:04o}", there.mode))
    } else {
        None
    }
}

fn list(path: &HostPath, listed: &Listed, there: Option<&FoundFile>) -> Option<String> {
    let kind = &listed.kind;
    let Some(text) = there.and_then(|there| there.text.as_ref()) else { return Some(format!("{path} is gone")) };
    let entries = match conflist::of_type(text, kind) {
        Ok(entries) => entries,
        Err(why) => return Some(format!("{path}: it {why}")),
    };
    let digests: Vec<Digest> = entries.iter().map(|entry| Digest::of(entry.to_string().as_bytes())).collect();
    match digests.as_slice() {
        [] => Some(format!("{path} has lost the plugin {kind}")),
        [one] if listed.ours.last() == Some(one) => None,
        [_] => Some(format!("{path}: the plugin {kind} is not as it was written")),
        _ => Some(format!("{path} has the plugin {kind} {} times", digests.len())),
    }
}
