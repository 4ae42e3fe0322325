//! Finds the paths of control groups by their IDs, which the kernel does not report.

use super::CgroupHierarchy;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::DirEntryExt;

/// The limit of control groups in a search; a node has a few thousand.
const MAX_GROUPS: usize = 50_000;

impl CgroupHierarchy {
    /// Returns the paths of the control groups with these IDs, as far as found, and whether the search was complete: it
    /// examines at most 50,000 control groups.
    #[must_use]
    pub fn find_paths(&self, mut ids: BTreeSet<u64>) -> (BTreeMap<u64, String>, bool) {
        let mut found = BTreeMap::new();
        let mut directories = VecDeque::from([self.mount.clone()]);
        let (mut groups, mut is_complete) = (0, true);
        while let Some(directory) = directories.pop_front().filter(|_| !ids.is_empty()) {
            let entries = fs::read_dir(&directory);
            // A control group can be removed at any time.
            is_complete &= entries.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::NotFound);
            for entry in entries.into_iter().flatten().flatten() {
                if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    continue;
                }
                groups += 1;
                if groups > MAX_GROUPS {
                    return (found, false);
                }
                let path = entry.path();
                // The inode number of a control group is its ID.
                if ids.remove(&entry.ino()) {
                    let below = path.strip_prefix(&self.mount).unwrap_or(&path);
                    found.insert(entry.ino(), format!("/{}", below.to_string_lossy()));
                }
                directories.push_back(path);
            }
        }
        (found, is_complete)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Directory;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn paths_are_found_by_inode_number() {
        let directory = Directory::new("cgroup-search");
        let hierarchy = CgroupHierarchy { mount: directory.join("groups"), proc: directory.join("proc") };
        fs::create_dir_all(hierarchy.mount.join("kubepods/pod/container")).expect("made");
        let id = fs::metadata(hierarchy.mount.join("kubepods/pod")).expect("made").ino();
        let expected = BTreeMap::from([(id, "/kubepods/pod".to_owned())]);
        assert_eq!(hierarchy.find_paths([id, u64::MAX].into()), (expected, true));
    }
}
