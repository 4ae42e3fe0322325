//! A call that is killed at any time leaves all rules or none, and the next call completes its work. `KILLS` sets how
//! many calls of each kind are killed.

use crate::attachment::{Attachment, Facts, Slot};
use crate::call::Answer;
use crate::kernel::Kernel;
use crate::node::on_a_node;
use crate::pod::Pod;
use std::time::{Duration, Instant};

const KILLS: u32 = 60;
const REDIRECT: Attachment = Slot::Detour.with(Facts::DnsCaptured);
const EXCLUDING: Attachment = Slot::Detour.with(Facts::ContainerExcluded);
const CHANGED: Attachment = Slot::Detour.with(Facts::AnnotatedOtherwise);

fn kills() -> u32 {
    std::env::var("KILLS").map_or(KILLS, |text| text.parse().expect("KILLS is a number"))
}

/// Counts the outcomes of killed calls.
#[derive(Debug, Default)]
struct Count {
    as_before: u32,
    done: u32,
    ended_before: u32,
}

/// A kind of call to kill.
struct Killed {
    pod: Pod,
    verb: &'static str,
    attachment: Attachment,
    /// Runs before each call, and is not measured.
    prepare: fn(&Pod),
    before: Kernel,
    after: Kernel,
    count: Count,
}

impl Killed {
    fn new(verb: &'static str, attachment: Attachment, prepare: fn(&Pod)) -> Self {
        let pod = Pod::new();
        prepare(&pod);
        let before = Kernel::of(&pod);
        pod.call(verb, attachment).done();
        let after = Kernel::of(&pod);
        Self { pod, verb, attachment, prepare, before, after, count: Count::default() }
    }

    /// Returns how long the call usually takes.
    fn duration(&self) -> Duration {
        let once = |_| {
            (self.prepare)(&self.pod);
            let start = Instant::now();
            self.pod.call(self.verb, self.attachment).done();
            start.elapsed()
        };
        let mut durations: Vec<Duration> = (0..11).map(once).collect();
        durations.sort();
        durations[5]
    }

    fn kill_after(&mut self, delay: Duration) {
        (self.prepare)(&self.pod);
        let mut child = self.pod.start(self.verb, self.attachment);
        let deadline = Instant::now() + delay;
        // A sleep is not precise enough.
        while Instant::now() < deadline {
            std::hint::spin_loop();
        }
        child.kill().expect("it can be killed");
        let output = child.wait_with_output().expect("it ends");
        self.count.ended_before += u32::from(output.status.success());
        let left = Kernel::of(&self.pod);
        if left.has_same_rules(&self.after) {
            self.count.done += 1;
        } else {
            self.count.as_before += 1;
            assert!(left.has_same_rules(&self.before), "after {delay:?}: something in between: {left:?}");
        }
    }

    /// Checks that the next call, whichever it is, reaches the expected state.
    fn continue_with(&self, with: u32) {
        let added = || {
            self.pod.add(REDIRECT).done();
            self.pod.check(REDIRECT).done();
            Kernel::of(&self.pod)
        };
        match with % 3 {
            0 => {
                self.pod.del(REDIRECT).done();
                assert!(!Kernel::of(&self.pod).has_rules());
            }
            1 => added().assert_is(&redirected_pod(), "ADD after a killed call"),
            _ => {
                if let Answer::Refused(code, text) = self.pod.check(self.attachment) {
                    assert!(code == 103 || code == 104, "{code} {text}");
                }
                added().assert_is(&redirected_pod(), "ADD after CHECK after a killed call");
            }
        }
    }

    fn kill_at_all_times(mut self) {
        let (kills, longest) = (kills(), self.duration() * 6 / 5);
        for number in 0..kills {
            self.kill_after(longest * number / kills);
            self.continue_with(number);
        }
        println!("{kills} {} killed within {longest:?}: {:?}", self.verb, self.count);
        assert!(self.count.as_before > 0 && self.count.done > 0, "the instants miss the work: {:?}", self.count);
        self.pod.del(REDIRECT).done();
        assert!(!Kernel::of(&self.pod).has_rules());
    }
}

fn redirected_pod() -> Kernel {
    crate::expect::from_scratch(None, &[REDIRECT].into()).expect("accepted")
}

#[test]
fn a_killed_add_is_completed_by_the_next_call() {
    on_a_node(|| Killed::new("ADD", REDIRECT, |pod| pod.del(REDIRECT).done()).kill_at_all_times());
}

#[test]
fn a_killed_add_with_changes_is_completed_by_the_next_call() {
    on_a_node(|| Killed::new("ADD", CHANGED, |pod| pod.add(REDIRECT).done()).kill_at_all_times());
}

/// The table of excluded containers appears together with the other changes.
#[test]
fn a_killed_add_with_excluded_containers_is_completed_by_the_next_call() {
    on_a_node(|| Killed::new("ADD", EXCLUDING, |pod| pod.del(REDIRECT).done()).kill_at_all_times());
}

#[test]
fn a_killed_del_is_completed_by_the_next_call() {
    on_a_node(|| Killed::new("DEL", REDIRECT, |pod| pod.add(REDIRECT).done()).kill_at_all_times());
}
