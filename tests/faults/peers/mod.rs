//! Faults of the plugin's peers: the API server, the agent, executables; and of the peers of the agent as a program.

mod agent;
mod api;
mod executables;
mod expected;
mod listener;
mod program;
mod server;
mod tls;

use crate::call::Call;
use crate::node::on_a_node_with;
use crate::subject::{Mode, Subject};
use crate::table::{Table, is_complete};
use expected::Expected;
use serde_json::Value;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The number of faults that are tried at the same time: most calls wait.
const WORKERS: usize = 4;
/// Without `FAULTS=all`, one fault of so many is tried in a group that is not small.
const SAMPLE: usize = 5;
const SMALL: usize = 10;

/// Tries these faults or a sample in each of these modes; fails if a call violates the contract. The variable `ONLY`
/// limits them to those with this text in their name.
fn try_all<F: Sync>(
    group: &'static str,
    modes: &[(Mode, &'static str)],
    faults: &[(String, F)],
    attempt: impl Fn(&str, &F, &Subject, &mut Table) + Sync,
) {
    let only = std::env::var("ONLY").unwrap_or_default();
    let step = if is_complete() || faults.len() < SMALL { 1 } else { SAMPLE };
    let faults: Vec<_> = faults.iter().step_by(step).filter(|(name, _)| name.contains(&only)).collect();
    let (next, table) = (AtomicUsize::new(0), Mutex::new(Table::new(group)));
    let work = || {
        let subjects: Vec<Subject> = modes.iter().map(|(mode, dialect)| Subject::new(*mode, dialect)).collect();
        while let Some((name, fault)) = faults.get(next.fetch_add(1, Ordering::SeqCst)) {
            for subject in &subjects {
                let mut rows = Table::new(group);
                attempt(name, fault, subject, &mut rows);
                table.lock().expect("no panic while locked").append(rows);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..WORKERS.min(faults.len()) {
            scope.spawn(|| on_a_node_with("size=64m", work));
        }
    });
    table.into_inner().expect("no panic while locked").end();
}

/// Sets the sources of facts, and logs everything.
fn with_sources(call: Call, kubernetes: Value, expected: &Expected) -> Call {
    let arguments = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_UID=uid-1";
    call.with("CNI_ARGS", arguments).configured(|configuration| {
        configuration["log_level"] = "debug".into();
        configuration["kubernetes"] = kubernetes;
        configuration["kubernetes"]["timeout_seconds"] = expected.within.as_secs().into();
    })
}
