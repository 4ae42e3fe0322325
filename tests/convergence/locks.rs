//! Who can keep calls for a pod waiting: other calls for it alone.

use crate::attachment::{Attachment, Facts, Slot};
use crate::kernel::Kernel;
use crate::node::{STATE, left_in_state, on_a_node, on_a_node_with};
use crate::pod::Pod;
use nix::sys::stat::{Mode, umask};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const STORY: Attachment = Slot::Detour.with(Facts::DnsCaptured);

fn locks() -> PathBuf {
    Path::new(STATE).join("locks")
}

/// Every user can open it below `/run/netns`, and every process of the pod at `/proc/self/ns/net`.
#[test]
fn a_lock_on_the_namespace_s_own_file_keeps_no_call_waiting() {
    on_a_node(|| {
        let pod = Pod::new();
        let file = File::open(pod.netns()).expect("readable");
        file.lock().expect("locked");
        let start = Instant::now();
        pod.add(STORY).done();
        pod.check(STORY).done();
        pod.del(STORY).done();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        file.unlock().expect("it was locked");
    });
}

#[test]
fn locks_are_root_s_whatever_the_umask_and_none_stays() {
    on_a_node(|| {
        // Of this thread alone: it has its own root and umask since it has its own mounts.
        umask(Mode::empty());
        let pod = Pod::new();
        pod.add(STORY).done();
        let mode = |path: &Path| fs::metadata(path).expect("it exists").permissions().mode() & 0o7777;
        assert_eq!((mode(&locks()), fs::read_dir(locks()).expect("readable").count()), (0o700, 0));
        assert_eq!(mode(&Path::new(STATE).join("attachments")), 0o755);
        pod.del(STORY).done();
    });
}

#[test]
fn without_locks_nothing_is_added_and_all_is_removed() {
    on_a_node_with("size=1m", || {
        let (with, without) = (Pod::new(), Pod::new());
        with.add(STORY).done();
        fs::remove_dir(locks()).expect("empty");
        fs::write(locks(), "").expect("writable");
        let before = Kernel::of(&without);
        let error = without.add(STORY).refused(5);
        assert!(error.contains("can't lock it: /run/detour/locks"), "{error}");
        Kernel::of(&without).assert_is(&before, "an ADD that was refused");
        with.check(STORY).done();
        with.del(STORY).done();
        assert!(!Kernel::of(&with).has_rules());
        without.del(STORY).done();
        fs::remove_file(locks()).expect("it is there");
        assert_eq!(left_in_state(), Vec::<PathBuf>::new());
    });
}

#[test]
fn locks_of_killed_calls_go_with_the_next_del_of_a_pod_that_is_gone() {
    on_a_node(|| {
        let pod = Pod::new();
        pod.add(STORY).done();
        for inode in 0..100 {
            fs::write(locks().join(format!("4-{inode}")), "").expect("writable");
        }
        pod.call_with("DEL", STORY.slot.ifname(), &STORY.configuration(), "").done();
    });
}
