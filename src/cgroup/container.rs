//! The control group of a container. It must have the container's ID in its path: a group of the whole pod, or that of
//! another container whose first process has a reused PID, would let other traffic bypass the sidecar. Also the paths of
//! control groups by their IDs, which the kernel does not report.

use super::{CgroupHierarchy, MAX_PROC_FILE};
use crate::cni::{Code, Error};
use crate::host_path::HostPath;
use crate::trusted_file::read_text;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Display;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::DirEntryExt;

/// The default parent of a scope (systemd.special(7)).
const DEFAULT_SLICE: &str = "system.slice";

/// The control group of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerGroup {
    /// Its ID: the number that the kernel compares in `socket cgroupv2`.
    pub id: u64,
    /// Its path below the hierarchy's root.
    pub path: String,
}

impl CgroupHierarchy {
    /// Returns the control group of the container `id`, by the runtime's `cgroups_path` or, if that does not exist, by
    /// one of its processes. `pid` is 0 if no process is known.
    ///
    /// # Errors
    /// [`Code::Io`]: neither leads to a control group with the container's ID in its path.
    pub fn container(&self, id: &str, cgroups_path: &str, pid: u32) -> Result<ContainerGroup, Error> {
        let path = path_of(cgroups_path);
        let own = path.as_deref().and_then(|path| of_container(path, id));
        let found =
            own.map(|path| Ok::<_, std::io::Error>(ContainerGroup { id: self.find_id(path)?, path: path.to_owned() }));
        match found {
            Some(Ok(group)) => Ok(group),
            // A runtime with the driver cgroupfs puts SLICE:PREFIX:NAME below its own control group.
            _ if pid != 0 => self.container_of_process(id, pid),
            Some(Err(error)) => Err(self.unknown(cgroups_path, &error)),
            None if path.is_some() => {
                Err(self.unknown(cgroups_path, &format_args!("expected the container's ID {id} in the path")))
            }
            None => Err(self.unknown(cgroups_path, &"expected an absolute path without \"..\", or SLICE:PREFIX:NAME")),
        }
    }

    /// Returns the control group of the container `id`, which the process is in or below.
    ///
    /// # Errors
    /// [`Code::Io`]: the process does not exist, it is not in a control group of the container, or this process can't see
    /// its control group.
    pub fn container_of_process(&self, id: &str, pid: u32) -> Result<ContainerGroup, Error> {
        let file = self.proc.join(pid.to_string()).join("cgroup");
        let failed = |why: &dyn Display| {
            Error::new(Code::Io, format!("can't find the control group of process {pid}: {}: {why}", file.display()))
        };
        let text = read_text(&file, MAX_PROC_FILE).map_err(|error| failed(&error))?;
        let path = path_of_process(&text).ok_or_else(|| failed(&"expected a line 0::PATH"))?;
        let own = of_container(path, id)
            .ok_or_else(|| failed(&format_args!("expected the container's ID {id} in the path, got {path:?}")))?;
        Ok(ContainerGroup { id: self.id(own)?, path: own.to_owned() })
    }

    /// Returns whether the control group of a container still exists.
    #[must_use]
    pub fn has_container(&self, group: &ContainerGroup) -> bool {
        self.find_id(&group.path).is_ok_and(|id| id == group.id)
    }

    /// Returns whether a process is in the control group at `path` or below it; `None` if the group does not exist.
    #[must_use]
    pub fn is_populated(&self, path: &str) -> Option<bool> {
        let events = self.mount.join(path.trim_start_matches('/')).join("cgroup.events");
        let text = read_text(&events, MAX_PROC_FILE).ok()?;
        text.lines().find_map(|line| line.strip_prefix("populated ")).map(|value| value != "0")
    }
}

/// Returns the part of a path that ends with the control group of the container `id`: runtimes call it `ID`,
/// `PREFIX-ID.scope`, `PREFIX-ID` or `SLICE:PREFIX:ID`. A container may create groups of any name below its own.
fn of_container<'a>(path: &'a str, id: &str) -> Option<&'a str> {
    let is_own = |part: &str| {
        let before = part.strip_suffix(".scope").unwrap_or(part).strip_suffix(id);
        before.is_some_and(|before| before.is_empty() || before.ends_with(['-', ':', '_']))
    };
    let mut end = 0;
    path.split('/').find_map(|part| {
        end += part.len() + 1;
        (!id.is_empty() && is_own(part)).then(|| &path[..end - 1])
    })
}

/// Returns the path below the hierarchy's root of a runtime's `cgroups_path` (OCI runtime specification,
/// config-linux.md): a path, or `SLICE:PREFIX:NAME` of the systemd driver; `None` if it is neither.
fn path_of(cgroups_path: &str) -> Option<String> {
    if cgroups_path.starts_with('/') {
        return HostPath::new(cgroups_path).map(|path| path.to_string());
    }
    let [slice, prefix, name] = <[&str; 3]>::try_from(cgroups_path.split(':').collect::<Vec<_>>()).ok()?;
    let is_part = |part: &str| !part.contains('/') && part != "..";
    if name.is_empty() || !is_part(name) || !is_part(prefix) {
        return None;
    }
    let parent = slice_path(if slice.is_empty() { DEFAULT_SLICE } else { slice })?;
    Some(match name.ends_with(".slice") {
        true => format!("{parent}/{name}"),
        false => format!("{parent}/{prefix}-{name}.scope"),
    })
}

/// Returns the path of a slice: systemd puts `a-b.slice` below `a.slice` (systemd.slice(5)); `None` for an invalid name.
fn slice_path(slice: &str) -> Option<String> {
    let name = slice.strip_suffix(".slice")?;
    if name == "-" {
        return Some(String::new());
    }
    if name.contains('/') || name.split('-').any(str::is_empty) {
        return None;
    }
    let ends = name.match_indices('-').map(|(at, _)| at).chain([name.len()]);
    Some(ends.map(|end| format!("/{}.slice", &name[..end])).collect())
}

/// Returns the path of a process in the unified hierarchy, from `/proc/PID/cgroup`.
fn path_of_process(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::"))
}

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
    use super::super::tests::{Group, real};
    use super::*;
    use crate::scratch::Directory;
    use std::os::unix::fs::MetadataExt;

    const ID: &str = "6f1b1e3a0f4f7c1c6c1d1b0a7a6d3f5e8b9c0d1e2f3a4b5c6d7e8f9a0b1c2d3e";
    const POD: &str = "8e5bd6a4_9a35_4f0e_9d2b_1c33a5b0a001";

    #[test]
    fn paths_of_both_drivers_and_runtimes_are_translated() {
        let slices = "/kubepods.slice/kubepods-burstable.slice";
        for (cgroups_path, expected) in [
            (format!("/kubepods/burstable/pod{POD}/{ID}"), format!("/kubepods/burstable/pod{POD}/{ID}")),
            (format!("/kubepods/pod{POD}/crio-{ID}"), format!("/kubepods/pod{POD}/crio-{ID}")),
            (
                format!("kubepods-burstable-pod{POD}.slice:cri-containerd:{ID}"),
                format!("{slices}/kubepods-burstable-pod{POD}.slice/cri-containerd-{ID}.scope"),
            ),
            (
                format!("kubepods-pod{POD}.slice:crio:{ID}"),
                format!("/kubepods.slice/kubepods-pod{POD}.slice/crio-{ID}.scope"),
            ),
            // A kubelet with its own control group (kind).
            (
                format!("kubelet-kubepods-burstable-pod{POD}.slice:cri-containerd:{ID}"),
                format!(
                    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/\
                     kubelet-kubepods-burstable-pod{POD}.slice/cri-containerd-{ID}.scope"
                ),
            ),
            (format!(":runc:{ID}"), format!("/system.slice/runc-{ID}.scope")),
            (format!("-.slice:runc:{ID}"), format!("/runc-{ID}.scope")),
            ("a.slice::own.slice".to_owned(), "/a.slice/own.slice".to_owned()),
        ] {
            assert_eq!(path_of(&cgroups_path), Some(expected), "{cgroups_path}");
        }
    }

    #[test]
    fn a_path_that_leaves_the_hierarchy_or_has_another_form_is_refused() {
        for cgroups_path in [
            "",
            "kubepods/pod",
            "/kubepods/../../etc",
            "a/b.slice:crio:id",
            "a.slice:crio:../id",
            "a.slice:../crio:id",
            "a--b.slice:crio:id",
            "-a.slice:crio:id",
            "a:crio:id",
            ".slice:crio:id",
            "a.slice:crio:",
            "a.slice:crio:id:more",
        ] {
            assert_eq!(path_of(cgroups_path), None, "{cgroups_path}");
        }
    }

    #[test]
    fn the_path_of_a_process_is_that_of_the_unified_hierarchy() {
        let hybrid = "9:name=systemd:/other\n1:cpu:/other\n0::/kubepods/a:b\n";
        assert_eq!(path_of_process(hybrid), Some("/kubepods/a:b"));
        assert_eq!(path_of_process("1:cpu:/other\n"), None);
    }

    #[test]
    fn the_outermost_group_with_the_containers_id_is_its_own() {
        let slice = format!("/kubepods.slice/kubepods-pod{POD}.slice");
        for (own, below) in [
            (format!("/kubepods/burstable/pod{POD}/{ID}"), ""),
            (format!("{slice}/cri-containerd-{ID}.scope"), "/init.scope"),
            (format!("{slice}/crio-{ID}.scope"), "/container"),
            (format!("/kubepods/pod{POD}/crio-{ID}"), ""),
            (format!("/system.slice/containerd.service/kubepods-pod{POD}.slice:cri-containerd:{ID}"), ""),
            (format!("/kubepods/pod{POD}/kata_{ID}"), "/b"),
        ] {
            assert_eq!(of_container(&format!("{own}{below}"), ID), Some(own.as_str()));
        }
        let other = ID.replace('6', "7");
        for path in [
            &slice,
            "/",
            "",
            &format!("{slice}/crio-{other}.scope"),
            &format!("{slice}/x{ID}"),
            &format!("{slice}/{ID}x"),
        ] {
            assert_eq!(of_container(path, ID), None, "{path}");
        }
        assert_eq!(of_container("/a/b", ""), None);
    }

    #[test]
    fn a_container_is_found_by_its_path_or_its_process_and_never_in_another_group() {
        let hierarchy = real();
        let (group, pod) = (Group::new(&hierarchy, "process"), Group::new(&hierarchy, "pod"));
        let id = group.path().replace("/detour-", "");
        let mut process = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let enter = |group: &Group| group.take(process.id());
        let unresolvable = format!("kubepods-pod1.slice:cri-containerd:{id}");
        let by_path = hierarchy.container(&id, &group.path(), 0).expect("found");
        assert_eq!((by_path.id, hierarchy.is_populated(&by_path.path)), (group.id(), Some(false)));
        enter(&group);
        for path in [unresolvable.as_str(), pod.path().as_str(), ""] {
            assert_eq!(hierarchy.container(&id, path, process.id()).as_ref(), Ok(&by_path), "{path:?}");
        }
        assert_eq!(hierarchy.is_populated(&by_path.path), Some(true));
        enter(&pod);
        let failed = |path: &str, pid| hierarchy.container(&id, path, pid).expect_err("refused").msg;
        let expected = format!("expected the container's ID {id} in the path");
        for text in [failed(&unresolvable, process.id()), failed(&pod.path(), process.id()), failed(&pod.path(), 0)] {
            assert!(text.contains(&expected), "{text}");
        }
        process.kill().and_then(|()| process.wait()).expect("ended");
        assert!(failed(&unresolvable, 0).contains(&unresolvable));
        assert!(failed(&unresolvable, process.id()).starts_with("can't find the control group of process"));
        assert!(hierarchy.has_exited(process.id()) && !hierarchy.has_exited(1) && !hierarchy.has_exited(0));
        assert!(hierarchy.has_container(&by_path));
        drop(group);
        assert!(!hierarchy.has_container(&by_path) && hierarchy.is_populated(&by_path.path).is_none());
    }

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
