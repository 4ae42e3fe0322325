//! The difference between a node's desired and found state, as a plan.

mod cluster_list;
mod own_file;
mod source_timer;

pub use source_timer::SourceTimer;

use super::error::InstallError;
use super::plan::{self, FileAction, InstallPlan};
use super::state::{
    ConfigurationTarget, DesiredState, EditedList, FoundFile, FoundState, InstallRecord, PROGRAM_MODE, PreviousContent,
    Role,
};
use crate::cni::PROGRAM;
use crate::host_path::HostPath;
use cluster_list::ClusterList;
use own_file::{add_text, log_file};
use serde_json::Value;
use std::collections::BTreeMap;

/// Returns the plan that brings a node from its found to its desired state; it is empty if both are equal.
///
/// The plan reverts what the installation record lists and is no longer desired, as [`plan::undo`] does.
///
/// # Errors
/// The installation on the node belongs to another DaemonSet.
pub fn reconcile(desired: &DesiredState, found: &FoundState) -> Result<InstallPlan, InstallError> {
    if let Some(owner) = &found.record.owner
        && Some(owner) != desired.owner.as_ref()
    {
        return Err(InstallError::Owned(owner.clone()));
    }
    let (installer, owner) = (desired.installer.clone(), desired.owner.clone());
    let multus_chain = desired.multus_chain.clone();
    let record = InstallRecord { installer, owner, multus_chain, ..InstallRecord::default() };
    let (notes, lacks) = (found.notes.clone(), desired.lacks());
    let mut plan = InstallPlan { record, notes, lacks, ..InstallPlan::default() };
    plan.actions.extend(found.leftovers.iter().map(|path| FileAction::Remove { path: path.clone(), before: None }));
    for path in &desired.programs {
        add_program(path, desired, found, &mut plan);
    }
    match &desired.kubeconfig {
        Some((path, Ok(text))) => add_text(path, Role::Kubeconfig, text, PreviousContent::Nothing, found, &mut plan),
        Some((path, Err(_))) => {
            plan.record.files.extend(found.record.files.get(path).map(|owned| (path.clone(), owned.clone())));
        }
        None => {}
    }
    if let Some((path, text)) = &desired.node {
        let before = previous_content(path, text, found, |text| text.to_owned());
        add_text(path, Role::Node, text, before, found, &mut plan);
    }
    let mut stale = BTreeMap::new();
    for configuration in &desired.configurations {
        match configuration {
            ConfigurationTarget::Own { path, text } => {
                let kind = |text: &str| serde_json::from_str::<Value>(text).ok().map(|value| value["type"].clone());
                let before = previous_content(path, text, found, kind);
                add_text(path, Role::Configuration, text, before, found, &mut plan);
            }
            ConfigurationTarget::Listed { dir, file, entry, own_list } => {
                let list = ClusterList { dir, file: file.as_deref(), entry, found };
                stale.extend(if *own_list { list.copy(&mut plan) } else { list.edit(&mut plan) });
            }
        }
    }
    plan.invalid_chain = desired.multus_chain.as_ref().and_then(|directory| invalid_chain(directory, found));
    revert_undesired(stale, found, &mut plan);
    plan.follows &= plan.actions.len() == 1;
    Ok(plan)
}

/// Returns the files that must be corrected in the directory of Multus's auxiliary chain.
fn invalid_chain(directory: &HostPath, found: &FoundState) -> Option<String> {
    let files = found.invalid_chain_files.join("; ");
    (!files.is_empty()).then(|| {
        format!(
            "a valid file in Multus's auxiliary chain: {files}; Multus skips all plugins of {directory}, without an error \
             of the pod; correct or remove the file"
        )
    })
}

/// Copies the program. Another vendor's program of this name is set aside.
fn add_program(path: &HostPath, desired: &DesiredState, found: &FoundState, plan: &mut InstallPlan) {
    let file = found.files.get(path);
    let is_foreign = file.is_some_and(|file| file.digest != desired.program) && *path.name() != *PROGRAM;
    let before = match found.record.files.get(path) {
        Some(owned) => owned.before.clone(),
        None if is_foreign => PreviousContent::Aside(path.sibling(&format!("{}.before-{PROGRAM}", path.name()))),
        None => PreviousContent::Nothing,
    };
    if let PreviousContent::Aside(aside) = &before
        && is_foreign
        && !found.is_ours(path)
        && !found.files.contains_key(aside)
    {
        plan.actions.push(FileAction::SetAside { path: path.clone(), aside: aside.clone() });
    }
    let is_installed = |file: &FoundFile| file.digest == desired.program && file.mode == PROGRAM_MODE && file.trusted;
    if !file.is_some_and(is_installed) {
        plan.actions.push(FileAction::CopyProgram { path: path.clone() });
    }
    log_file(path, Role::Program, desired.program.clone(), before, found, plan);
}

/// Returns what an uninstallation restores at `path`. A file of the same kind as `text` is taken for an earlier version
/// of the plugin's own file and not restored.
fn previous_content<T: PartialEq>(
    path: &HostPath,
    text: &str,
    found: &FoundState,
    kind: impl Fn(&str) -> T,
) -> PreviousContent {
    match (found.record.files.get(path), found.files.get(path)) {
        (Some(owned), _) => owned.before.clone(),
        (None, Some(FoundFile { text: Some(current), mode, .. })) if kind(current) != kind(text) => {
            PreviousContent::Text(current.clone(), *mode)
        }
        (None, _) => PreviousContent::Nothing,
    }
}

/// Reverts the parts of earlier installations that are no longer desired, and the `stale` entries in lists. While the
/// cluster network's list is missing, they stay.
fn revert_undesired(stale: BTreeMap<HostPath, EditedList>, found: &FoundState, plan: &mut InstallPlan) {
    let mut undesired = InstallRecord::default();
    let InstallRecord { files, lists, .. } = found.record.clone();
    undesired.files.extend(files.into_iter().filter(|(path, _)| !plan.record.files.contains_key(path)));
    undesired.lists.extend(lists.into_iter().filter(|(path, _)| !plan.record.lists.contains_key(path)));
    undesired.lists.extend(stale);
    let kept = if plan.waits_for.is_some() {
        undesired
    } else {
        let reverted = plan::revert(&undesired, found);
        plan.actions.extend(reverted.actions);
        plan.notes.extend(reverted.notes);
        reverted.record
    };
    plan.record.files.extend(kept.files);
    plan.record.lists.extend(kept.lists);
}
