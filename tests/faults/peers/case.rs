//! Runs cases of a group, several at the same time, and adds their rows to the fault table.

use crate::call::{Answer, Ended};
use crate::table::{Table, is_complete};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// The number of cases that run at the same time: most of them wait.
const WORKERS: usize = 4;

/// Without `FAULTS=all`, one case of so many is tried in a group that is not small.
const SAMPLE: usize = 5;
const SMALL: usize = 10;

/// One call under a fault.
pub(crate) struct Row {
    pub(crate) fault: String,
    pub(crate) call: String,
    pub(crate) ended: Ended,
    /// What the call left behind.
    pub(crate) left: String,
    /// What violates the contract.
    pub(crate) problems: Vec<String>,
}

impl Row {
    /// Returns a row for something else than a call, and what violates the contract.
    pub(crate) fn other(fault: &str, call: &str, code: u64, text: &str, took: Duration, problems: Vec<String>) -> Self {
        let answer = if text.is_empty() { Answer::Done } else { Answer::Refused(code, text.to_owned()) };
        Self {
            fault: fault.into(),
            call: call.into(),
            ended: Ended::other(answer, took),
            left: "nothing".into(),
            problems,
        }
    }
}

/// A fault, and the function that tries it.
pub(crate) type Case<'a> = (String, Box<dyn Fn() -> Vec<Row> + Send + Sync + 'a>);

/// Returns a case.
pub(crate) fn case<'a>(fault: &str, work: impl Fn(&str) -> Vec<Row> + Send + Sync + 'a) -> Case<'a> {
    let name = fault.to_owned();
    (fault.to_owned(), Box::new(move || work(&name)))
}

/// Tries these faults or a sample, prints the rows and fails if one of them violates the contract.
pub(crate) fn run(group: &'static str, cases: &[Case<'_>]) {
    // The variable limits the cases to those with this text in their name.
    let only = std::env::var("ONLY").unwrap_or_default();
    let step = if is_complete() || cases.len() < SMALL { 1 } else { SAMPLE };
    let cases: Vec<_> = cases.iter().step_by(step).filter(|(name, _)| name.contains(&only)).collect();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::SeqCst);
                    let Some((name, work)) = cases.get(at) else { break };
                    let rows = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
                        let text = panic.downcast_ref::<String>().cloned();
                        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                        vec![Row::other(
                            name,
                            "preparation",
                            0,
                            "failed",
                            Duration::ZERO,
                            vec![text.unwrap_or_default()],
                        )]
                    });
                    found.lock().expect("no panic while locked").push((at, rows));
                }
            });
        }
    });
    let mut found = found.into_inner().expect("no panic while locked");
    found.sort_by_key(|(at, _)| *at);
    let mut table = Table::new(group);
    for row in found.into_iter().flat_map(|(_, rows)| rows) {
        let verdict = if row.problems.is_empty() { Ok(()) } else { Err(row.problems.join("; ")) };
        table.add(&row.fault, &row.call, &row.ended, &row.left, verdict);
    }
    table.end();
}
