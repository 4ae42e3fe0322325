//! The agent as a plugin of the container runtime (NRI): a simulated runtime for each failure, the library that
//! containerd and CRI-O use, and recorded sessions of both runtimes.

mod failures;
mod library;
pub(crate) mod peer;
mod plugin;
mod reports;
