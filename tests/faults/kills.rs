//! A call that is killed at any time leaves all rules or none, and the next call completes its work. `KILLS` sets how
//! many calls of each kind are killed. `system_calls` kills before each system call, which covers each instant at which
//! the process can change something; these kills find what a model of the kernel would miss.

use crate::call::{Call, Ended, ended};
use crate::node::on_a_node_with;
use crate::subject::{MODES, Mode, Subject, Verb};
use crate::table::{Table, number};
use std::time::{Duration, Instant};

const KILLS: usize = 6;
const VERBS: [Verb; 5] = [Verb::Add, Verb::AddChanged, Verb::Check, Verb::Del, Verb::Gc];
const LIMIT: Duration = Duration::from_secs(60);

/// Returns how long the call usually takes.
fn duration(subject: &Subject, verb: Verb) -> Duration {
    let once = |_| {
        subject.prepare(verb);
        let ended = subject.call(verb).run();
        subject.done(Verb::Del);
        ended.took
    };
    let mut durations: Vec<Duration> = (0..7).map(once).collect();
    durations.sort();
    durations[3]
}

fn kill_after(call: &Call, delay: Duration) -> Ended {
    let started = Instant::now();
    let mut child = call.start();
    // A sleep is not precise enough.
    while started.elapsed() < delay {
        std::hint::spin_loop();
    }
    child.kill().expect("it can be killed");
    ended(child, LIMIT)
}

fn kill_at_all_times(mode: Mode, dialect: &'static str) {
    let kills = number("KILLS", KILLS);
    on_a_node_with("size=64m", || {
        let mut table = Table::new("kills");
        let subject = Subject::new(mode, dialect);
        for verb in VERBS {
            let longest = duration(&subject, verb) * 6 / 5;
            for number in 0..kills {
                let delay = longest * u32::try_from(number).expect("small") / u32::try_from(kills).expect("small");
                let fault = format!("SIGKILL at {kills} instants ({mode:?}, {dialect})");
                let detail = format!("after {delay:?}");
                let name = (&*fault, &*detail);
                subject.attempt(&mut table, verb, name, |call| kill_after(&call, delay), |_| Ok(()));
            }
        }
        table.end();
    });
}

#[test]
fn killed_at_any_time_in_iptables_format() {
    for mode in [Mode::Redirect, Mode::Tproxy] {
        kill_at_all_times(mode, "iptables");
    }
}

#[test]
fn killed_at_any_time_in_nftables_format() {
    for mode in [Mode::Redirect, Mode::Tproxy] {
        kill_at_all_times(mode, "nftables");
    }
}

/// The table of excluded containers appears together with the other changes.
#[test]
fn killed_at_any_time_with_excluded_containers() {
    kill_at_all_times(Mode::Containers, "iptables");
}

#[test]
fn killed_at_any_time_as_primary_plugin() {
    for (mode, dialect) in MODES.into_iter().filter(|(mode, _)| *mode == Mode::Primary) {
        kill_at_all_times(mode, dialect);
    }
}
