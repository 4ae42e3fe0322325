//! The matrix of hack/e2e.sh: each cell is a runtime, a mode of the plugin and a dialect. A cell has a node with that
//! runtime, a real API server, and the agent as the chart installs it. Its checks are those of `lifecycle`.
//!
//! Lines that begin with `CELL` are the table of hack/e2e.sh.

mod agent;
mod cluster;
mod comparison;
mod lifecycle;
mod scene;

use crate::node::Runtime;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// How a node runs the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// As an attachment of Multus, which is the runtime's plugin.
    Attachment,
    /// As an entry of the cluster network's configuration list.
    Chained,
    /// As an entry of the agent's copy of that list.
    OwnList,
    /// As the runtime's plugin, instead of Multus.
    Primary,
}

#[derive(Debug, Clone, Copy)]
struct Cell {
    runtime: Runtime,
    mode: Mode,
    dialect: &'static str,
}

impl Cell {
    fn name(self) -> String {
        let mode = match self.mode {
            Mode::Attachment => "attachment",
            Mode::Chained => "chained",
            Mode::OwnList => "own-list",
            Mode::Primary => "primary",
        };
        format!("{}|{mode}|{}", self.runtime.name(), self.dialect)
    }
}

/// The results of a cell.
#[derive(Debug, Default)]
struct Report {
    passed: usize,
    failed: Vec<&'static str>,
    /// How long the runtime took to start the sandbox of a pod with a sidecar.
    starts: Vec<Duration>,
    /// How long the plugin took for the ADD of each of these pods, in seconds.
    adds: Vec<f64>,
}

impl Report {
    /// Records the result of a check; a failed one does not end the cell.
    fn check(&mut self, what: &'static str, work: impl FnOnce(&mut Self)) {
        let (mut times, begin) = (Self::default(), Instant::now());
        let is_passed = catch_unwind(AssertUnwindSafe(|| work(&mut times))).is_ok();
        println!("{} after {:.1?}: {what}", if is_passed { "passed" } else { "failed" }, begin.elapsed());
        if is_passed {
            self.passed += 1;
        } else {
            self.failed.push(what);
        }
        self.starts.append(&mut times.starts);
        self.adds.append(&mut times.adds);
    }
}

/// Median and maximum, in milliseconds.
fn times(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let milliseconds = |value: Option<&f64>| value.map_or("-".to_owned(), |value| format!("{:.0}", value * 1000.0));
    format!("{}|{}", milliseconds(values.get(values.len() / 2)), milliseconds(values.last()))
}

fn run(cell: Cell) {
    let mut report = Report::default();
    let ended = catch_unwind(AssertUnwindSafe(|| lifecycle::run(cell, &mut report)));
    if ended.is_err() {
        report.failed.push("the cell ended early");
    }
    let failures = if report.failed.is_empty() { "-".to_owned() } else { report.failed.join("; ") };
    let starts = times(report.starts.iter().map(Duration::as_secs_f64).collect());
    println!("CELL|{}|{}|{failures}|{starts}|{}", cell.name(), report.passed, times(report.adds));
    assert!(report.failed.is_empty(), "{}: {}", cell.name(), report.failed.join("; "));
}

macro_rules! cells {
    ($($runtime_name:ident $runtime:ident: $($mode_name:ident $mode:ident)*;)*) => {$(
        mod $runtime_name {$(
            mod $mode_name {
                use crate::matrix::{Cell, Mode, run};
                use crate::node::Runtime;

                #[test]
                fn iptables() {
                    run(Cell { runtime: Runtime::$runtime, mode: Mode::$mode, dialect: "iptables" });
                }

                #[test]
                fn nftables() {
                    run(Cell { runtime: Runtime::$runtime, mode: Mode::$mode, dialect: "nftables" });
                }
            }
        )*}
    )*};
}

cells! {
    containerd Containerd: attachment Attachment chained Chained own_list OwnList primary Primary;
    cri_o CriO: attachment Attachment chained Chained own_list OwnList primary Primary;
}
