//! The node's processes that are a pod's or a container's.

use super::cgroup::CgroupOwner;
use crate::cni::{Code, Error};
use crate::netns::NetNs;
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
}
