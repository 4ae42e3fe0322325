//! Tests of the commands that print reports: `explain`, `trace`, `rules` and `validate`.

mod command_line;
mod container_exclude;
mod control_plane;
mod explain;
mod guard;
mod hostile;
mod manifests;
mod networks;
mod picture;
mod reports;
mod restore;
mod run;
mod service_mesh;
#[path = "../support/mod.rs"]
mod support;

use support::directory;
