//! `explain`, `trace` and `rules` as a person runs them.

mod command_line;
mod explain;
mod hostile;
mod manifests;
mod networks;
mod reports;
mod restore;
mod run;
#[path = "../support/mod.rs"]
mod support;

use support::directory;
