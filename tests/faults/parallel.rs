//! Many calls at the same time, in many pods and in one.

use crate::call::{Answer, Call, Ended, ended};
use crate::node::on_a_node_with;
use crate::subject::{Mode, Subject, Verb};
use crate::table::{Table, is_complete, is_done, is_refused};
use serde_json::json;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);

/// Returns the number of concurrent calls.
fn many() -> usize {
    if is_complete() { 200 } else { 40 }
}

/// Runs calls at the same time. Each took until then.
fn together(calls: &[Call]) -> Vec<Ended> {
    let started = Instant::now();
    let children: Vec<_> = calls.iter().map(Call::start).collect();
    let wait = |child| Ended { took: started.elapsed(), ..ended(child, LIMIT) };
    children.into_iter().map(wait).map(|ended| Ended { took: started.elapsed(), ..ended }).collect()
}

#[test]
fn in_many_pods() {
    let mut table = Table::new("parallel");
    let fault = format!("{} pods at the same time", many());
    on_a_node_with("size=256m", || {
        for (mode, dialect) in [(Mode::Redirect, "iptables"), (Mode::Tproxy, "nftables"), (Mode::Primary, "nftables")] {
            let first = Subject::new(mode, dialect);
            let subjects: Vec<Subject> = (0..many()).map(|_| first.another()).collect();
            for verb in [Verb::Add, Verb::Check, Verb::AddChanged, Verb::Del] {
                let calls: Vec<Call> = subjects.iter().map(|subject| subject.call(verb)).collect();
                for (subject, ended) in subjects.iter().zip(together(&calls)) {
                    let (left, mut verdict) = subject.left(verb, &ended);
                    verdict = verdict.and_then(|()| is_done(&ended));
                    table.add(&fault, &format!("{} ({mode:?}, {dialect})", verb.name()), &ended, &left, verdict);
                }
            }
            for subject in &subjects {
                subject.assert_nothing_is_left("all DELs");
            }
        }
    });
    table.end();
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
    let mut table = Table::new("parallel");
    let fault = format!("{} attachments of one pod at the same time", many());
    on_a_node_with("size=64m", || {
        for dialect in ["iptables", "nftables"] {
            let subject = Subject::new(Mode::Redirect, dialect);
            let mut accepted: Vec<usize> = Vec::new();
            for verb in ["ADD", "CHECK", "DEL"] {
                let numbers: Vec<usize> = if verb == "CHECK" { accepted.clone() } else { (0..many()).collect() };
                let calls: Vec<Call> = numbers.iter().map(|number| attachment(&subject, verb, *number)).collect();
                let all = together(&calls);
                if verb == "ADD" {
                    let is_accepted = |(_, ended): &(usize, &Ended)| ended.answer == Answer::Done;
                    accepted = (0..).zip(&all).filter(is_accepted).map(|(number, _)| number).collect();
                }
                for ended in all {
                    let verdict = is_refused(&ended, if verb == "ADD" { &[0, 7, 11] } else { &[0] });
                    let left = match (verb, ended.answer == Answer::Done) {
                        ("DEL", _) | (_, false) => "nothing",
                        _ => "its rules",
                    };
                    table.add(&fault, &format!("{verb} ({dialect})"), &ended, left, verdict);
                }
            }
            assert!((1..=32).contains(&accepted.len()), "expected at most 32 attachments, got {}", accepted.len());
            subject.assert_nothing_is_left("all DELs");
        }
    });
    table.end();
}

#[test]
fn add_check_and_del_of_one_attachment() {
    let mut table = Table::new("parallel");
    let fault = format!("{} calls for one attachment at the same time", many());
    on_a_node_with("size=64m", || {
        for (mode, dialect) in [(Mode::Redirect, "iptables"), (Mode::Tproxy, "nftables")] {
            let subject = Subject::new(mode, dialect);
            let verbs: Vec<Verb> =
                (0..many()).map(|at| [Verb::Add, Verb::Check, Verb::AddChanged, Verb::Del][at % 4]).collect();
            let calls: Vec<Call> = verbs.iter().map(|verb| subject.call(*verb)).collect();
            for (verb, ended) in verbs.iter().zip(together(&calls)) {
                let codes: &[u64] = match verb {
                    Verb::Check => &[0, 11, 103, 104],
                    Verb::Del => &[0],
                    _ => &[0, 11],
                };
                let verdict = is_refused(&ended, codes);
                table.add(&fault, &format!("{} ({dialect})", verb.name()), &ended, "all rules or none", verdict);
            }
            let now = subject.read();
            let is_whole =
                [&subject.none, &subject.added, &subject.changed].iter().any(|state| now.has_same_rules(state));
            let kernel = crate::kernel::Kernel::of(&subject.pod);
            assert!(is_whole, "the calls left a part of the rules: {kernel:?}");
            subject.completes("concurrent calls").unwrap_or_else(|why| panic!("{why}"));
        }
    });
    table.end();
}
