//! The agent as a plugin of the container runtime (NRI): a simulated runtime for each failure, and the
//! library that containerd and CRI-O use.

mod failures;
pub(crate) mod peer;
mod reports;
