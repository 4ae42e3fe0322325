//! The order of ADDs does not matter, concurrent calls succeed, and locks of others don't block calls.
//! `faults` makes many calls for one attachment.

use crate::attachment::{Attachment, Facts, Slot};
use crate::expect::{Foreign, from_scratch};
use crate::foreign;
use crate::kernel::Kernel;
use crate::node::{STATE, on_a_node};
use crate::pod::Pod;
use nix::sys::stat::{Mode, umask};
use std::fs;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

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

#[test]
fn two_attachments_equal_one_with_both_chains() {
    equals_one_chain(None, Facts::DnsCaptured);
    equals_one_chain(None, Facts::Annotated);
}

#[test]
fn two_attachments_equal_one_among_foreign_rules() {
    equals_one_chain(Some(foreign::load), Facts::DnsCaptured);
}

/// Beside another tool's redirection, only exclusions are added, in whatever order the attachments are added.
#[test]
fn two_attachments_equal_one_beside_a_foreign_redirection() {
    equals_one_chain(Some(foreign::redirect), Facts::DnsCaptured);
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
        let start = Instant::now();
        pod.add(REDIRECT).done();
        pod.check(REDIRECT).done();
        pod.del(REDIRECT).done();
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
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
