//! The node's processes that are a pod's or a container's.
//!
//! Whose a process is, by its control group: kubelet and the runtimes write pod and container into
//! the path, each in the two forms of their drivers.
//!
//! | driver | pod (kubelet, `pkg/kubelet/cm`) | container (containerd, CRI-O) |
//! |---|---|---|
//! | cgroupfs | `/kubepods/burstable/podUID` | `/ID` |
//! | systemd | `/kubepods.slice/…/kubepods-burstable-podUID.slice`, `_` for `-` | `/cri-containerd-ID.scope`, `/crio-ID.scope` |
//!
//! containerd without its systemd driver, below kubelet with it, writes `…-podUID.slice:cri-containerd:ID`.

use crate::cni::{Code, Error};
use crate::netns::namespace::NetNs;
use crate::trusted_file::read_text;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A process of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ContainerProcess {
    pid: u32,
    /// In the kernel's ticks since it started (proc_pid_stat(5), `starttime`).
    started: u64,
    pub(super) owner: CgroupOwner,
    directory: PathBuf,
}

/// A process, and the network namespace that it is in.
#[derive(Debug)]
pub(super) struct NetnsProcess {
    /// Its ID and name, for people.
    pub(super) name: String,
    /// The pod's own first process, which does nothing and enters nothing.
    pub(super) is_pause: bool,
    pub(super) owner: CgroupOwner,
    pub(super) sandbox: NetNs,
}

/// The kernel writes one page of each of these files; of control groups a line for each hierarchy, whose path
/// has at most 4 KiB.
const LARGEST: u64 = 256 << 10;

/// The names of the sandbox's process: Kubernetes' image has `pause`, OpenShift's `pod`.
const PAUSE: [&str; 2] = ["pause", "pod"];

/// How many processes of a container are remembered, of which some may end before they are looked at. A
/// container can start any number.
const OLDEST: usize = 8;

/// The oldest processes of each pod and container below `proc`, the oldest first. Monitors are not among
/// them.
///
/// # Errors
/// The directory can't be listed.
pub(super) fn contained(proc: &Path) -> Result<Vec<ContainerProcess>, Error> {
    let failed = |error| {
        let msg = format!("{}: processes can't be listed: {error}; is the node's /proc there?", proc.display());
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
        if of_owner.len() == 2 * OLDEST {
            of_owner.sort_unstable_by_key(age);
            of_owner.truncate(OLDEST);
        }
    }
    let mut all: Vec<ContainerProcess> = by_owner.into_values().flatten().collect();
    all.sort_unstable_by_key(age);
    all
}

impl ContainerProcess {
    /// `None` where it is no process of a container, or has ended meanwhile.
    fn read(directory: PathBuf) -> Option<Self> {
        let pid = directory.file_name()?.to_str()?.parse().ok()?;
        let owner = CgroupOwner::of(&read_text(&directory.join("cgroup"), LARGEST).ok()?)?;
        if owner.is_monitor {
            return None;
        }
        let stat = read_text(&directory.join("stat"), LARGEST).ok()?;
        Some(Self { pid, started: started(&stat)?, owner, directory })
    }

    /// Where it is; `None` where it has ended meanwhile.
    ///
    /// # Errors
    /// Its namespace can't be opened.
    pub(super) fn inhabits(&self) -> Result<Option<NetnsProcess>, Error> {
        let Some(sandbox) = NetNs::open(&self.directory.join("ns/net"))? else { return Ok(None) };
        let name = read_text(&self.directory.join("comm"), LARGEST).unwrap_or_default();
        let name = name.trim_end();
        let is_pause = PAUSE.contains(&name);
        Ok(Some(NetnsProcess {
            // A process names itself as it likes.
            name: format!("process {} ({})", self.pid, name.escape_debug()),
            is_pause,
            owner: self.owner.clone(),
            sandbox,
        }))
    }
}

/// The 22nd field; the second is a name that may hold blanks and brackets.
fn started(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// What a control group says of its processes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct CgroupOwner {
    /// The pod's UID, as the API has it; a static pod's is the hash that kubelet knows it by.
    pub(super) pod: Option<String>,
    /// The container's ID.
    pub(super) container: Option<String>,
    /// CRI-O's monitor of a container: it is in the pod's control group and outside of its namespaces.
    pub(super) is_monitor: bool,
}

/// As many hexadecimal digits as both runtimes give a container's ID.
const ID_LENGTH: usize = 64;
const MONITOR: &str = "crio-conmon-";

impl CgroupOwner {
    /// Understands `/proc/PID/cgroup` (cgroups(7)); `None` where it names neither pod nor container, or
    /// its hierarchies name different ones.
    pub(super) fn of(text: &str) -> Option<Self> {
        let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        let mut owners = paths.map(Self::of_path).filter(|owner| *owner != Self::default());
        let first = owners.next()?;
        owners.all(|other| other == first).then_some(first)
    }

    /// The outermost pod counts: what a container makes below its own group can have any name.
    fn of_path(path: &str) -> Self {
        let mut parts = path.split(['/', ':']).filter(|part| !part.is_empty());
        let pod = parts.clone().position(|part| pod_uid(part).is_some());
        let Some(pod) = pod else {
            return Self { container: parts.find_map(container_id), ..Self::default() };
        };
        let mut within = parts.skip(pod);
        let uid = within.next().and_then(pod_uid);
        let mut below = within.take(2).peekable();
        let is_monitor = below.peek().is_some_and(|part| part.starts_with(MONITOR));
        Self { pod: uid, container: below.find_map(container_id), is_monitor }
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
    fn only_the_oldest_processes_of_a_container_are_remembered() {
        let process = |container: &str, pid: u32| ContainerProcess {
            pid,
            started: u64::from(pid) % 1000,
            owner: CgroupOwner { container: Some(container.to_owned()), ..CgroupOwner::default() },
            directory: PathBuf::new(),
        };
        let many = (0..1000).rev().map(|pid| process("a", pid));
        let remembered = oldest(many.chain([process("b", 5000)]));
        assert!(remembered.len() < 2 * OLDEST + 1, "{}", remembered.len());
        let of_a: Vec<u32> =
            remembered.iter().filter(|process| process.pid < 1000).map(|process| process.pid).collect();
        assert_eq!(of_a[..OLDEST], Vec::from_iter(0..8)[..]);
        assert!(remembered.iter().any(|process| process.pid == 5000));
    }

    #[test]
    fn a_name_with_blanks_and_brackets_does_not_mislead() {
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
        CgroupOwner::of(&format!("0::{path}\n"))
    }

    fn names(owner: Option<CgroupOwner>) -> (Option<String>, Option<String>) {
        owner.map(|owner| (owner.pod, owner.container)).unwrap_or_default()
    }

    #[test]
    fn both_drivers_forms_name_pod_and_container() {
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
    fn whoever_is_in_no_pod_and_no_container_is_nobodys() {
        for path in ["/", "/kubepods.slice", "/kubepods/burstable", "/user.slice/pod-viewer.service", "/podman/abc", ""]
        {
            assert_eq!(owner(path), None, "{path}");
        }
    }

    #[test]
    fn what_a_container_makes_below_its_group_does_not_count() {
        let (own, other) = (hex_id('a'), hex_id('b'));
        let path = format!("/kubepods/pod{UID}/{own}/kubepods/pod{}/{other}", UID.replace('8', "9"));
        assert_eq!(names(owner(&path)), (Some(UID.into()), Some(own)));
    }

    #[test]
    fn hierarchies_that_disagree_name_nobody() {
        let (own, other) = (hex_id('a'), hex_id('b'));
        let text = format!("4:memory:/kubepods/pod{UID}/{own}\n3:cpu:/\n1:name=systemd:/kubepods/pod{UID}/{own}\n");
        assert_eq!(CgroupOwner::of(&text).and_then(|owner| owner.container), Some(own));
        assert_eq!(CgroupOwner::of(&format!("{text}2:pids:/kubepods/pod{UID}/{other}\n")), None);
    }

    #[test]
    fn crio_s_monitor_is_told_from_what_it_monitors() {
        let slices = UID.replace('-', "_");
        for (leaf, monitor) in [("crio-conmon-", true), ("crio-", false)] {
            let path = format!("/kubepods.slice/kubepods-pod{slices}.slice/{leaf}{}.scope", hex_id('a'));
            assert_eq!(owner(&path).map(|owner| owner.is_monitor), Some(monitor));
        }
    }
}
