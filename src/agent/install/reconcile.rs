//! The difference between a node's desired and found state, as a plan.

mod cluster_list;
mod own_file;
mod source_timer;

pub use source_timer::SourceTimer;

use super::error::InstallError;
use super::plan::{self, FileAction, InstallPlan};
use super::state::{
    ConfigurationTarget, DesiredState, EditedList, FoundFile, FoundState, InstallRecord, NodeParts, PROGRAM_MODE,
    PreviousContent, Role,
};
use crate::cni::{NODE_CONFIGURATION_LIMIT, PROGRAM};
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
/// A configuration file, a network, or an entry of the same type in a plugin list belongs to another release.
pub fn reconcile(desired: &DesiredState, found: &FoundState) -> Result<InstallPlan, InstallError> {
    check_owners(desired, found)?;
    let mut plan = InstallPlan::of(found);
    plan.notes.clone_from(&found.notes);
    (plan.record.files, plan.record.lists) = (BTreeMap::new(), BTreeMap::new());
    plan.record.installer.clone_from(&desired.installer);
    plan.record.program_version.clone_from(&desired.program_version);
    plan.actions.extend(found.leftovers.iter().map(|path| FileAction::Remove { path: path.clone(), before: None }));
    for path in &desired.programs {
        add_program(path, desired, found, &mut plan);
    }
    if let Some((path, text)) = &desired.kubeconfig {
        add_text(path, Role::Kubeconfig, text, PreviousContent::Nothing, found, &mut plan);
    }
    plan.record.node.clear();
    if let Some((path, parts)) = &desired.node {
        add_node(path, parts, found, &mut plan)?;
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
                stale.extend(if *own_list { list.copy(&mut plan)? } else { list.edit(&mut plan)? });
            }
        }
    }
    revert_undesired(stale, found, &mut plan);
    plan.follows &= plan.actions.len() == 1;
    Ok(plan)
}

/// Checks that the configuration files and networks belong to no other release.
///
/// # Errors
/// One of them does.
fn check_owners(desired: &DesiredState, found: &FoundState) -> Result<(), InstallError> {
    for path in desired.configurations.iter().filter_map(ConfigurationTarget::file) {
        let recorded = found.recorded_path(path);
        if let Some(owner) = found.owner(path) {
            return Err(InstallError::owned_file(path, owner));
        }
        if let Some(owner) = found.owner(recorded) {
            return Err(InstallError::owned_alias(path, recorded, owner));
        }
    }
    let parts = desired.node.iter().flat_map(|(_, parts)| parts);
    for network in parts.filter_map(|part| part.network.as_deref()) {
        if let Some(owner) = found.network_owner(network) {
            return Err(InstallError::owned_network(network, owner));
        }
    }
    Ok(())
}

/// Copies the program, unless a newer one of another release is in place. If none is, the node gets this one until the
/// agent of the other release restores its own.
fn add_program(path: &HostPath, state: &DesiredState, found: &FoundState, plan: &mut InstallPlan) {
    let desired = &state.program;
    let newer = found.newer_file(path, &state.program_version, desired);
    let is_accepted = |file: &FoundFile| file.digest == *desired || newer == Some(&file.digest);
    let file = found.files.get(path);
    let is_foreign = file.is_some_and(|file| !is_accepted(file)) && *path.name() != *PROGRAM;
    let before = match found.recorded(path) {
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
    if file.is_none_or(|file| !is_accepted(file) || file.mode != PROGRAM_MODE || !file.trusted) {
        plan.actions.push(FileAction::CopyProgram { path: path.clone() });
    }
    log_file(path, Role::Program, desired.clone(), before, found, plan);
}

/// Writes the node configuration, with the parts of all releases.
///
/// # Errors
/// It would be larger than the plugin accepts.
fn add_node(
    path: &HostPath,
    parts: &NodeParts,
    found: &FoundState,
    plan: &mut InstallPlan,
) -> Result<(), InstallError> {
    let (text, notes) = found.node_text(parts);
    plan.notes.extend(notes);
    plan.record.node.clone_from(parts);
    let Some(text) = text else { return Ok(()) };
    if text.len() as u64 > NODE_CONFIGURATION_LIMIT {
        return Err(InstallError::Configuration(format!(
            "{path}: expected at most {NODE_CONFIGURATION_LIMIT} bytes, got {}; shorten the lists exclude_namespaces of \
             the attachments",
            text.len()
        )));
    }
    let before = previous_content(path, &text, found, |text| text.to_owned());
    add_text(path, Role::Node, &text, before, found, plan);
    Ok(())
}

/// Returns what an uninstallation restores at `path`. A file of the same kind as `text` is taken for an earlier version
/// of the plugin's own file and not restored.
fn previous_content<T: PartialEq>(
    path: &HostPath,
    text: &str,
    found: &FoundState,
    kind: impl Fn(&str) -> T,
) -> PreviousContent {
    match (found.recorded(path), found.files.get(path)) {
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
        plan.others.extend(reverted.others);
        reverted.record
    };
    plan.record.files.extend(kept.files);
    plan.record.lists.extend(kept.lists);
}
