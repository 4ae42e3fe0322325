//! The difference between a node's desired and found state, as a plan, and the plan that removes an installation.

use super::cluster_list::ClusterList;
use super::conflist::{ConfList, UnusableList};
use super::error::InstallError;
use super::plan::{Change, DesiredState, FileAction, FoundFile, FoundState, InstallPlan, is_foreign};
use super::record::{FileRecord, InstallRecord, Role};
use crate::host_path::HostPath;

/// Returns the plan that brings a node from its found to its desired state; it is empty if both are equal.
///
/// The plan removes what the installation record lists and is no longer desired, as [`undo`] does. A file of another owner
/// is never replaced.
///
/// # Errors
/// The installation on the node belongs to another DaemonSet.
pub fn reconcile(desired: &DesiredState, found: &FoundState) -> Result<InstallPlan, InstallError> {
    if let Some(owner) = found.record.owner.as_ref().filter(|owner| Some(*owner) != desired.owner.as_ref()) {
        return Err(InstallError::Owned(owner.clone()));
    }
    let mut plan = InstallPlan {
        record: InstallRecord {
            owner: desired.owner.clone(),
            platform: desired.platform.clone(),
            multus_chain: desired.multus_chain.clone(),
            ..InstallRecord::default()
        },
        notes: found.notes.clone(),
        invalid_chain_files: found.invalid_chain_files.clone(),
        lacks: desired.lacks(),
        ..InstallPlan::default()
    };
    for file in &desired.files {
        plan.write(file, found);
    }
    if let Some(entry) = &desired.entry {
        let bin_dir = desired.programs().next().map(HostPath::parent);
        ClusterList { desired: entry, bin_dir, found }.plan(&mut plan);
    }
    if plan.refused.is_some() {
        keep_only_recorded(found, &mut plan);
    }
    remove_undesired(found, &mut plan);
    plan.follows = follows(&plan, found);
    Ok(plan)
}

/// Whether the only change is that the own list follows its source: it was as the installation wrote it.
fn follows(plan: &InstallPlan, found: &FoundState) -> bool {
    let [FileAction { path, role: Role::OwnList, change: Change::Text(_, mode), .. }] = &plan.actions[..] else {
        return false;
    };
    let is_intact = found.files.get(path).is_some_and(|file| file.mode == *mode && file.trusted);
    is_intact && found.own_digest(path).is_some()
}

/// Returns the plan that removes everything in the installation record.
///
/// Programs that the runtime needs to delete running pods stay.
#[must_use]
pub fn undo(found: &FoundState) -> InstallPlan {
    let record = InstallRecord { files: [].into(), ..found.record.clone() };
    let mut plan = InstallPlan { record, ..InstallPlan::default() };
    remove(found.record.files.clone().into_iter().collect(), found, &mut plan);
    let remaining: Vec<_> = plan.record.files.keys().map(HostPath::parent).collect();
    plan.record.multus_chain.take_if(|directory| !remaining.contains(directory));
    if plan.record.files.keys().any(|path| found.needed_programs.contains_key(path)) {
        plan.notes.push("delete these pods (drain the node), then run `detour uninstall` again".to_owned());
    }
    if let [first, ..] = found.guarded_pods.as_slice() {
        let pods = found.guarded_pods.join(", ");
        plan.notes.push(format!(
            "the guard (mesh-guard) stays in running pods and rejects new connections if their redirection is lost: \
             {pods}; recreate them, such as {first}, to remove it"
        ));
    }
    plan
}

/// Keeps the changes of files that are in the record: a refused installation adds nothing, and keeps what it has.
fn keep_only_recorded(found: &FoundState, plan: &mut InstallPlan) {
    let recorded = &found.record.files;
    plan.actions.retain(|action| recorded.contains_key(&action.path));
    plan.record.files.retain(|path, _| recorded.contains_key(path));
    plan.record.multus_chain.clone_from(&found.record.multus_chain);
}

/// Removes the parts of earlier installations that are no longer desired. While the installation is incomplete, they stay.
fn remove_undesired(found: &FoundState, plan: &mut InstallPlan) {
    let mut undesired = found.record.files.clone();
    undesired.retain(|path, _| !plan.record.files.contains_key(path));
    if plan.waits_for.is_some() || plan.refused.is_some() {
        plan.record.files.extend(undesired);
    } else {
        remove(undesired.into_iter().collect(), found, plan);
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
            Some(reason) => Err(Obstacle::Other(reason.clone())),
            None if is_needed && !file.role.is_configuration() => {
                Err(Obstacle::Other("a configuration that was not reverted needs it".to_owned()))
            }
            None => found
                .files
                .get(&path)
                .map(|current| without(&path, &file, current, found))
                .transpose()
                .map(Option::flatten),
        };
        match removed {
            Ok(action) => {
                removes_program |= file.role == Role::Program && action.is_some();
                plan.actions.extend(action);
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
    Other(String),
    #[error("it belongs to another owner now")]
    Foreign,
    /// The number of pods.
    #[error("the runtime needs it to delete pods whose saved configuration lists name it (pods: {0})")]
    Pods(usize),
}

impl From<UnusableList> for Obstacle {
    fn from(error: UnusableList) -> Self {
        Self::Other(error.to_string())
    }
}

/// Returns the action that removes what the installation wrote in a file; `None` if the file has nothing of it.
fn without(
    path: &HostPath,
    record: &FileRecord,
    file: &FoundFile,
    found: &FoundState,
) -> Result<Option<FileAction>, Obstacle> {
    let edited = |what: &str| Err(Obstacle::Other(format!("another process changed {what} after the installation")));
    if record.role == Role::Entry {
        let kind = record.plugin.as_deref().unwrap_or_default();
        let list = ConfList::parse(file.text.as_deref().unwrap_or_default())?;
        let entries = list.digests(kind);
        if !entries.iter().all(|entry| record.sha256.contains(entry)) {
            return edited(&format!("the entry of the plugin {kind:?}"));
        }
        let change = Change::Text(list.without(kind).text(), file.mode);
        let before = file.text.clone();
        let action = FileAction { path: path.clone(), role: Role::Entry, change, before };
        return Ok((!entries.is_empty()).then_some(action));
    }
    let is_own_list = || file.text.as_deref().is_some_and(|text| ConfList::parse(text).is_ok_and(|list| list.is_own()));
    match record.role {
        _ if record.sha256.contains(&file.digest) => {}
        // Another tool added a plugin to the own list. The cluster network's list still exists.
        Role::OwnList if is_own_list() => {}
        Role::OwnList => {
            return Err(Obstacle::Other(
                "another process changed it after the installation; runtimes use it instead of the cluster network's \
                 list; delete it, and uninstall again"
                    .to_owned(),
            ));
        }
        role if is_foreign(path, role, file, found) => return Err(Obstacle::Foreign),
        _ => return edited("it"),
    }
    match found.needed_programs.get(path) {
        Some(pods) => Err(Obstacle::Pods(*pods)),
        None => {
            let (path, before) = (path.clone(), file.text.clone());
            Ok(Some(FileAction { path, role: record.role, change: Change::Remove, before }))
        }
    }
}
