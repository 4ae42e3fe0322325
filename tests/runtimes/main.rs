//! Containers that are excluded by name, under real container runtimes: containerd 2.2 and CRI-O 1.34 with runc, the
//! agent, the plugin in the cluster network's plugin list, real rules and real traffic. hack/e2e.sh provides what the
//! tests need and prints the results. `cargo test` without a name does not run them, because building the runtimes
//! takes minutes.
//!
//! Lines that begin with `RESULT` are the table of hack/e2e.sh.

mod cluster;
mod guide;
mod hooks;
mod kills;
mod node;
mod pod;
mod starts;
#[path = "../support/mod.rs"]
mod support;
mod timeline;

use support::{api, program};

/// A number of repetitions: from the environment, or a small one.
fn repetitions(variable: &str, usual: usize) -> usize {
    std::env::var(variable).map_or(usual, |text| text.parse().expect("a number"))
}

/// Adds a row to the table.
fn result(runtime: node::Runtime, what: &str, value: &str) {
    println!("RESULT|{}|{what}|{value}", runtime.name());
}
