//! Recorders: plugins that record their input and then run a shell script of the test.

use super::directory::Directory;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A directory of recorders and of their records.
pub(crate) struct Recorders {
    root: Directory,
}

/// One recorded call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Seen {
    /// The plugin's name.
    pub(crate) kind: String,
    /// `CNI_COMMAND`.
    pub(crate) command: String,
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) stdin: Value,
    /// The identity of its network namespace.
    pub(crate) netns: String,
}

/// The script uses absolute paths because a runtime may pass any `PATH` or none. It finishes recording before it runs
/// the script of the test. Calls are sequential.
const SCRIPT: &str = r#"#!/bin/sh
number=$(/bin/ls 'ROOT/seen' | /usr/bin/wc -l)
to="ROOT/seen/$(printf '%03d' "$number")"
/bin/mkdir "$to"
/bin/cat > "$to/stdin"
/usr/bin/env > "$to/environment"
/usr/bin/readlink /proc/self/ns/net > "$to/netns"
printf '%s' "${0##*/}" > "$to/kind"
"#;

impl Recorders {
    pub(crate) fn new() -> Self {
        let root = Directory::new("delegates");
        fs::create_dir(root.join("bin")).expect("a directory");
        fs::create_dir(root.join("seen")).expect("a directory");
        Self { root }
    }

    /// Returns the directory of the recorders.
    pub(crate) fn bin(&self) -> PathBuf {
        self.root.join("bin")
    }

    /// Adds a recorder that then runs the shell script `behaviour`.
    pub(crate) fn with(self, kind: &str, behaviour: &str) -> Self {
        let script = SCRIPT.replace("ROOT", &self.root.display().to_string()) + behaviour + "\n";
        let path = self.bin().join(kind);
        fs::write(&path, script).expect("writable");
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("permissions");
        self
    }

    /// Returns all calls so far, in order.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        let mut entries: Vec<_> = fs::read_dir(self.root.join("seen")).expect("readable").flatten().collect();
        entries.sort_by_key(fs::DirEntry::file_name);
        entries.iter().map(|entry| read(&entry.path())).collect()
    }

    /// Returns command and plugin of all calls so far, such as `ADD first`.
    pub(crate) fn order(&self) -> Vec<String> {
        self.seen().iter().map(|seen| format!("{} {}", seen.command, seen.kind)).collect()
    }
}

fn read(directory: &Path) -> Seen {
    let text = |name: &str| fs::read_to_string(directory.join(name)).expect("it was recorded");
    let pairs = text("environment");
    let environment: BTreeMap<_, _> =
        pairs.lines().filter_map(|line| line.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
    Seen {
        kind: text("kind"),
        command: environment["CNI_COMMAND"].clone(),
        stdin: serde_json::from_str(&text("stdin")).expect("JSON on stdin"),
        netns: text("netns").trim().to_owned(),
        environment,
    }
}

/// Shell: prints `answer` for ADD.
pub(crate) fn add_prints(answer: &Value) -> String {
    format!("if [ \"$CNI_COMMAND\" = ADD ]; then printf '%s' '{answer}'; fi")
}

/// Shell: prints `answer` and fails for `command`.
pub(crate) fn fails(command: &str, answer: &Value) -> String {
    format!("if [ \"$CNI_COMMAND\" = {command} ]; then printf '%s' '{answer}'; exit 1; fi")
}
