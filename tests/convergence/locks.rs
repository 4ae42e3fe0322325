//! Locks: only other calls for the same pod make a call wait.

use crate::attachment::{Attachment, Facts, Slot};
use crate::kernel::Kernel;
use crate::node::{STATE, left_in_state, on_a_node, on_a_node_with};
use crate::pod::Pod;
use nix::sys::stat::{Mode, umask};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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
fn without_locks_add_fails_and_del_succeeds() {
    on_a_node_with("size=1m", || {
        let (with, without) = (Pod::new(), Pod::new());
        with.add(REDIRECT).done();
        fs::remove_dir(locks()).expect("empty");
        fs::write(locks(), "").expect("writable");
        let before = Kernel::of(&without);
        let error = without.add(REDIRECT).refused(5);
        assert!(error.contains("can't lock it: /run/detour/locks"), "{error}");
        Kernel::of(&without).assert_is(&before, "an ADD that was refused");
        with.check(REDIRECT).done();
        with.del(REDIRECT).done();
        assert!(!Kernel::of(&with).has_rules());
        without.del(REDIRECT).done();
        fs::remove_file(locks()).expect("exists");
        assert_eq!(left_in_state(), Vec::<PathBuf>::new());
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
