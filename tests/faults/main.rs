//! Faults of the plugin, the node, the kernel and the plugin's peers: what a call answers, and what it leaves behind.
//! Each test prints rows of the fault table; `hack/faults.sh` runs all of them in full.
//! Without its variables, the tests try a sample. Needs root, `ip`, `nft`, `iptables` and `strace`.

mod call;
mod clock;
mod cycles;
mod limits;
mod netns;
mod parallel;
mod peers;
mod refusals;
mod ruleset;
mod state;
mod subject;
#[path = "../support/mod.rs"]
mod support;
mod system_calls;
mod table;

use support::{attachment, kernel, netns_pod as pod, private_node as node};

/// The framework itself, tried with each mode and rule format.
#[test]
fn each_call_succeeds_without_a_fault() {
    node::on_a_node_with("size=64m", || {
        for (mode, dialect) in subject::MODES {
            let subject = subject::Subject::new(mode, dialect);
            for verb in subject::Verb::ALL {
                subject.prepare(verb);
                let ended = subject.call(verb).run();
                table::is_done(&ended).unwrap_or_else(|why| panic!("{mode:?} {verb:?}: {why}: {ended:?}"));
                let (left, verdict) = subject.left(verb, &ended);
                verdict.unwrap_or_else(|why| panic!("{mode:?} {verb:?}: {why}: {left}"));
                subject.completes(verb.name()).unwrap_or_else(|why| panic!("{mode:?} {dialect}: {why}"));
            }
        }
    });
}
