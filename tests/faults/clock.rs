//! Clock jumps. Timeouts use the monotonic clock, which never jumps during a call. The wall clock is only read for the
//! times in log lines.

use crate::call::{Answer, Ended};
use crate::node::on_a_node_with;
use crate::subject::{MODES, Subject, Verb};
use crate::table::{Table, is_complete, is_done};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A process can be checkpointed and restored on another node, whose monotonic clock differs (time_namespaces(7)).
#[test]
fn another_monotonic_clock() {
    let mut table = Table::new("clock");
    on_a_node_with("size=64m", || {
        for (at, (mode, dialect)) in MODES.into_iter().enumerate() {
            if !is_complete() && at != 1 {
                continue;
            }
            let subject = Subject::new(mode, dialect);
            for verb in Verb::ALL {
                for (fault, offset) in [
                    ("monotonic clock: 100 years ahead", "3153600000"),
                    ("monotonic clock: an hour back, or to the start of the node", "-3600"),
                ] {
                    let (monotonic, boot) = (format!("--monotonic={offset}"), format!("--boottime={offset}"));
                    let runner = ["unshare", "--time", "--fork", &monotonic, &boot];
                    subject.try_fault(&mut table, verb, fault, |call| call.under(&runner), is_done);
                }
            }
        }
    });
    table.end();
}

/// The modules that a call of the plugin runs, except `logging` and the TLS client, which checks certificates.
const MODULES: [&str; 13] = [
    "cni",
    "delegate",
    "firewall",
    "host_path",
    "netlink",
    "netns",
    "networks",
    "plugin",
    "pod",
    "policy",
    "state",
    "sub_plugins",
    "trusted_file",
];

fn sources(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_dir() {
        fs::read_dir(path).expect("readable").for_each(|entry| sources(&entry.expect("readable").path(), found));
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        found.push(path.to_owned());
    }
}

/// No namespace changes the wall clock for one process, and a static binary reads it without a system call, so this
/// test reads the sources.
#[test]
fn no_decision_depends_on_the_wall_clock() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    for module in MODULES {
        sources(&source.join(module), &mut files);
        files.extend(Some(source.join(format!("{module}.rs"))).filter(|file| file.exists()));
    }
    assert!(files.len() > 100, "expected the files of the modules, got {}", files.len());
    for file in files {
        let text = fs::read_to_string(&file).expect("readable");
        for reader in ["SystemTime", "UtcDateTime", "CLOCK_REALTIME", "Realtime", ".modified()"] {
            assert!(!text.contains(reader), "{} uses {reader}", file.display());
        }
    }
    let mut table = Table::new("clock");
    let fault = "wall clock: any jump; only log lines and the check of TLS certificates read it";
    table.add(fault, "all", &Ended::other(Answer::Done, Duration::ZERO), "nothing", Ok(()));
    table.end();
}
