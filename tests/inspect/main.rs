//! Tests of the commands that print reports: `explain`, `trace`, `rules` and `validate`.

mod command_line;
mod container_exclude;
mod explain;
mod guard;
mod hostile;
mod manifests;
mod networks;
mod picture;
mod reports;
mod restore;
mod run;
#[path = "../support/mod.rs"]
mod support;

use support::directory;
