//! The difference between a node's desired and found state, as a plan, and the plan that removes an installation.

use super::cluster_list::ClusterList;
use super::conflist;
use super::error::InstallError;
use super::plan::{
    ConfigurationTarget, DesiredState, FileAction, FoundFile, FoundState, InstallPlan, PROGRAM_MODE, add_text,
    is_foreign, refuse, write_list, written,
};
use super::record::{FileRecord, InstallRecord, Role};
use crate::cni::PROGRAM;
use crate::host_path::HostPath;

/// Returns the plan that brings a node from its found to its desired state; it is empty if both are equal.
///
/// The plan removes what the installation record lists and is no longer desired, as [`undo`] does. A file of another owner
/// is never replaced.
///
/// # Errors
/// The installation on the node belongs to another DaemonSet.
pub fn reconcile(desired: &DesiredState, found: &FoundState) -> Result<InstallPlan, InstallError> {
    if let Some(owner) = &found.record.owner
        && Some(owner) != desired.owner.as_ref()
    {
        return Err(InstallError::Owned(owner.clone()));
    }
    let record = InstallRecord {
        installer: desired.installer.clone(),
        owner: desired.owner.clone(),
        platform: desired.platform.clone(),
        multus_chain: desired.multus_chain.clone(),
        ..InstallRecord::default()
    };
    let mut plan = InstallPlan { record, notes: found.notes.clone(), lacks: desired.lacks(), ..InstallPlan::default() };
    plan.actions.extend(leftovers(found));
    for path in &desired.programs {
        add_program(path, desired, found, &mut plan);
    }
    match &desired.kubeconfig {
        Some((path, Ok(text))) => add_text(path, Role::Kubeconfig, text, found, &mut plan),
        Some((path, Err(_))) => {
            plan.record.files.extend(found.record.files.get(path).map(|file| (path.clone(), file.clone())));
        }
        None => {}
    }
    if let Some((path, text)) = &desired.node {
        add_text(path, Role::Node, text, found, &mut plan);
    }
    for configuration in &desired.configurations {
        match configuration {
            ConfigurationTarget::Own { path, text } => add_text(path, Role::Configuration, text, found, &mut plan),
            ConfigurationTarget::Listed { dir, file, entry, own_list } => {
                let list = ClusterList { dir, file: file.as_deref(), entry, found };
                if *own_list { list.copy(&mut plan) } else { list.edit(&mut plan) }
            }
        }
    }
    plan.invalid_chain = desired.multus_chain.as_ref().and_then(|directory| invalid_chain(directory, found));
    if plan.refused.is_some() {
        keep_only_recorded(found, &mut plan);
    }
    remove_undesired(found, &mut plan);
    Ok(plan)
}

/// The number of pods that a note names; the rest is counted.
const NAMED_PODS: usize = 10;

/// Returns the plan that removes everything in the installation record, and temporary files of interrupted installations.
///
/// Programs that the runtime needs to delete running pods stay.
#[must_use]
pub fn undo(found: &FoundState) -> InstallPlan {
    let InstallRecord { files, multus_chain, .. } = &found.record;
    let record = InstallRecord { files: [].into(), ..found.record.clone() };
    let mut plan = InstallPlan { record, ..InstallPlan::default() };
    let files: Vec<_> = files.iter().map(|(path, file)| (path.clone(), file.clone())).collect();
    remove(files, found, &mut plan);
    plan.actions.extend(leftovers(found));
    let in_chain = |directory: &&HostPath| plan.record.files.keys().any(|path| path.parent() == **directory);
    plan.record.multus_chain = multus_chain.as_ref().filter(in_chain).cloned();
    if plan.record.files.keys().any(|path| found.needed_programs.contains_key(path)) {
        plan.notes.push("delete these pods (drain the node), then run `detour uninstall` again".to_owned());
    }
    if let [first, ..] = found.guarded_pods.as_slice() {
        let named = found.guarded_pods.iter().take(NAMED_PODS).cloned().collect::<Vec<_>>().join(", ");
        let more = found.guarded_pods.len().saturating_sub(NAMED_PODS);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        plan.notes.push(format!(
            "the guard (mesh-guard) stays in running pods and rejects new connections if their redirection is lost: \
             {named}{more}; recreate them, such as {first}, to remove it"
        ));
    }
    plan
}

fn leftovers(found: &FoundState) -> impl Iterator<Item = FileAction> {
    found.leftovers.iter().map(|path| FileAction::Remove { path: path.clone(), before: None })
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

/// Copies the program.
fn add_program(path: &HostPath, desired: &DesiredState, found: &FoundState, plan: &mut InstallPlan) {
    let file = found.files.get(path);
    let is_installed = |file: &FoundFile| file.digest == desired.program && file.mode == PROGRAM_MODE && file.trusted;
    // A copy of the program `detour` beside it is an earlier version.
    let beside = found.files.get(&path.sibling(PROGRAM));
    let is_own = |file: &FoundFile| beside.is_some_and(|beside| beside.digest == file.digest);
    if let Some(file) = file.filter(|file| file.digest != desired.program && !is_own(file))
        && is_foreign(path, Role::Program, file, found)
    {
        return refuse(path, Role::Program, file, plan);
    }
    if !file.is_some_and(is_installed) {
        plan.actions.push(FileAction::CopyProgram { path: path.clone() });
    }
    plan.add(path, written(path, Role::Program, desired.program.clone(), found));
}

/// Keeps the changes of files that are in the record: a refused installation adds nothing, and keeps what it has.
fn keep_only_recorded(found: &FoundState, plan: &mut InstallPlan) {
    let recorded = &found.record.files;
    plan.actions.retain(|action| recorded.contains_key(action.path()) || found.leftovers.contains(action.path()));
    plan.record.files.retain(|path, _| recorded.contains_key(path));
    plan.record.multus_chain.clone_from(&found.record.multus_chain);
}

/// Removes the parts of earlier installations that are no longer desired. While the installation is incomplete, they stay.
fn remove_undesired(found: &FoundState, plan: &mut InstallPlan) {
    let undesired = found.record.files.iter().filter(|(path, _)| !plan.record.files.contains_key(*path));
    let undesired: Vec<_> = undesired.map(|(path, file)| (path.clone(), file.clone())).collect();
    if plan.waits_for.is_some() || plan.refused.is_some() || plan.is_settling {
        plan.record.files.extend(undesired);
    } else {
        remove(undesired, found, plan);
    }
}

/// Removes `files` from the node: configurations first, then kubeconfigs, then programs.
///
/// What another process changed and what can't be reached stays, with a note, and stays in the plan's record. While such a
/// configuration exists, the files that it may need stay too, and so does a program that the runtime needs to delete
/// running pods.
fn remove(mut files: Vec<(HostPath, FileRecord)>, found: &FoundState, plan: &mut InstallPlan) {
    files.sort_by_key(|(_, file)| file.role);
    let mut is_needed = false;
    let mut removes_program = false;
    for (path, file) in files {
        let removed = match found.unreachable.get(&path) {
            Some(reason) => Err(Obstacle::Unreachable(reason.clone())),
            None if is_needed && !file.role.is_configuration() => Err(Obstacle::Needed),
            None if file.role == Role::Entry => without_entry(&path, &file, found),
            None => without_file(&path, &file, found),
        };
        match removed {
            Ok(actions) => {
                removes_program |= file.role == Role::Program && actions.is_some();
                plan.actions.extend(actions);
            }
            Err(reason) => {
                plan.notes.push(format!("{path} is not reverted: {reason}"));
                if !matches!(reason, Obstacle::Foreign) {
                    is_needed |= file.role.is_configuration();
                    plan.incomplete |= !matches!(reason, Obstacle::Pods(_));
                    plan.record.files.insert(path, file);
                }
            }
        }
    }
    if removes_program {
        let note = |problem: &String| format!("pods that need the program for their deletion may exist: {problem}");
        plan.notes.extend(found.unread_results.iter().map(note));
        plan.incomplete |= !found.unread_results.is_empty();
    }
}

/// Why a file is not removed.
#[derive(Debug, thiserror::Error)]
enum Obstacle {
    #[error("{0}")]
    Unreachable(String),
    #[error("{0}")]
    Invalid(String),
    #[error("another process changed it after the installation")]
    Edited,
    #[error("it belongs to another owner now")]
    Foreign,
    #[error("another process changed the entry of the plugin {0:?} after the installation")]
    EditedEntry(String),
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

fn without_file(path: &HostPath, record: &FileRecord, found: &FoundState) -> Result<Option<FileAction>, Obstacle> {
    let Some(file) = found.files.get(path) else { return Ok(None) };
    let before = file.text.clone().filter(|_| !matches!(record.role, Role::Kubeconfig | Role::Program));
    if !record.sha256.contains(&file.digest) {
        // Another tool added a plugin to the own list. The cluster network's list still exists.
        match record.role {
            Role::OwnList if !file.text.as_deref().is_some_and(conflist::is_own_list) => {
                return Err(Obstacle::EditedOwnList);
            }
            Role::OwnList => {}
            role if is_foreign(path, role, file, found) => return Err(Obstacle::Foreign),
            _ => return Err(Obstacle::Edited),
        }
    }
    match found.needed_programs.get(path) {
        Some(pods) => Err(Obstacle::Pods(*pods)),
        None => Ok(Some(FileAction::Remove { path: path.clone(), before })),
    }
}

fn without_entry(path: &HostPath, record: &FileRecord, found: &FoundState) -> Result<Option<FileAction>, Obstacle> {
    let Some(file) = found.files.get(path) else { return Ok(None) };
    let invalid = |error: conflist::UnusableList| Obstacle::Invalid(error.to_string());
    let text = file.text.as_deref().ok_or(conflist::UnusableList::NotText).map_err(invalid)?;
    let kind = record.plugin.as_deref().unwrap_or_default();
    let entries = conflist::digests(text, kind).map_err(invalid)?;
    if !entries.iter().all(|entry| record.sha256.contains(entry)) {
        return Err(Obstacle::EditedEntry(kind.to_owned()));
    }
    let reverted = conflist::without(text, kind).map_err(invalid)?;
    Ok(reverted.map(|reverted| write_list(path, reverted, file)))
}
