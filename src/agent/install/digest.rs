//! Whether a file is still the one that was written.
//!
//! How a node differs from what its log says was installed: what `install` would put right.

use super::reconcile::{FoundState, PRIVATE, PROGRAM_MODE};
use super::record::{EditedList, Owned, Role};
use super::{FoundFile, HostPath, conflist};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::Read;
use std::{fmt, io};

/// Length and hash of a content (FNV-1a, eight bytes a step): enough to see that somebody changed
/// it, no protection against one who hides it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(String);

impl Digest {
    /// Of these bytes.
    #[must_use]
    pub fn of(contents: &[u8]) -> Self {
        Self::new(contents.len() as u64, hash(START, contents))
    }

    /// Of all that comes from there, a piece at a time: an agent must not hold a program in memory.
    ///
    /// # Errors
    /// It can't be read.
    pub fn read(mut from: impl Read) -> io::Result<Self> {
        let (mut length, mut so_far) = (0, START);
        let mut piece = Vec::with_capacity(PIECE);
        loop {
            piece.clear();
            if from.by_ref().take(PIECE as u64).read_to_end(&mut piece)? == 0 {
                return Ok(Self::new(length, so_far));
            }
            length += piece.len() as u64;
            so_far = hash(so_far, &piece);
        }
    }

    fn new(length: u64, hash: u64) -> Self {
        Self(format!("{length}-{hash:016x}"))
    }

    /// Of this value, however it is written: who writes a list anew may sort its keys, as Go does.
    #[must_use]
    pub fn of_value(value: &Value) -> Self {
        let mut sorted = value.clone();
        sorted.sort_all_objects();
        Self::of(sorted.to_string().as_bytes())
    }
}

const START: u64 = 0xcbf2_9ce4_8422_2325;
/// A multiple of the step.
const PIECE: usize = 1 << 16;

fn hash(start: u64, contents: &[u8]) -> u64 {
    contents.chunks(8).fold(start, |hash, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The differences, one line each; none where all is as it was left.
#[must_use]
pub fn changed(found: &FoundState) -> Vec<String> {
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

fn list(path: &HostPath, listed: &EditedList, there: Option<&FoundFile>) -> Option<String> {
    let kind = &listed.kind;
    let Some(text) = there.and_then(|there| there.text.as_ref()) else { return Some(format!("{path} is gone")) };
    let digests = match conflist::digests(text, kind) {
        Ok(digests) => digests,
        Err(why) => return Some(format!("{path}: it {why}")),
    };
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
    use crate::agent::install::{
        ConfFile, ConfigurationTarget, DesiredState, Digest, FileAction, InstallLog, PreviousContent, reconcile,
    };
    use serde_json::{Value, json};

    #[test]
    fn the_order_of_keys_does_not_count() {
        let of = |text: &str| Digest::of_value(&serde_json::from_str(text).expect("JSON"));
        assert_eq!(of(r#"{"a": {"b": 1, "c": [1, 2]}, "d": 2}"#), of(r#"{"d":2,"a":{"c":[1,2],"b":1}}"#));
        assert_ne!(of(r#"{"a": [1, 2]}"#), of(r#"{"a": [2, 1]}"#));
    }

    #[test]
    fn what_is_read_in_pieces_is_the_same() {
        for length in [0, 1, 8, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5] {
            let contents: Vec<u8> = (0..length).map(|at| u8::try_from(at % 251).expect("small")).collect();
            assert_eq!(Digest::read(&contents[..]).expect("readable"), Digest::of(&contents), "{length}");
        }
    }

    #[test]
    fn each_byte_and_the_length_count() {
        let of = |text: &[u8]| Digest::of(text).to_string();
        assert_eq!(of(b"12345678"), of(b"12345678"));
        for other in [&b""[..], b"12345679", b"22345678", b"1234567", b"12345678\0", b"123456781"] {
            assert_ne!(of(other), of(b"12345678"));
        }
    }

    fn path(text: &str) -> HostPath {
        text.parse().expect("a path")
    }

    fn there(text: &str, mode: u32) -> FoundFile {
        FoundFile { digest: Digest::of(text.as_bytes()), text: Some(text.to_owned()), mode, trusted: true }
    }

    fn node(program: FoundFile, list: &Value) -> FoundState {
        let (own, entry) = (Digest::of(b"program"), json!({"type": "detour"}));
        let owned =
            Owned { role: Role::Program, ours: vec![Digest::of(b"older"), own], before: PreviousContent::Nothing };
        let ours = vec![Digest::of_value(&entry)];
        let listed = EditedList { kind: "detour".into(), ours, single: None };
        let record = InstallLog {
            installer: "a".into(),
            files: [(path("/bin/detour"), owned)].into(),
            lists: [(path("/net.d/1.conflist"), listed)].into(),
        };
        let files = [(path("/bin/detour"), program), (path("/net.d/1.conflist"), there(&list.to_string(), 0o644))];
        FoundState { record, files: files.into(), ..FoundState::default() }
    }

    fn list(plugins: &Value) -> Value {
        json!({"name": "n", "cniVersion": "1.0.0", "plugins": plugins})
    }

    #[test]
    fn what_was_installed_and_is_still_so_is_no_change() {
        let found = node(there("program", 0o755), &list(&json!([{"type": "bridge"}, {"type": "detour"}])));
        assert!(changed(&found).is_empty(), "{:?}", changed(&found));
        assert!(changed(&FoundState::default()).is_empty());
    }

    /// Keys that are not sorted, as an installation writes them, and the same list written anew by Go,
    /// which sorts them.
    #[test]
    fn a_list_that_an_installation_has_just_written_is_no_change_however_its_keys_are_ordered() {
        let dir = path("/net.d");
        let desired = DesiredState {
            installer: "a".into(),
            program: Digest::of(b"program"),
            programs: Vec::new(),
            kubeconfig: None,
            node: None,
            configuration: ConfigurationTarget::Listed {
                dir: dir.clone(),
                file: None,
                entry: json!({"type": "detour", "log_level": "info", "chain": [{"uids": ["1337"], "type": "uid-exclude"}]}),
            },
        };
        let contents = list(&json!([{"type": "bridge"}])).to_string().into_bytes();
        let cluster_network = ConfFile { name: "1.conflist".into(), contents, mode: 0o600 };
        let plan = reconcile(&desired, &FoundState { configurations: vec![cluster_network], ..FoundState::default() });
        let written = plan.actions.iter().find_map(|action| match action {
            FileAction::Write { text, .. } => Some(text.clone()),
            _ => None,
        });
        let written = written.expect("the list");
        let mut sorted: Value = serde_json::from_str(&written).expect("JSON");
        sorted.sort_all_objects();
        for text in [written, sorted.to_string()] {
            let files = [(path("/net.d/1.conflist"), there(&text, 0o600))].into();
            let found = FoundState { record: plan.record.clone(), files, ..FoundState::default() };
            assert!(changed(&found).is_empty(), "{:?}", changed(&found));
        }
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
