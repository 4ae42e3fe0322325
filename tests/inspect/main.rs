//! `explain`, `trace` and `rules` as a person runs them.

mod command_line;
#[path = "../scratch/directory.rs"]
mod directory;
mod explain;
mod hostile;
mod manifests;
mod networks;
mod reports;
mod restore;
mod run;
