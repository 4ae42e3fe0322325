//! Locks: only other calls for the same pod make a call wait.

use crate::attachment::{Attachment, Facts, Slot};
use crate::node::{STATE, on_a_node};
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
