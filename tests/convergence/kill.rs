//! Calls that are killed at any instant leave all of the rules or none, and whoever comes next
//! finishes the work. `KILLS` says how many calls of each kind are killed.

use crate::attachment::{Attachment, Facts, Slot};
use crate::call::Answer;
use crate::kernel::Kernel;
use crate::node::on_a_node;
use crate::pod::Pod;
use std::time::{Duration, Instant};

const KILLS: u32 = 60;
const STORY: Attachment = Slot::Detour.with(Facts::DnsCaptured);
const CHANGED: Attachment = Slot::Detour.with(Facts::AnnotatedOtherwise);

fn kills() -> u32 {
    std::env::var("KILLS").map_or(KILLS, |text| text.parse().expect("KILLS is a number"))
}

/// What killed calls left.
#[derive(Debug, Default)]
struct Count {
    as_before: u32,
    done: u32,
    ended_before: u32,
}

/// One kind of call that is killed.
struct Killed {
    pod: Pod,
    verb: &'static str,
    attachment: Attachment,
    /// What comes before it, outside of what is measured; then again and again.
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

    /// How long the call usually takes if nobody kills it.
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
        // Nothing else waits precisely enough.
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

    /// Whichever call is next, it converges.
    fn go_on(&self, with: u32) {
        let added = || {
            self.pod.add(STORY).done();
            self.pod.check(STORY).done();
            Kernel::of(&self.pod)
        };
        match with % 3 {
            0 => {
                self.pod.del(STORY).done();
                assert!(!Kernel::of(&self.pod).has_rules());
            }
            1 => added().assert_is(&story(), "ADD after a killed call"),
            _ => {
                if let Answer::Refused(code, text) = self.pod.check(self.attachment) {
                    assert!(code == 103 || code == 104, "{code} {text}");
                }
                added().assert_is(&story(), "ADD after CHECK after a killed call");
            }
        }
    }

    fn spread_over_all_instants(mut self) {
        let (kills, longest) = (kills(), self.duration() * 6 / 5);
        for number in 0..kills {
            self.kill_after(longest * number / kills);
            self.go_on(number);
        }
        println!("{kills} {} killed within {longest:?}: {:?}", self.verb, self.count);
        assert!(self.count.as_before > 0 && self.count.done > 0, "the instants miss the work: {:?}", self.count);
        self.pod.del(STORY).done();
        assert!(!Kernel::of(&self.pod).has_rules());
    }
}

fn story() -> Kernel {
    crate::expect::from_scratch(None, &[STORY].into()).expect("accepted")
}

#[test]
fn an_add() {
    on_a_node(|| Killed::new("ADD", STORY, |pod| pod.del(STORY).done()).spread_over_all_instants());
}

#[test]
fn a_changed_add() {
    on_a_node(|| Killed::new("ADD", CHANGED, |pod| pod.add(STORY).done()).spread_over_all_instants());
}

#[test]
fn a_del() {
    on_a_node(|| Killed::new("DEL", STORY, |pod| pod.add(STORY).done()).spread_over_all_instants());
}
