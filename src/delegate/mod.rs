//! Delegates: other CNI plugins, run as child processes, one by one or as a plugin list.
//!
//! | file | content |
//! |---|---|
//! | `call` | the environment of one plugin call |
//! | `network` | a network's plugin list and the configuration that each plugin gets on stdin |
//! | `sequence` | ADD, CHECK, DEL, GC and STATUS of a plugin list: order, previous results, undo |
//! | `runner` | runs one plugin: find, execute, parse |
//! | `find` | locates an executable and checks that only root can change it |
//! | `process` | a child process with a deadline |
//! | `answer` | parses the exit status and stdout of a plugin |
//!
//! A child runs in the namespaces of this process: never call this module from a thread that has entered a
//! pod's network namespace. A child inherits no descriptors except stdin, stdout and stderr.

mod answer;
mod call;
mod find;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod network;
mod process;
mod runner;
mod sequence;

pub use call::Call;
pub use network::{NetworkConfiguration, Plugin};
pub use runner::{Executables, Runner, kill_running};
