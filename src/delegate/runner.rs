//! Runs one plugin: as an executable, or as a fake in tests.

use super::call::Call;
use super::find::{bin_dir, find};
use super::{answer, process};
use crate::cni::{Code, Error};
use serde_json::{Map, Value};

/// Runs plugins.
pub trait Runner {
    /// Calls the plugin of type `kind` with `conf` on stdin. Returns the result that it prints for ADD, or `None`
    /// if it prints nothing.
    ///
    /// # Errors
    /// The plugin's own error with its code, or the reason why the plugin could not run.
    fn run(&self, call: &Call, kind: &str, conf: &Map<String, Value>) -> Result<Option<Value>, Error>;

    /// Checks that the plugin of type `kind` can be run.
    ///
    /// # Errors
    /// The plugin is missing or not trusted.
    fn find(&self, call: &Call, kind: &str) -> Result<(), Error>;
}

/// Runs plugins as child processes: executables named after the plugin type, in the directories of the call.
#[derive(Debug, Clone, Copy)]
pub struct Executables;

impl Runner for Executables {
    fn run(&self, call: &Call, kind: &str, conf: &Map<String, Value>) -> Result<Option<Value>, Error> {
        let program = find(kind, call)?;
        let stdin = serde_json::to_vec(conf).map_err(|error| Error::new(Code::Internal, error.to_string()))?;
        tracing::debug!(program = %program.display(), "calling {}", call.command);
        let variables = call.variables(bin_dir(call).unwrap_or_default());
        let exit = process::run(&program, &variables, stdin, call.timeout).map_err(|error| {
            let code = if error.is_transient() { Code::TryAgain } else { Code::Delegate };
            Error::new(code, format!("{}: {error}", program.display()))
        })?;
        answer::parse(&program, call.command, &exit)
    }

    fn find(&self, call: &Call, kind: &str) -> Result<(), Error> {
        find(kind, call).map(drop)
    }
}

/// Kills the executable that is running, with its process group. Call it before this process exits while
/// [`Runner::run`] is active.
pub fn kill_running() {
    process::kill_running();
}
