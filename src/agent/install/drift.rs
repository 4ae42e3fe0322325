//! Drift of a node from its installation record: what `detour install` and the agent would repair.

use super::conflist::ConfList;
use super::plan::{FoundFile, FoundState};
use super::record::{FileRecord, Role};
use crate::host_path::HostPath;

/// Returns the differences between the node and its installation record, one line each: what `detour install` and the
/// agent would repair. doctor has a check of its own for an own list that differs from its source.
#[must_use]
pub fn changed(found: &FoundState) -> Vec<String> {
    let files = found.record.files.iter().filter_map(|(path, record)| {
        let Some(file) = found.files.get(path) else {
            let reason = found.unreachable.get(path).map_or("file not found", String::as_str);
            return Some(format!("{path}: {reason}"));
        };
        if record.role == Role::Entry { entry_drift(path, record, file) } else { file_drift(path, record, file) }
    });
    files.chain(found.notes.iter().cloned()).collect()
}

fn file_drift(path: &HostPath, record: &FileRecord, found: &FoundFile) -> Option<String> {
    let mode = record.role.mode();
    if record.sha256.last() != Some(&found.digest) {
        Some(format!("{path}: edited after the installation"))
    } else if found.mode != mode {
        Some(format!("{path}: expected mode {mode:04o}, got {:04o}", found.mode))
    } else if !found.trusted {
        Some(format!("{path}: not owned by root"))
    } else {
        None
    }
}

fn entry_drift(path: &HostPath, record: &FileRecord, found: &FoundFile) -> Option<String> {
    let kind = record.plugin.as_deref().unwrap_or_default();
    let Some(text) = &found.text else { return Some(format!("{path}: expected text")) };
    let digests = match ConfList::parse(text) {
        Ok(list) => list.digests(kind),
        Err(error) => return Some(format!("{path}: {error}")),
    };
    match digests.as_slice() {
        [] => Some(format!("{path}: no plugin of type {kind:?}: its entry was removed after the installation")),
        [one] if record.sha256.last() == Some(one) => None,
        [_] => Some(format!("{path}: the entry of the plugin {kind:?} was edited after the installation")),
        _ => Some(format!("{path}: expected one entry of the plugin {kind:?}, got {}", digests.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::install::plan::{Change, ConfFile, DesiredState, ListEntry};
    use crate::agent::install::reconcile::reconcile;
    use crate::agent::install::record::{Digest, InstallRecord};
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
                "/net.d/1.conflist: no plugin of type \"detour\": its entry was removed after the installation",
            ),
            (
                node(program(), &list(&json!([{"type": "bridge"}, {"type": "detour", "k": 1}]))),
                "/net.d/1.conflist: the entry of the plugin \"detour\" was edited after the installation",
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
