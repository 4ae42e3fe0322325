//! Tests under real container runtimes, containerd 2.2 and CRI-O 1.34 with runc: the agent, the plugin in the cluster
//! network's configuration list, real rules and real traffic. They show that containers are excluded by name from their
//! first instruction, that no meshed pod starts without rules while a node boots, and what the own list relies on.
//! hack/e2e.sh provides what the tests need and prints the results. `cargo test` without a name does not run them,
//! because building the runtimes takes minutes.
//!
//! Lines that begin with `RESULT` are the table of hack/e2e.sh.

mod boots;
mod cluster;
mod cluster_cni;
mod kills;
mod kubelet;
mod node;
mod own_list;
mod pod;
mod starts;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;
use support::{api, program};

/// A number of repetitions: from the environment, or a small one.
fn repetitions(variable: &str, usual: usize) -> usize {
    std::env::var(variable).map_or(usual, |text| text.parse().expect("a number"))
}

/// Numbers that look random, the same in each run (a linear congruential generator, Numerical Recipes).
struct Random(u32);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) % limit
    }

    /// A time below this one, in milliseconds.
    fn time(&mut self, limit: u32) -> Duration {
        Duration::from_millis(u64::from(self.below(limit)))
    }
}

/// Adds a row to the table.
fn result(runtime: node::Runtime, what: &str, value: &str) {
    println!("RESULT|{}|{what}|{value}", runtime.name());
}
