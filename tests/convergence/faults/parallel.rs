//! Many calls at the same time, in many pods and in one.

use super::call::{Answer, Call, Ended, ended};
use super::subject::{Mode, Subject, Verb};
use crate::node::on_a_node_with;
use serde_json::json;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

/// The number of concurrent calls.
const MANY: usize = 40;

/// Runs calls at the same time.
fn together(calls: &[Call]) -> Vec<Ended> {
    let children: Vec<_> = calls.iter().map(Call::start).collect();
    children.into_iter().map(|child| ended(child, LIMIT)).collect()
}

fn is_right(call: &str, ended: &Ended, codes: &[u64]) {
    ended.is_refused(codes).unwrap_or_else(|why| panic!("{call}: {why}: {ended:?}"));
}

#[test]
fn in_many_pods() {
    on_a_node_with("size=256m", || {
        for (mode, dialect) in [(Mode::Redirect, "iptables"), (Mode::Primary, "nftables")] {
            let first = Subject::new(mode, dialect);
            let subjects: Vec<Subject> = (0..MANY).map(|_| first.another()).collect();
            for verb in [Verb::Add, Verb::Check, Verb::AddChanged, Verb::Del] {
                let calls: Vec<Call> = subjects.iter().map(|subject| subject.call(verb)).collect();
                for (subject, ended) in subjects.iter().zip(together(&calls)) {
                    is_right(verb.name(), &ended, &[0]);
                    subject.left(verb, &ended).unwrap_or_else(|why| panic!("{} ({mode:?}): {why}", verb.name()));
                }
            }
            for subject in &subjects {
                subject.assert_nothing_is_left("all DELs");
            }
        }
    });
}

/// An attachment with its own rule.
fn attachment(subject: &Subject, verb: &str, number: usize) -> Call {
    let chain = json!([{ "type": "uid-exclude", "uids": [2 * number + 5000] }]);
    let configuration = json!({
        "cniVersion": "1.0.0", "name": format!("exclude-{number}"), "type": "detour", "chain": chain,
        "dialect": subject.dialect,
    });
    let netns = subject.pod.netns().display().to_string();
    Call::new(verb, &subject.pod.container_id, &netns, "net1", &configuration)
}

/// A container has at most 32 attachments.
#[test]
fn in_one_pod() {
    on_a_node_with("size=64m", || {
        let subject = Subject::new(Mode::Redirect, "nftables");
        let mut numbers: Vec<usize> = (0..MANY).collect();
        for (verb, codes) in [("ADD", &[0, 7, 11][..]), ("CHECK", &[0]), ("DEL", &[0])] {
            let calls: Vec<Call> = numbers.iter().map(|number| attachment(&subject, verb, *number)).collect();
            let all = together(&calls);
            all.iter().for_each(|ended| is_right(verb, ended, codes));
            numbers =
                numbers.into_iter().zip(&all).filter(|(_, e)| e.answer == Answer::Done).map(|(at, _)| at).collect();
            assert!((1..=32).contains(&numbers.len()), "expected at most 32 attachments, got {}", numbers.len());
        }
        subject.assert_nothing_is_left("all DELs");
    });
}

#[test]
fn add_check_and_del_of_one_attachment() {
    on_a_node_with("size=64m", || {
        for (mode, dialect) in [(Mode::Redirect, "iptables"), (Mode::Tproxy, "nftables")] {
            let subject = Subject::new(mode, dialect);
            let verbs: Vec<Verb> =
                (0..MANY).map(|at| [Verb::Add, Verb::Check, Verb::AddChanged, Verb::Del][at % 4]).collect();
            let calls: Vec<Call> = verbs.iter().map(|verb| subject.call(*verb)).collect();
            for (verb, ended) in verbs.iter().zip(together(&calls)) {
                let codes: &[u64] = match verb {
                    Verb::Check => &[0, 11, 103, 104],
                    Verb::Del => &[0],
                    _ => &[0, 11],
                };
                is_right(verb.name(), &ended, codes);
            }
            let now = subject.read();
            let is_whole =
                [&subject.none, &subject.added, &subject.changed].iter().any(|state| now.has_same_rules(state));
            let kernel = crate::kernel::Kernel::of(&subject.pod);
            assert!(is_whole, "the calls left a part of the rules: {kernel:?}");
            subject.completes("concurrent calls").unwrap_or_else(|why| panic!("{why}"));
        }
    });
}
