//! A node with a private state directory of the plugin.

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use std::path::{Path, PathBuf};

/// The plugin's state directory.
pub(crate) const STATE: &str = "/run/detour";

/// Runs `work` with an empty private file system at [`STATE`], and checks that `work` leaves nothing there.
pub(crate) fn on_a_node<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    on_a_node_with("size=64m", || {
        let done = work();
        assert_eq!(left_in_state(), Vec::<PathBuf>::new(), "state is left");
        done
    })
}

/// Runs `work` as [`on_a_node`] with mount options, without checking what it leaves.
pub(crate) fn on_a_node_with<T: Send>(options: &str, work: impl FnOnce() -> T + Send) -> T {
    let on_thread = || {
        make_private(STATE, options);
        work()
    };
    std::thread::scope(|scope| scope.spawn(on_thread).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Mounts an empty file system for this thread and the processes that it starts.
pub(crate) fn make_private(path: &str, options: &str) {
    std::fs::create_dir_all(path).expect("needs root");
    unshare(CloneFlags::CLONE_NEWNS).expect("needs CAP_SYS_ADMIN");
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("mounts can be made private");
    mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(options)).expect("a tmpfs");
}

/// Returns all files below [`STATE`], including locks, and the directories of containers.
pub(crate) fn left_in_state() -> Vec<PathBuf> {
    let mut found = Vec::new();
    collect(Path::new(STATE), &mut found);
    found.retain(|path| !["attachments", "locks"].iter().any(|name| path == &Path::new(STATE).join(name)));
    found
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            collect(&path, found);
        }
        found.push(path);
    }
}
