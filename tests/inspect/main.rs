//! Tests of the commands that print reports: `explain`, `trace`, `rules` and `validate`.

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
