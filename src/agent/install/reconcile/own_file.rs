//! Files of which an installation writes the whole contents.

use crate::agent::install::digest::Digest;
use crate::agent::install::plan::{FileAction, InstallPlan};
use crate::agent::install::state::{FoundState, Owned, PRIVATE_MODE, PreviousContent, Role, with_newest};
use crate::host_path::HostPath;

/// Writes a text, unless the file has it already, and adds the file to the record.
pub(super) fn add_text(
    path: &HostPath,
    role: Role,
    text: &str,
    before: PreviousContent,
    found: &FoundState,
    plan: &mut InstallPlan,
) {
    let desired = Digest::of(text.as_bytes());
    let file = found.files.get(path);
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
    log_file(path, role, desired, before, found, plan);
}

/// Adds a file to the record, with its desired contents and, if an installation wrote them, its current ones.
pub(super) fn log_file(
    path: &HostPath,
    role: Role,
    desired: Digest,
    before: PreviousContent,
    found: &FoundState,
    plan: &mut InstallPlan,
) {
    let file = found.files.get(path).filter(|_| found.is_ours(path));
    let earlier: Vec<_> = file.map(|file| file.digest.clone()).into_iter().collect();
    plan.record.files.insert(path.clone(), Owned { role, ours: with_newest(&earlier, desired), before, copy_of: None });
}
