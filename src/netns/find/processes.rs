//! The node's processes that belong to a pod or container, according to their control groups: kubelet and the
//! runtimes write pod and container into the cgroup path, in a form that depends on the cgroup driver.
//!
//! | driver | pod (kubelet, `pkg/kubelet/cm`) | container (containerd, CRI-O) |
//! |---|---|---|
//! | cgroupfs | `/kubepods/burstable/podUID` | `/ID` |
//! | systemd | `/kubepods.slice/…/kubepods-burstable-podUID.slice`, `_` for `-` | `/cri-containerd-ID.scope`, `/crio-ID.scope` |
//!
//! If kubelet uses the systemd driver and containerd does not, containerd writes `…-podUID.slice:cri-containerd:ID`.

use crate::cni::{Code, Error};
use crate::netns::namespace::NetNs;
use crate::trusted_file::read_text;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A process of a pod or container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContainerProcess {
    pid: u32,
    /// When it started, in clock ticks after boot (proc_pid_stat(5), `starttime`).
    started: u64,
    pub(super) owner: CgroupOwner,
    directory: PathBuf,
}

/// A process with the network namespace that it is in.
#[derive(Debug)]
pub(super) struct NetnsProcess {
    /// `process PID (NAME)`, as text for people.
    pub(super) name: String,
    /// Whether it is the pause process, which never changes its network namespace.
    pub(super) is_pause: bool,
    pub(super) owner: CgroupOwner,
    pub(super) netns: NetNs,
}

/// The most that is read of a file below `/proc/PID`. The kernel limits `stat` and `comm` to a page; `cgroup` has a
/// path of at most 4 KiB for each hierarchy.
const MAX_PROC_FILE: u64 = 256 << 10;

/// The names of the pause process: `pause` in Kubernetes' image, `pod` in OpenShift's.
const PAUSE: [&str; 2] = ["pause", "pod"];

/// How many of a container's oldest processes are kept, since some may end before they are examined. A container
/// can start any number of processes.
const MAX_OLDEST: usize = 8;

/// Returns the oldest processes of each pod and container below `proc`, sorted by age, without CRI-O's monitors.
///
/// # Errors
/// The directory can't be listed.
pub(super) fn container_processes(proc: &Path) -> Result<Vec<ContainerProcess>, Error> {
    let failed = |error| {
        let msg = format!("can't list the processes in {}: {error}; mount the node's /proc there", proc.display());
        Error::new(Code::Io, msg)
    };
    let entries = fs::read_dir(proc).map_err(failed)?;
    Ok(oldest(entries.flatten().filter_map(|entry| ContainerProcess::read(entry.path()))))
}

fn oldest(all: impl Iterator<Item = ContainerProcess>) -> Vec<ContainerProcess> {
    let age = |process: &ContainerProcess| (process.started, process.pid);
    let mut by_owner: HashMap<CgroupOwner, Vec<ContainerProcess>> = HashMap::new();
    for process in all {
        let of_owner = by_owner.entry(process.owner.clone()).or_default();
        of_owner.push(process);
        if of_owner.len() == 2 * MAX_OLDEST {
            of_owner.sort_unstable_by_key(age);
            of_owner.truncate(MAX_OLDEST);
        }
    }
    let mut all: Vec<ContainerProcess> = by_owner.into_values().flatten().collect();
    all.sort_unstable_by_key(age);
    all
}

impl ContainerProcess {
    /// Reads a process directory; `None` if the process has ended or belongs to no pod and no container.
    fn read(directory: PathBuf) -> Option<Self> {
        let pid = directory.file_name()?.to_str()?.parse().ok()?;
        let owner = CgroupOwner::parse(&read_text(&directory.join("cgroup"), MAX_PROC_FILE).ok()?)?;
        if owner.is_monitor {
            return None;
        }
        let stat = read_text(&directory.join("stat"), MAX_PROC_FILE).ok()?;
        Some(Self { pid, started: started(&stat)?, owner, directory })
    }

    /// Opens the network namespace of the process; `None` if the process has ended.
    ///
    /// # Errors
    /// The namespace can't be opened.
    pub(super) fn netns(&self) -> Result<Option<NetnsProcess>, Error> {
        let Some(netns) = NetNs::open(&self.directory.join("ns/net"))? else { return Ok(None) };
        let name = read_text(&self.directory.join("comm"), MAX_PROC_FILE).unwrap_or_default();
        let name = name.trim_end();
        let is_pause = PAUSE.contains(&name);
        Ok(Some(NetnsProcess {
            // A process chooses its own name.
            name: format!("process {} ({})", self.pid, name.escape_debug()),
            is_pause,
            owner: self.owner.clone(),
            netns,
        }))
    }
}

/// Parses `starttime`, the 22nd field. The second field is a name that may contain blanks and brackets.
fn started(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The pod and container that a control group belongs to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct CgroupOwner {
    /// The pod's UID as in the API; for a static pod, kubelet's hash of its manifest.
    pub(super) pod_uid: Option<String>,
    /// The container ID.
    pub(super) container: Option<String>,
    /// Whether the process is CRI-O's monitor, which is in the pod's control group but not in its namespaces.
    pub(super) is_monitor: bool,
}

/// The number of hexadecimal digits in the container IDs of containerd and CRI-O.
const ID_LENGTH: usize = 64;
const MONITOR: &str = "crio-conmon-";

impl CgroupOwner {
    /// Parses `/proc/PID/cgroup` (cgroups(7)); `None` if it names neither a pod nor a container, or its hierarchies
    /// disagree.
    fn parse(text: &str) -> Option<Self> {
        let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        let mut owners = paths.map(Self::parse_path).filter(|owner| *owner != Self::default());
        let first = owners.next()?;
        owners.all(|other| other == first).then_some(first)
    }

    /// Parses a cgroup path. The outermost pod counts: a container may create groups of any name below its own.
    fn parse_path(path: &str) -> Self {
        let mut parts = path.split(['/', ':']).filter(|part| !part.is_empty());
        let pod = parts.clone().position(|part| pod_uid(part).is_some());
        let Some(pod) = pod else {
            return Self { container: parts.find_map(container_id), ..Self::default() };
        };
        let mut parts = parts.skip(pod);
        let pod_uid = parts.next().and_then(pod_uid);
        let mut below = parts.take(2).peekable();
        let is_monitor = below.peek().is_some_and(|part| part.starts_with(MONITOR));
        Self { pod_uid, container: below.find_map(container_id), is_monitor }
    }
}

fn pod_uid(part: &str) -> Option<String> {
    let part = part.strip_suffix(".slice").unwrap_or(part);
    let (before, uid) = part.rsplit_once("pod")?;
    let digits = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-' || byte == b'_';
    let is_uid = uid.len() >= 32 && uid.bytes().all(digits) && (before.is_empty() || before.ends_with('-'));
    is_uid.then(|| uid.replace('_', "-"))
}

fn container_id(part: &str) -> Option<String> {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    let id = part.rsplit('-').next()?;
    (id.len() == ID_LENGTH && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_oldest_processes_of_a_container_are_kept() {
        let process = |container: &str, pid: u32| ContainerProcess {
            pid,
            started: u64::from(pid) % 1000,
            owner: CgroupOwner { container: Some(container.to_owned()), ..CgroupOwner::default() },
            directory: PathBuf::new(),
        };
        let many = (0..1000).rev().map(|pid| process("a", pid));
        let oldest = oldest(many.chain([process("b", 5000)]));
        assert!(oldest.len() < 2 * MAX_OLDEST + 1, "{}", oldest.len());
        let of_a: Vec<u32> = oldest.iter().filter(|process| process.pid < 1000).map(|process| process.pid).collect();
        assert_eq!(of_a[..MAX_OLDEST], Vec::from_iter(0..8)[..]);
        assert!(oldest.iter().any(|process| process.pid == 5000));
    }

    #[test]
    fn the_start_time_is_parsed_behind_a_name_with_blanks_and_brackets() {
        let rest: String = (3..=52).map(|field| format!(" {field}")).collect();
        assert_eq!(started(&format!("7 (a) 1 (b){rest}")), Some(22));
        assert_eq!(started("7 (a) R 1"), None);
    }

    const UID: &str = "8e5bd6a4-9a35-4f0e-9d2b-1c33a5b0a001";
    const HASH: &str = "0123456789abcdef0123456789abcdef";

    fn hex_id(digit: char) -> String {
        digit.to_string().repeat(ID_LENGTH)
    }

    fn owner(path: &str) -> Option<CgroupOwner> {
        CgroupOwner::parse(&format!("0::{path}\n"))
    }

    fn names(owner: Option<CgroupOwner>) -> (Option<String>, Option<String>) {
        owner.map(|owner| (owner.pod_uid, owner.container)).unwrap_or_default()
    }

    #[test]
    fn pod_and_container_are_parsed_from_the_paths_of_both_drivers() {
        let (id, slices) = (hex_id('a'), UID.replace('-', "_"));
        for path in [
            format!("/kubepods/burstable/pod{UID}/{id}"),
            format!("/kubepods/pod{UID}/{id}/below/{}", hex_id('b')),
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slices}.slice/cri-containerd-{id}.scope"
            ),
            format!("/kubepods.slice/kubepods-pod{slices}.slice/crio-{id}.scope/container"),
            format!(
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{slices}.slice/cri-containerd-{id}.scope"
            ),
            format!("/system.slice/containerd.service/kubepods-besteffort-pod{slices}.slice:cri-containerd:{id}"),
            format!("/../../kubepods-besteffort.slice/kubepods-besteffort-pod{slices}.slice/crio-{id}.scope"),
        ] {
            assert_eq!(names(owner(&path)), (Some(UID.into()), Some(id.clone())), "{path}");
        }
        assert_eq!(names(owner(&format!("/kubepods.slice/kubepods-pod{HASH}.slice"))), (Some(HASH.into()), None));
        assert_eq!(names(owner(&format!("/machine.slice/libpod-{id}.scope"))), (None, Some(id)));
    }

    #[test]
    fn paths_of_neither_pod_nor_container_are_ignored() {
        for path in ["/", "/kubepods.slice", "/kubepods/burstable", "/user.slice/pod-viewer.service", "/podman/abc", ""]
        {
            assert_eq!(owner(path), None, "{path}");
        }
    }

    #[test]
    fn groups_that_a_container_creates_are_ignored() {
        let (own, other) = (hex_id('a'), hex_id('b'));
        let path = format!("/kubepods/pod{UID}/{own}/kubepods/pod{}/{other}", UID.replace('8', "9"));
        assert_eq!(names(owner(&path)), (Some(UID.into()), Some(own)));
    }

    #[test]
    fn hierarchies_that_disagree_have_no_owner() {
        let (own, other) = (hex_id('a'), hex_id('b'));
        let text = format!("4:memory:/kubepods/pod{UID}/{own}\n3:cpu:/\n1:name=systemd:/kubepods/pod{UID}/{own}\n");
        assert_eq!(CgroupOwner::parse(&text).and_then(|owner| owner.container), Some(own));
        assert_eq!(CgroupOwner::parse(&format!("{text}2:pids:/kubepods/pod{UID}/{other}\n")), None);
    }

    #[test]
    fn the_monitor_of_crio_is_recognized() {
        let slices = UID.replace('-', "_");
        for (leaf, monitor) in [("crio-conmon-", true), ("crio-", false)] {
            let path = format!("/kubepods.slice/kubepods-pod{slices}.slice/{leaf}{}.scope", hex_id('a'));
            assert_eq!(owner(&path).map(|owner| owner.is_monitor), Some(monitor));
        }
    }
}
