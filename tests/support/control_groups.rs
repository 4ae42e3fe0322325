//! Control groups that tests leave behind.

use std::fs;
use std::path::Path;

/// Removes a control group without processes, and those below it, from all hierarchies.
pub(crate) fn remove_groups(path: &str) {
    // One directory a hierarchy in version 1 of control groups, one for all in version 2.
    let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
    for hierarchy in hierarchies.chain(["/sys/fs/cgroup".into()]) {
        remove_directories(&hierarchy.join(path.trim_start_matches('/')));
    }
}

fn remove_directories(directory: &Path) {
    let below = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    below.filter(|path| path.is_dir()).for_each(|path| remove_directories(&path));
    let _ = fs::remove_dir(directory);
}
