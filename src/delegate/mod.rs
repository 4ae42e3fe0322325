//! Delegates: other CNI plugins, run as child processes, one by one or as a configuration list.
//!
//! A child runs in the namespaces of this process: never call this module from a thread that has entered a
//! pod's network namespace. A child inherits no descriptors except stdin, stdout and stderr.

pub(crate) mod answer;
mod call;
mod network;
pub(crate) mod process;

pub use call::{Call, Executables, Runner};
