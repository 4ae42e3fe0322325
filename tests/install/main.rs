//! The plugin is put on a node, stays whole whatever happens, and is taken away again.

mod agent;
mod command;
mod crash;
mod disk;
mod exposition;
mod golden;
mod manifests;
#[path = "../support/mod.rs"]
mod support;

use support::{agent_process, install_scene as scene, server};
