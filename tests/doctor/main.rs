//! `detour doctor` on a node that has everything, and on the same node with one thing wrong: the line
//! about that fails, and no other.

mod api;
mod audit;
mod confined;
mod containers;
mod faults;
mod find;
mod forms;
mod guard;
mod logs;
mod own_list;
mod pod;
mod policies;
mod programs;
mod scene;
#[path = "../support/mod.rs"]
mod support;

use support::server;

/// Compares the report of a case with the golden one.
#[track_caller]
fn compare(case: &str, found: &str) {
    support::golden::compare("doctor.md", "healthy", case, found);
}
