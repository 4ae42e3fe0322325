//! The order of ADDs does not matter, generated sequences of calls lead to the expected state, that of a new pod with the same
//! attachments, concurrent calls succeed, and locks and rules of others don't block calls.

use crate::attachment::{Attachment, Facts, Slot};
use crate::call::Answer;
use crate::kernel::{Kernel, settings};
use crate::node::{STATE, on_a_node};
use crate::pod::Pod;
use nix::sys::stat::{Mode, umask};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Mutex;

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
    check_sequences(Some(load));
}

/// The rules in the pod before the first attachment.
pub(crate) type Foreign = Option<fn(&Pod)>;

/// Returns the state of a new pod after these attachments are added in their own order; `None` if one is refused.
pub(crate) fn from_scratch(foreign: Foreign, attachments: &BTreeSet<Attachment>) -> Option<Kernel> {
    type Known = HashMap<(bool, BTreeSet<Attachment>), Option<Kernel>>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let key = (foreign.is_some(), attachments.clone());
    if let Some(known) = KNOWN.lock().expect("no panic here").get_or_insert_default().get(&key) {
        return known.clone();
    }
    let pod = Pod::new();
    if let Some(load) = foreign {
        load(&pod);
    }
    let accepted = attachments.iter().all(|a| pod.add(*a) == Answer::Done);
    let kernel = accepted.then(|| Kernel::of(&pod));
    attachments.iter().for_each(|a| pod.del(*a).done());
    KNOWN.lock().expect("no panic here").get_or_insert_default().insert(key, kernel.clone());
    kernel
}

const RULES: &str = "*filter
:OTHERS - [0:0]
-A OUTPUT -j OTHERS
-A OTHERS -p tcp -m tcp --dport 25 -j DROP
COMMIT
*nat
:MINE - [0:0]
-A PREROUTING -p tcp -m tcp --dport 7 -j RETURN
-A OUTPUT -m owner --uid-owner 2000 -j RETURN
-A OUTPUT -p tcp -m comment --comment \"not ours\" -j MINE
-A MINE -p tcp -m tcp --dport 9 -j ACCEPT
COMMIT
*raw
-A OUTPUT -p udp -m udp --dport 9 -j NOTRACK
COMMIT
*mangle
-A POSTROUTING -m mark --mark 0x7 -j ACCEPT
COMMIT
";

/// Adds foreign rules of both families to a pod.
pub(crate) fn load(pod: &Pod) {
    for restore in ["iptables-restore", "ip6tables-restore"] {
        pod.tool(restore, &["--noflush"], RULES);
    }
}

/// Redirects a pod like istio-init and istio-cni.
pub(crate) fn redirect(pod: &Pod) {
    pod.tool("iptables-restore", &["--noflush"], include_str!("../golden/istio-dns.v4.rules"));
    pod.tool("ip6tables-restore", &["--noflush"], include_str!("../golden/istio-dns.v6.rules"));
}

/// Rules that administrators insert before, after and between detour's jumps.
const LATER: [&str; 6] = [
    "-t nat -I OUTPUT 1 -m owner --uid-owner 3000 -j RETURN",
    "-t nat -A OUTPUT -p tcp -m tcp --dport 11 -j ACCEPT",
    "-t nat -I OUTPUT 3 -p tcp -m tcp --dport 12 -j MINE",
    "-t nat -I PREROUTING 1 -p tcp -m tcp --dport 13 -j ACCEPT",
    "-t raw -I OUTPUT 2 -p udp -m udp --dport 14 -j NOTRACK",
    "-t filter -A OTHERS -p tcp -m tcp --dport 15 -j DROP",
];

fn insert_later(pod: &Pod) {
    for program in ["iptables", "ip6tables"] {
        for arguments in LATER {
            pod.tool(program, &arguments.split(' ').collect::<Vec<_>>(), "");
        }
    }
}

/// Returns the foreign rules of each netfilter chain, in their order.
fn foreign(kernel: &Kernel, before: &Kernel) -> BTreeMap<String, Vec<String>> {
    let ours = |rule: &String| rule.contains("-j ISTIO_");
    let chains = kernel.rules.iter().filter(|(chain, _)| before.rules.contains_key(*chain));
    chains.map(|(chain, rules)| (chain.clone(), rules.iter().filter(|r| !ours(r)).cloned().collect())).collect()
}

#[test]
fn foreign_rules_do_not_fail_check_and_keep_their_order() {
    let story = Slot::Detour.with(Facts::DnsCaptured);
    on_a_node(|| {
        let pod = Pod::new();
        load(&pod);
        pod.add(story).done();
        insert_later(&pod);
        let inserted = Kernel::of(&pod);
        pod.check(story).done();
        Kernel::of(&pod).assert_is(&inserted, "CHECK changes nothing");
        let expected = foreign(&inserted, &inserted);
        let theirs = [
            "OUTPUT -m owner --uid-owner 3000 -j RETURN",
            "OUTPUT -m owner --uid-owner 2000 -j RETURN",
            "OUTPUT -p tcp -m tcp --dport 12 -j MINE",
            "OUTPUT -p tcp -m comment --comment \"not ours\" -j MINE",
            "OUTPUT -p tcp -m tcp --dport 11 -j ACCEPT",
        ];
        assert_eq!(expected["ip nat OUTPUT"], theirs);
        pod.add(story).done();
        assert_eq!(foreign(&Kernel::of(&pod), &inserted), expected);
        pod.check(story).done();
        pod.add(Slot::Detour.with(Facts::Annotated)).done();
        pod.del(story).done();
        let left = Kernel::of(&pod);
        let ours = |(chain, _): &(String, Vec<String>)| chain.contains("ISTIO_");
        assert_eq!(left.rules, expected.into_iter().filter(|entry| !ours(entry)).collect());
    });
}

fn in_this_order(foreign: Foreign, attachments: &[Attachment]) -> Kernel {
    let pod = Pod::new();
    if let Some(load) = foreign {
        load(&pod);
    }
    attachments.iter().for_each(|attachment| pod.add(*attachment).done());
    let kernel = Kernel::of(&pod);
    attachments.iter().for_each(|attachment| pod.check(*attachment).done());
    attachments.iter().for_each(|attachment| pod.del(*attachment).done());
    kernel
}

fn equals_one_chain(foreign: Foreign, facts: Facts) {
    let (redirect, exclude, both) =
        (Slot::IstioCni.with(facts), Slot::ExcludeDns.with(facts), Slot::Detour.with(facts));
    on_a_node(|| {
        let one = in_this_order(foreign, &[both]);
        in_this_order(foreign, &[redirect, exclude]).assert_is(&one, "istio-cni, excludedns");
        in_this_order(foreign, &[exclude, redirect]).assert_is(&one, "excludedns, istio-cni");
    });
}

/// Beside another tool's redirection, only exclusions are added.
#[test]
fn two_attachments_equal_one_with_both_chains() {
    equals_one_chain(None, Facts::DnsCaptured);
    equals_one_chain(None, Facts::Annotated);
    equals_one_chain(Some(load), Facts::DnsCaptured);
    equals_one_chain(Some(redirect), Facts::DnsCaptured);
}

/// `NONE` means no rules, including exclusions of another attachment.
#[test]
fn interception_none_applies_to_all_attachments() {
    on_a_node(|| {
        let (none, exclude) = (Slot::IstioCni.with(Facts::InterceptionNone), Slot::ExcludeDns.with(Facts::Plain));
        assert!(!in_this_order(None, &[none, exclude]).has_rules());
        assert!(!in_this_order(None, &[exclude, none]).has_rules());
    });
}

#[test]
fn a_contradiction_names_both_attachments_and_the_second_leaves_nothing() {
    let (first, second) = (Slot::IstioCni.with(Facts::Plain), Slot::Detour.with(Facts::Tproxy));
    on_a_node(|| {
        let pod = Pod::new();
        pod.add(first).done();
        let text = pod.add(second).refused(7);
        for part in
            ["istio-cni/net1", "detour/net4", &pod.container_id, "inbound_interception_mode", "redirect", "tproxy"]
        {
            assert!(text.to_lowercase().contains(part), "{part}: {text}");
        }
        Kernel::of(&pod).assert_is(&from_scratch(None, &[first].into()).expect("accepted"), "after the refusal");
        pod.check(first).done();
        pod.check(second).refused(104);
        pod.del(first).done();
    });
}

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

const REDIRECT: Attachment = Slot::Detour.with(Facts::DnsCaptured);

fn locks() -> PathBuf {
    Path::new(STATE).join("locks")
}

/// Every user can open this file in `/run/netns`, and every process of the pod as `/proc/self/ns/net`.
#[test]
fn a_lock_on_the_namespaces_file_does_not_block_calls() {
    on_a_node(|| {
        let pod = Pod::new();
        let file = File::open(pod.netns()).expect("readable");
        file.lock().expect("locked");
        pod.add(REDIRECT).done();
        pod.check(REDIRECT).done();
        pod.del(REDIRECT).done();
        file.unlock().expect("it was locked");
    });
}

#[test]
fn locks_belong_to_root_with_any_umask_and_are_removed() {
    on_a_node(|| {
        // Affects this thread only: a private mount namespace has its own root and umask.
        umask(Mode::empty());
        let pod = Pod::new();
        pod.add(REDIRECT).done();
        let mode = |path: &Path| fs::metadata(path).expect("it exists").permissions().mode() & 0o7777;
        assert_eq!((mode(&locks()), fs::read_dir(locks()).expect("readable").count()), (0o700, 0));
        assert_eq!(mode(&Path::new(STATE).join("attachments")), 0o755);
        pod.del(REDIRECT).done();
    });
}

#[test]
fn the_next_del_of_a_deleted_pod_removes_locks_of_killed_calls() {
    on_a_node(|| {
        let pod = Pod::new();
        pod.add(REDIRECT).done();
        for inode in 0..100 {
            fs::write(locks().join(format!("4-{inode}")), "").expect("writable");
        }
        pod.call_with("DEL", REDIRECT.slot.ifname(), &REDIRECT.configuration(), "").done();
    });
}
