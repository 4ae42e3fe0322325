//! Concurrent calls of different commands in one pod. `faults::parallel` makes many calls for one attachment, and in many pods.

use crate::attachment::{Attachment, Facts, Slot};
use crate::call::Answer;
use crate::expect::from_scratch;
use crate::kernel::Kernel;
use crate::node::on_a_node;
use crate::pod::Pod;
use std::process::Child;

/// Without DNS capture, so that it needs fewer tables than an attachment with exclusions only.
const PLAIN: Attachment = Slot::Detour.with(Facts::Plain);
const OTHER: Attachment = Slot::ExcludeDns.with(Facts::Plain);
const REPETITIONS: u32 = 8;

/// Waits for all calls; none may fail.
fn all_succeed(calls: impl IntoIterator<Item = Child>) {
    for call in calls.into_iter().collect::<Vec<_>>() {
        let output = call.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn concurrent_calls_of_different_commands_in_one_pod_succeed() {
    on_a_node(|| {
        let only = |attachment| from_scratch(None, &[attachment].into()).expect("accepted");
        let (story, other) = (only(PLAIN), only(OTHER));
        let pod = Pod::new();
        let without_netns = |verb, attachment: Attachment| {
            pod.start_with(verb, attachment.slot.ifname(), &attachment.configuration(), "")
        };
        pod.add(OTHER).done();
        for _ in 0..REPETITIONS {
            all_succeed([pod.start("ADD", PLAIN), pod.start("DEL", OTHER)]);
            Kernel::of(&pod).assert_is(&story, "ADD of one and DEL of the other");
            all_succeed([pod.start("DEL", PLAIN), pod.start("ADD", OTHER)]);
            Kernel::of(&pod).assert_is(&other, "DEL of one and ADD of the other");
            // A second DEL without a namespace removes the directory that an ADD is about to write to.
            all_succeed([pod.start("DEL", OTHER), without_netns("DEL", PLAIN)]);
            all_succeed([pod.start("ADD", OTHER), without_netns("DEL", PLAIN), without_netns("DEL", PLAIN)]);
            Kernel::of(&pod).assert_is(&other, "ADD of one and DELs of the other");
        }
        pod.del(OTHER).done();
        assert!(!Kernel::of(&pod).has_rules());
    });
}

/// An ADD without rules takes a shorter path; concurrent ADDs must still see it.
#[test]
fn an_add_with_interception_none_prevents_the_rules_of_a_concurrent_add() {
    on_a_node(|| {
        let none = Slot::IstioCni.with(Facts::InterceptionNone);
        for _ in 0..REPETITIONS {
            let pod = Pod::new();
            all_succeed([pod.start("ADD", none), pod.start("ADD", OTHER)]);
            assert!(!Kernel::of(&pod).has_rules());
            assert_eq!(pod.check(OTHER), Answer::Done);
            all_succeed([pod.start("DEL", none), pod.start("DEL", OTHER)]);
        }
    });
}
