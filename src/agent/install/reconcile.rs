//! The difference between a node's desired and found state, as a plan.

use super::conflist;
use super::digest::Digest;
use super::error::InstallError;
use super::hook;
use super::plan::{self, FileAction, InstallPlan};
use super::state::{
    ConfFile, ConfigurationTarget, DesiredState, EditedList, FoundFile, FoundState, InstallRecord, NodeParts, Owned,
    PRIVATE_MODE, PROGRAM_MODE, PreviousContent, Role, with_newest,
};
use super::target;
use crate::cni::{NODE_CONFIGURATION_LIMIT, PROGRAM};
use crate::host_path::HostPath;
use crate::plugin::hook::HOOK_PROGRAM;
use serde_json::Value;

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
    plan.record.installer.clone_from(&desired.installer);
    plan.record.program_version.clone_from(&desired.program_version);
    plan.actions.extend(found.leftovers.iter().map(|path| FileAction::Remove { path: path.clone(), before: None }));
    for path in &desired.programs {
        add_program(path, desired, found, &mut plan);
    }
    if let Some((path, text)) = &desired.hook {
        add_hook(path, text, desired, found, &mut plan);
    }
    if let Some((path, text)) = &desired.kubeconfig {
        add_text(path, Role::Kubeconfig, text, PreviousContent::Nothing, found, &mut plan);
    }
    plan.record.node.clear();
    if let Some((path, parts)) = &desired.node {
        add_node(path, parts, found, &mut plan)?;
    }
    let mut lists = Vec::new();
    for configuration in &desired.configurations {
        match configuration {
            ConfigurationTarget::Own { path, text } => {
                let kind = |text: &str| serde_json::from_str::<Value>(text).ok().map(|value| value["type"].clone());
                let before = previous_content(path, text, found, kind);
                add_text(path, Role::Configuration, text, before, found, &mut plan);
            }
            ConfigurationTarget::Listed { dir, file, entry } => {
                lists.extend(add_entry(dir, file.as_deref(), entry, found, &mut plan)?);
            }
        }
    }
    // While the cluster network's list is missing, the entry in an earlier list stays.
    if plan.waits_for.is_none() {
        revert_undesired(desired, &lists, found, &mut plan);
    }
    Ok(plan)
}

/// Writes the configuration of the OCI hook, unless a newer one of another release is in place.
fn add_hook(path: &HostPath, text: &str, desired: &DesiredState, found: &FoundState, plan: &mut InstallPlan) {
    let program = |text: &str| hook::program(text).map(|program| program.name());
    let before = previous_content(path, text, found, program);
    let own = Digest::of(text.as_bytes());
    let newer = found.newer_file(path, &desired.program_version, &own);
    let file = found.files.get(path).filter(|file| file.mode == PRIVATE_MODE && file.trusted);
    if newer.is_some() && file.map(|file| &file.digest) == newer {
        log_file(path, Role::Hook, own, before, found, plan);
    } else {
        add_text(path, Role::Hook, text, before, found, plan);
    }
}

/// Checks that the configuration files and networks belong to no other release, and that the hook of another release
/// runs the same program.
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
    if let Some((path, text)) = &desired.hook
        && let Some(program) = hook::program(text)
        && let Some(owner) = found.owner_of_other_hook(path, &program)
    {
        return Err(InstallError::owned_hook(path, owner));
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
    let is_foreign = file.is_some_and(|file| !is_accepted(file)) && ![PROGRAM, HOOK_PROGRAM].contains(&&*path.name());
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

fn add_text(
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

/// Adds a file to the record, with its desired contents and, if an installation wrote them, its current ones.
fn log_file(
    path: &HostPath,
    role: Role,
    desired: Digest,
    before: PreviousContent,
    found: &FoundState,
    plan: &mut InstallPlan,
) {
    let file = found.files.get(path).filter(|_| found.is_ours(path));
    let earlier: Vec<_> = file.map(|file| file.digest.clone()).into_iter().collect();
    plan.record.files.insert(path.clone(), Owned { role, ours: with_newest(&earlier, desired), before });
}

/// Adds the entry to the cluster network's plugin list. Returns the path of the list; `None` if there is no list yet.
///
/// # Errors
/// Another release has an entry of the same type in the list.
fn add_entry(
    dir: &HostPath,
    file: Option<&str>,
    entry: &Value,
    found: &FoundState,
    plan: &mut InstallPlan,
) -> Result<Option<HostPath>, InstallError> {
    let kind = entry["type"].as_str().unwrap_or_default();
    let (target, skipped) = target::choose(&found.configurations, file, kind);
    plan.notes.extend(skipped.iter().map(|(name, reason)| format!("{}: skipped: {reason}", dir.join(name))));
    let Some(target) = target else {
        let name =
            file.map_or_else(|| "the cluster network's configuration".to_owned(), |name| format!("a valid {name}"));
        plan.waits_for = Some(format!("{name} in {dir}, to which the plugin is added"));
        return Ok(None);
    };
    let (path, single) = (dir.join(&target.list_name), dir.join(&target.file.name));
    let recorded = found.recorded_path(&path);
    let listed_by = found.others.iter().filter_map(|(release, record)| Some((release, record.lists.get(recorded)?)));
    if let Some((owner, _)) = listed_by.clone().find(|(_, listed)| listed.kind == kind) {
        return Err(InstallError::owned_entry(kind, &path, owner));
    }
    match conflist::rewrite(&target.list, entry) {
        Ok(text) => write_list(&path, &single, target.file, text, found, plan),
        Err(reason) => plan.notes.push(format!("{single}: skipped: {reason}")),
    }
    for other in other_meshes(&target.list, kind) {
        plan.notes.push(format!(
            "{path}: plugin {other:?} in the same list also redirects traffic; uninstall it with the tool that added it"
        ));
    }
    let earlier = found.record.lists.get(&path);
    let ours = with_newest(&own_entries(earlier, &target.list, kind), Digest::of_value(entry));
    let text = || String::from_utf8_lossy(&target.file.contents).into_owned();
    let converted = (single != path).then(|| (single.clone(), text(), target.file.mode));
    let earlier = earlier.into_iter().chain(listed_by.map(|(_, listed)| listed));
    let single = converted.or_else(|| earlier.filter_map(|listed| listed.single.clone()).next());
    plan.record.lists.insert(path.clone(), EditedList { kind: kind.to_owned(), ours, single });
    Ok(Some(path))
}

/// Writes the list if it differs, and then removes the single-plugin configuration from which it was made. Runtimes use
/// that until it is removed: its name sorts first.
fn write_list(
    path: &HostPath,
    single: &HostPath,
    file: &ConfFile,
    text: String,
    found: &FoundState,
    plan: &mut InstallPlan,
) {
    let existing = found.configurations.iter().find(|other| other.name == path.name());
    let before = existing.map(|other| String::from_utf8_lossy(&other.contents).into_owned());
    if before.as_ref() != Some(&text) {
        plan.actions.push(FileAction::Write {
            path: path.clone(),
            text,
            mode: file.mode,
            before,
            follow: true,
            secret: false,
        });
    }
    if single != path {
        let before = Some(String::from_utf8_lossy(&file.contents).into_owned());
        plan.actions.push(FileAction::Remove { path: single.clone(), before });
    }
}

/// Returns the digests of the list's entries that the record attributes to the installation.
fn own_entries(earlier: Option<&EditedList>, list: &str, kind: &str) -> Vec<Digest> {
    let is_ours = |digest: &Digest| earlier.is_some_and(|listed| listed.ours.contains(digest));
    conflist::digests(list, kind).into_iter().flatten().filter(is_ours).collect()
}

/// Returns the types of the other plugins in the list that redirect traffic to a mesh.
fn other_meshes(list: &str, kind: &str) -> Vec<String> {
    const MESHES: [&str; 4] = ["istio-cni", "linkerd-cni", "kuma-cni", "consul-cni"];
    let types = conflist::types(list).into_iter().flatten();
    types.filter(|other| other != kind && MESHES.contains(&other.as_str())).collect()
}

/// Reverts the parts of earlier installations that are no longer desired.
fn revert_undesired(desired: &DesiredState, lists: &[HostPath], found: &FoundState, plan: &mut InstallPlan) {
    let is_own = |path: &HostPath| desired.configurations.iter().any(|target| target.file() == Some(path));
    let kubeconfig = desired.kubeconfig.as_ref().map(|(path, _)| path);
    let node = desired.node.as_ref().map(|(path, _)| path);
    let hook = desired.hook.as_ref().map(|(path, _)| path);
    let is_desired = |path: &HostPath| {
        desired.programs.contains(path) || is_own(path) || [kubeconfig, node, hook].contains(&Some(path))
    };
    let mut undesired = InstallRecord::default();
    undesired.files.extend(found.record.files.clone().into_iter().filter(|(path, _)| !is_desired(path)));
    undesired.lists.extend(found.record.lists.clone().into_iter().filter(|(path, _)| !lists.contains(path)));
    let reverted = plan::revert(&undesired, found);
    plan.record.files.retain(|path, _| is_desired(path) || reverted.record.files.contains_key(path));
    plan.record.lists.retain(|path, _| lists.contains(path) || reverted.record.lists.contains_key(path));
    plan.actions.extend(reverted.actions);
    plan.notes.extend(reverted.notes);
    plan.others.extend(reverted.others);
}
