//! The difference between a node's desired and found state, as a plan, the plan that removes an installation, and what
//! differs from the installation record.

use super::InstallError;
use super::cluster_list::ClusterList;
use super::conflist::ConfList;
use super::plan::{Change, DesiredState, FileAction, FoundFile, FoundState, InstallPlan, Obstacle, is_foreign};
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
        lacks: desired.expired.clone(),
        ..InstallPlan::default()
    };
    for file in &desired.files {
        plan.write(file, found);
    }
    if let Some(entry) = &desired.entry {
        let bin_dir = desired.programs().next().map(HostPath::parent);
        ClusterList { desired: entry, bin_dir, found }.plan(&mut plan);
    }
    let recorded = &found.record.files;
    if matches!(plan.obstacle, Some((Obstacle::Failed, _))) {
        // A refused installation adds nothing, and keeps what it has.
        plan.actions.retain(|action| recorded.contains_key(&action.path));
        plan.record.files.retain(|path, _| recorded.contains_key(path));
        plan.record.multus_chain.clone_from(&found.record.multus_chain);
    }
    let undesired = recorded.iter().filter(|(path, _)| !plan.record.files.contains_key(*path));
    let undesired: Vec<_> = undesired.map(|(path, file)| (path.clone(), file.clone())).collect();
    // While the installation is incomplete, the parts of earlier ones stay.
    match plan.obstacle.is_some() {
        true => plan.record.files.extend(undesired),
        false => remove(undesired, found, &mut plan),
    }
    if let (Some(directory), Some(_)) = (plan.record.multus_chain.clone(), found.invalid_chain_files.first()) {
        let missing = format!(
            "missing: a valid file in Multus's auxiliary chain: {}; Multus skips all plugins of {directory}, without an \
             error of the pod; correct or remove the file",
            found.invalid_chain_files.join("; ")
        );
        plan.add(Obstacle::ChainSkipped, missing);
    }
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
    if let Some(first) = found.guarded_pods.first() {
        let pods = Vec::from_iter(found.guarded_pods.iter().map(String::as_str)).join(", ");
        plan.notes.push(format!(
            "the guard (mesh-guard) stays in running pods and rejects new connections if their redirection is lost: \
             {pods}; recreate them, such as {first}, to remove it"
        ));
    }
    plan
}

/// Returns the differences between the node and its installation record, one line each: what `detour install` and the
/// agent would repair. doctor has a check of its own for an own list that differs from its source.
#[must_use]
pub fn changed(found: &FoundState) -> Vec<String> {
    let difference = |(path, record): (&HostPath, &FileRecord)| {
        let difference = match found.files.get(path) {
            None => found.unreachable.get(path).map_or("file not found", String::as_str).to_owned(),
            Some(file) => record_difference(record, file)?,
        };
        Some(format!("{path}: {difference}"))
    };
    found.record.files.iter().filter_map(difference).chain(found.notes.iter().cloned()).collect()
}

fn record_difference(record: &FileRecord, file: &FoundFile) -> Option<String> {
    let (mode, is_entry) = (record.role.mode(), record.role == Role::Entry);
    match file.digests(record) {
        Err(why) => Some(why.to_string()),
        Ok(digests) if digests.iter().ne(record.sha256.last()) => Some(match &record.plugin {
            Some(kind) if is_entry => {
                format!("the entry of the plugin {kind:?} was edited or removed after the installation")
            }
            _ => "edited after the installation".to_owned(),
        }),
        Ok(_) if !is_entry && file.mode != mode => Some(format!("expected mode {mode:04o}, got {:04o}", file.mode)),
        Ok(_) => (!is_entry && !file.trusted).then(|| "not owned by root".to_owned()),
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
    for (path, file) in files {
        let is_configuration = file.role.is_configuration();
        let removed = match found.unreachable.get(&path) {
            Some(reason) => Err(Kept::Other(reason.clone())),
            None if is_needed && !is_configuration => {
                Err(Kept::Other("a configuration that was not reverted needs it".to_owned()))
            }
            None => without(&path, &file, found),
        };
        match removed {
            Ok(action) => plan.actions.extend(action),
            Err(reason) => {
                plan.notes.push(format!("{path} is not reverted: {reason}"));
                if !matches!(reason, Kept::Foreign) {
                    is_needed |= is_configuration;
                    plan.incomplete |= !matches!(reason, Kept::Pods(_));
                    plan.record.files.insert(path, file);
                }
            }
        }
    }
}

/// Why a file is not removed.
#[derive(Debug, thiserror::Error)]
enum Kept {
    #[error("{0}")]
    Other(String),
    #[error("it belongs to another owner now")]
    Foreign,
    #[error("the runtime needs it to delete pods whose saved configuration lists name it ({0})")]
    Pods(String),
}

/// Returns the action that removes what the installation wrote in a file; `None` if the file has nothing of it.
fn without(path: &HostPath, record: &FileRecord, found: &FoundState) -> Result<Option<FileAction>, Kept> {
    let Some(file) = found.files.get(path) else { return Ok(None) };
    let digests = file.digests(record).map_err(|why| Kept::Other(why.to_string()))?;
    let is_intact = digests.iter().all(|digest| record.sha256.contains(digest));
    let list = || ConfList::parse(found.text(path)).ok();
    let kind = record.plugin.as_deref().unwrap_or_default();
    let change = match record.role {
        Role::Entry if is_intact => match list().filter(|_| !digests.is_empty()) {
            Some(list) => Change::Text(list.without(kind).text(), file.mode),
            None => return Ok(None),
        },
        // Another tool added a plugin to the own list. The cluster network's list still exists.
        _ if is_intact || record.role == Role::OwnList && list().is_some_and(|list| list.is_own()) => Change::Remove,
        role => {
            return Err(match role {
                Role::Entry => Kept::Other(format!(
                    "another process changed the entry of the plugin {kind:?} after the installation"
                )),
                Role::OwnList => Kept::Other(
                    "another process changed it after the installation; runtimes use it instead of the cluster network's \
                     list; delete it, and uninstall again"
                        .to_owned(),
                ),
                _ if is_foreign(path, role, file, found) => Kept::Foreign,
                _ => Kept::Other("another process changed it after the installation".to_owned()),
            });
        }
    };
    match found.needed_programs.get(path) {
        Some(pods) => Err(Kept::Pods(pods.clone())),
        None => Ok(Some(found.action(path, record.role, change))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::install::plan::{ConfFile, ListEntry};
    use crate::agent::install::record::Digest;
    use serde_json::{Value, json};

    fn path(text: &str) -> HostPath {
        text.parse().expect("a path")
    }

    fn found_file(text: &str, mode: u32) -> FoundFile {
        FoundFile { digest: Digest::of(text.as_bytes()), text: Some(text.to_owned()), mode, trusted: true }
    }

    /// A node with a program and a list, and their record.
    fn node(program: FoundFile, list: &Value) -> FoundState {
        let (own, entry) = (Digest::of(b"program"), json!({"type": "detour"}));
        let record = |role, sha256, plugin: Option<&str>| FileRecord {
            role,
            sha256,
            plugin: plugin.map(str::to_owned),
            source: None,
        };
        let program_record = record(Role::Program, vec![Digest::of(b"older"), own], None);
        let listed = record(Role::Entry, vec![Digest::of_value(&entry)], Some("detour"));
        let record = InstallRecord {
            files: [(path("/bin/detour"), program_record), (path("/net.d/1.conflist"), listed)].into(),
            ..InstallRecord::default()
        };
        let files = [(path("/bin/detour"), program), (path("/net.d/1.conflist"), found_file(&list.to_string(), 0o644))];
        FoundState { record, files: files.into(), ..FoundState::default() }
    }

    fn list(plugins: &Value) -> Value {
        json!({"name": "n", "cniVersion": "1.0.0", "plugins": plugins})
    }

    #[test]
    fn an_unchanged_node_has_no_drift() {
        let found = node(found_file("program", 0o755), &list(&json!([{"type": "bridge"}, {"type": "detour"}])));
        assert!(changed(&found).is_empty(), "{:?}", changed(&found));
        assert!(changed(&FoundState::default()).is_empty());
    }

    /// An installation writes unsorted keys; a Go program that rewrites the list sorts them.
    #[test]
    fn the_order_of_keys_in_an_installed_list_is_no_drift() {
        let dir = path("/net.d");
        let desired = DesiredState {
            entry: Some(ListEntry {
                dir: dir.clone(),
                file: None,
                value: json!({"type": "detour", "log_level": "info", "chain": [{"uids": ["1337"], "type": "uid-exclude"}]}),
                own_list: false,
            }),
            ..DesiredState::default()
        };
        let before = list(&json!([{"type": "bridge"}])).to_string();
        let cluster_network = ConfFile { list: ConfList::parse(&before), untrusted: None };
        let found = FoundState {
            configurations: [("1.conflist".to_owned(), cluster_network)].into(),
            files: [(path("/net.d/1.conflist"), found_file(&before, 0o600))].into(),
            ..FoundState::default()
        };
        let plan = reconcile(&desired, &found).expect("a plan");
        let written = plan.actions.iter().find_map(|action| match &action.change {
            Change::Text(text, _) => Some(text.clone()),
            _ => None,
        });
        let written = written.expect("the list");
        let mut sorted: Value = serde_json::from_str(&written).expect("JSON");
        sorted.sort_all_objects();
        for text in [written, sorted.to_string()] {
            let files = [(path("/net.d/1.conflist"), found_file(&text, 0o600))].into();
            let found = FoundState { record: plan.record.clone(), files, ..FoundState::default() };
            assert!(changed(&found).is_empty(), "{:?}", changed(&found));
        }
    }

    /// The chart's test mounts the node's directories read-only.
    #[test]
    fn a_file_that_can_be_read_but_not_changed_is_no_drift() {
        let mut found = node(found_file("program", 0o755), &list(&json!([{"type": "bridge"}, {"type": "detour"}])));
        found.unreachable.insert(path("/bin/detour"), "/bin is mounted read-only here".into());
        assert!(changed(&found).is_empty(), "{:?}", changed(&found));
        found.files.remove(&path("/bin/detour"));
        assert_eq!(changed(&found), ["/bin/detour: /bin is mounted read-only here"]);
    }

    #[test]
    fn each_difference_names_its_file() {
        let intact = || list(&json!([{"type": "bridge"}, {"type": "detour"}]));
        let program = || found_file("program", 0o755);
        let foreign = FoundFile { trusted: false, ..program() };
        let rows = [
            (node(foreign, &intact()), "/bin/detour: not owned by root"),
            (node(found_file("older", 0o755), &intact()), "/bin/detour: edited after the installation"),
            (node(found_file("program", 0o700), &intact()), "/bin/detour: expected mode 0755, got 0700"),
            (
                node(program(), &list(&json!([{"type": "bridge"}]))),
                "/net.d/1.conflist: the entry of the plugin \"detour\" was edited or removed after the installation",
            ),
            (
                node(program(), &list(&json!([{"type": "bridge"}, {"type": "detour", "k": 1}]))),
                "/net.d/1.conflist: the entry of the plugin \"detour\" was edited or removed after the installation",
            ),
        ];
        for (found, expected) in rows {
            assert_eq!(changed(&found), [expected]);
        }
        let mut found = node(program(), &intact());
        found.files.clear();
        assert_eq!(changed(&found), ["/bin/detour: file not found", "/net.d/1.conflist: file not found"]);
    }
}
