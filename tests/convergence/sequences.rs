//! Generated sequences of calls lead to the expected state.

use crate::attachment::{Attachment, Facts, Slot};
use crate::expect::{Foreign, from_scratch};
use crate::foreign;
use crate::kernel::{Kernel, settings};
use crate::node::on_a_node;
use crate::pod::Pod;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use std::collections::BTreeMap;

/// The number of sequences, unless `PROPTEST_CASES` sets it.
const CASES: u32 = 12;

#[derive(Debug, Clone, Copy)]
enum Step {
    Add(Attachment),
    Del(Slot),
    Check(Slot),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let slot = || select(Slot::ALL.to_vec());
    let facts = select(Facts::ALL.to_vec());
    let step = prop_oneof![
        4 => (slot(), facts).prop_map(|(slot, facts)| Step::Add(slot.with(facts))),
        2 => slot().prop_map(Step::Del),
        1 => slot().prop_map(Step::Check),
    ];
    prop::collection::vec(step, 1..10)
}

struct Run {
    pod: Pod,
    foreign: Foreign,
    present: BTreeMap<Slot, Facts>,
}

impl Run {
    fn expected(&self) -> Kernel {
        let all = self.present.iter().map(|(slot, facts)| slot.with(*facts)).collect();
        from_scratch(self.foreign, &all).expect("they were accepted")
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Add(attachment) => {
                let mut wanted = self.present.clone();
                wanted.insert(attachment.slot, attachment.facts);
                let all = wanted.iter().map(|(slot, facts)| slot.with(*facts)).collect();
                if from_scratch(self.foreign, &all).is_some() {
                    self.pod.add(attachment).done();
                    self.pod.check(attachment).done();
                    self.present = wanted;
                } else {
                    let text = self.pod.add(attachment).refused(7);
                    assert!(text.contains("contradict each other"), "{text}");
                }
            }
            Step::Del(slot) => {
                let facts = self.present.remove(&slot).unwrap_or(Facts::Plain);
                self.pod.del(slot.with(facts)).done();
            }
            Step::Check(slot) => match self.present.get(&slot) {
                Some(facts) => self.pod.check(slot.with(*facts)).done(),
                None => drop(self.pod.check(slot.with(Facts::Plain)).refused(104)),
            },
        }
        Kernel::of(&self.pod).assert_is(&self.expected(), &format!("after {step:?}"));
    }
}

fn sequence(foreign: Foreign, steps: &[Step]) {
    let pod = Pod::new();
    if let Some(load) = foreign {
        load(&pod);
    }
    let before = (Kernel::of(&pod), settings(&pod));
    let mut run = Run { pod, foreign, present: BTreeMap::new() };
    steps.iter().for_each(|step| run.take(*step));
    for slot in Slot::ALL {
        run.take(Step::Del(slot));
    }
    Kernel::of(&run.pod).assert_is(&before.0, "at the end");
    assert_eq!(settings(&run.pod), before.1);
}

fn runner() -> TestRunner {
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { Config::default().cases } else { CASES };
    TestRunner::new(Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() })
}

fn check_sequences(foreign: Foreign) {
    let each = |steps: Vec<Step>| {
        on_a_node(|| sequence(foreign, &steps));
        Ok(())
    };
    runner().run(&steps(), each).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn each_step_leads_to_the_state_of_a_new_pod() {
    check_sequences(None);
}

#[test]
fn each_step_leads_to_the_state_of_a_new_pod_among_foreign_rules() {
    check_sequences(Some(foreign::load));
}
