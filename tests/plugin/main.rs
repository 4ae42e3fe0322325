//! The binary as a CNI plugin: protocol, limits of its inputs and outputs, panics, STATUS, and files that it must not trust.
//! Needs root.

mod files;
mod protocol;
mod status;
#[path = "../support/mod.rs"]
mod support;
