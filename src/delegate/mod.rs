//! Other CNI plugins: run as child processes, one by one or as a network's list of plugins.
//!
//! | file | what it knows |
//! |---|---|
//! | `call` | the environment of a plugin |
//! | `conf` | what goes to its stdin |
//! | `find` | where its executable is, and whether root may run it |
//! | `process` | a child with a deadline |
//! | `answer` | what its exit and stdout mean |
//! | `result` | an answer as a result in the configuration's version |
//! | `network` | several plugins, one after another: order, previous results, undoing |
//!
//! A child runs in this process's own namespaces, so nothing here may be called from a thread that
//! has entered a pod's; it inherits no descriptor but its three streams.

mod answer;
mod call;
mod find;
mod network;
mod process;

pub use call::Call;
pub use network::{NetworkConfiguration, Plugin};

use crate::cni::{CniCommand, Code, Error};
use find::{bin_dir, find};
use serde_json::{Map, Value};

/// Runs plugins.
pub trait Runner {
    /// Makes `call` of the plugin of type `kind` with `conf` as its configuration. What it printed
    /// is returned for ADD; `None` where it printed nothing.
    ///
    /// # Errors
    /// The plugin's own error with its code, or why it could not be run.
    fn run(&self, call: &Call, kind: &str, conf: &Map<String, Value>) -> Result<Option<Value>, Error>;

    /// Whether there is a plugin of that type for `call`.
    ///
    /// # Errors
    /// There is none.
    fn find(&self, call: &Call, kind: &str) -> Result<(), Error>;
}

/// Runs plugins as child processes: executables of the type's name in the call's path.
#[derive(Debug, Clone, Copy)]
pub struct Executables;

impl Runner for Executables {
    fn run(&self, call: &Call, kind: &str, conf: &Map<String, Value>) -> Result<Option<Value>, Error> {
        let program = find(kind, call)?;
        let stdin = serde_json::to_vec(conf).map_err(|error| Error::new(Code::Internal, error.to_string()))?;
        tracing::debug!(program = %program.display(), "calling {}", call.command);
        let variables = call.variables(bin_dir(call).unwrap_or_default());
        let ended = process::run(&program, &variables, stdin, call.timeout).map_err(|failure| {
            let code = if failure.may_pass() { Code::TryAgain } else { Code::Delegate };
            Error::new(code, format!("{}: {failure}", program.display()))
        })?;
        answer::of(&program, call.command, &ended)
    }

    fn find(&self, call: &Call, kind: &str) -> Result<(), Error> {
        find(kind, call).map(drop)
    }
}

/// Kills the executable that runs now, with all that it started: for a process that ends otherwise than by
/// returning from [`Runner::run`].
pub fn kill_running() {
    process::kill_running();
}

/// A verb as the reference library's messages have it (`libcni/api.go`).
const fn verb(command: CniCommand) -> &'static str {
    match command {
        CniCommand::Add => "add",
        CniCommand::Check => "check",
        CniCommand::Del => "delete",
        CniCommand::Gc => "gc",
        CniCommand::Status => "status",
    }
}
