//! The plugin is put on a node, stays whole whatever happens, and is taken away again.

mod agent;
mod agent_process;
mod command;
mod crash;
mod disk;
mod exposition;
mod golden;
mod manifests;
mod program;
mod scene;
