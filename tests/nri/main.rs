//! The agent as a plugin of the container runtime (NRI): a simulated runtime for each failure, the library that
//! containerd and CRI-O use, and recorded sessions of both runtimes. Needs root and Go.

#[path = "../support/background.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod background;
#[path = "../support/directory.rs"]
mod directory;
mod failures;
mod library;
mod peer;
mod plugin;
mod recorded;
mod reports;
