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
    } else if !there.trusted {
        Some(format!("{path} is owned by another user than root"))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::install::{Before, Record};
    use serde_json::{Value, json};

    fn path(text: &str) -> HostPath {
        text.parse().expect("a path")
    }

    fn there(text: &str, mode: u32) -> FoundFile {
        FoundFile { digest: Digest::of(text.as_bytes()), text: Some(text.to_owned()), mode, trusted: true }
    }

    fn node(program: FoundFile, list: &Value) -> Found {
        let (own, entry) = (Digest::of(b"program"), json!({"type": "detour"}));
        let owned = Owned { role: Role::Program, ours: vec![Digest::of(b"older"), own], before: Before::Nothing };
        let ours = vec![Digest::of(entry.to_string().as_bytes())];
        let listed = Listed { kind: "detour".into(), ours, single: None };
        let record = Record {
            installer: "a".into(),
            files: [(path("/bin/detour"), owned)].into(),
            lists: [(path("/net.d/1.conflist"), listed)].into(),
        };
        let files = [(path("/bin/detour"), program), (path("/net.d/1.conflist"), there(&list.to_string(), 0o644))];
        Found { record, files: files.into(), ..Found::default() }
    }

    fn list(plugins: &Value) -> Value {
        json!({"name": "n", "cniVersion": "1.0.0", "plugins": plugins})
    }

    #[test]
    fn what_was_installed_and_is_still_so_is_no_change() {
        let found = node(there("program", 0o755), &list(&json!([{"type": "bridge"}, {"type": "detour"}])));
        assert!(changed(&found).is_empty(), "{:?}", changed(&found));
        assert!(changed(&Found::default()).is_empty());
    }

    #[test]
    fn each_difference_is_named_with_its_file() {
        let fine = || list(&json!([{"type": "bridge"}, {"type": "detour"}]));
        let program = || there("program", 0o755);
        let foreign = FoundFile { trusted: false, ..program() };
        let rows = [
            (node(foreign, &fine()), "/bin/detour is owned by another user than root"),
            (node(there("older", 0o755), &fine()), "/bin/detour is not what was written there"),
            (node(there("program", 0o700), &fine()), "/bin/detour has mode 0700, not 0755"),
            (node(program(), &list(&json!([{"type": "bridge"}]))), "/net.d/1.conflist has lost the plugin detour"),
            (
                node(program(), &list(&json!([{"type": "bridge"}, {"type": "detour", "k": 1}]))),
                "/net.d/1.conflist: the plugin detour is not as it was written",
            ),
        ];
        for (found, wanted) in rows {
            assert_eq!(changed(&found), [wanted]);
        }
        let mut found = node(program(), &fine());
        found.files.clear();
        found.leftovers.push(path("/bin/.x"));
        let wanted =
            ["/bin/detour is gone", "/net.d/1.conflist is gone", "/bin/.x is left of an installation that was killed"];
        assert_eq!(changed(&found), wanted);
    }
}
