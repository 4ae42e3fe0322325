//! Runs the binary.

use crate::directory::Directory;
use crate::support::called::start;
use serde_json::Value;
use std::ops::Deref;
use std::process::Command;

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.code, 0, "{self:?}");
        self.parsed()
    }

    /// Returns the JSON on stdout, whatever the exit code is.
    #[track_caller]
    pub(crate) fn parsed(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("no JSON: {e}: {self:?}"))
    }
}

/// Runs the binary with these arguments, and only this environment.
pub(crate) fn detour(arguments: &[&str], stdin: &str, environment: &[(&str, &str)]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_detour"));
    // Tables are not wrapped, unless the environment sets another width.
    command.args(arguments).env_clear().env("COLUMNS", "10000").envs(environment.iter().copied());
    let output = start(&mut command, stdin).wait_with_output().expect("wait for detour");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Run { code: output.status.code().expect("it exits"), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// A file in a temporary directory, which is removed on drop. It dereferences to its path.
pub(crate) struct File {
    path: String,
    _directory: Directory,
}

impl Deref for File {
    type Target = str;

    fn deref(&self) -> &str {
        &self.path
    }
}

/// Writes a file with this name to a new temporary directory.
pub(crate) fn file(name: &str, text: &str) -> File {
    let directory = Directory::new("inspect");
    let path = directory.join(name);
    path.parent().map(std::fs::create_dir_all).transpose().expect("writable");
    std::fs::write(&path, text).expect("writable");
    File { path: path.display().to_string(), _directory: directory }
}
