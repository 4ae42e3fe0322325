//! Runs of programs that read a text on stdin, and the output of calls of the plugin.

use super::program::program;
use serde_json::Value;
use std::ffi::OsStr;
use std::io::Write;
use std::process::{Child, Command, Output, Stdio};

/// Starts a program that reads this text.
pub(crate) fn start(command: &mut Command, stdin: &str) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    // A program that fails early may not read all of it.
    let _ = child.stdin.take().expect("a pipe").write_all(stdin.as_bytes());
    child
}

/// Returns the plugin with only this environment.
pub(crate) fn plugin<K: AsRef<OsStr>, V: AsRef<OsStr>>(environment: impl IntoIterator<Item = (K, V)>) -> Command {
    let mut command = Command::new(program());
    command.env_clear().envs(environment);
    command
}

/// The output of a call of the plugin.
#[derive(Debug)]
pub(crate) struct Called {
    pub(crate) success: bool,
    /// The JSON on stdout; `Null` if stdout is empty.
    pub(crate) stdout: Value,
    pub(crate) stderr: String,
}

impl Called {
    /// Calls the plugin with this configuration.
    pub(crate) fn run(command: &mut Command, configuration: &Value) -> Self {
        Self::ended(start(command, &configuration.to_string()))
    }

    /// Waits for a call.
    pub(crate) fn ended(child: Child) -> Self {
        Self::of(&child.wait_with_output().expect("it ends"))
    }

    fn of(output: &Output) -> Self {
        let stdout = match output.stdout.as_slice() {
            [] => Value::Null,
            text => serde_json::from_slice(text).unwrap_or_else(|e| panic!("stdout is not JSON: {e}: {output:?}")),
        };
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Self { success: output.status.success(), stdout, stderr }
    }

    /// Checks that the call succeeded.
    #[track_caller]
    pub(crate) fn done(self) -> Self {
        assert!(self.success, "{self:?}");
        self
    }

    /// Returns the error's code and whole text.
    #[track_caller]
    pub(crate) fn refused(&self) -> (u64, String) {
        assert!(!self.success, "{self:?}");
        let text = |key: &str| self.stdout[key].as_str().unwrap_or_default().to_owned();
        (self.stdout["code"].as_u64().expect("a code"), format!("{}: {}", text("msg"), text("details")))
    }
}
