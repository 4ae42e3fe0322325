//! Which network namespace is a pod's or a container's: by what the runtime's library keeps of each
//! ADD, and by the control groups of processes. Nothing is guessed: the namespace must be there, must
//! not be the node's own, and both must speak of the same one.

mod processes;
mod results;

use super::addresses::own_addresses;
use super::lock::NetnsId;
use super::namespace::NetNs;
use crate::cni::{Code, Error};
use crate::host_path::HostRoot;
use processes::{ContainerProcess, NetnsProcess, contained};
use results::{CachedResult, kept};
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A namespace that was found.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundNetns {
    /// Its path, as this process reaches it.
    pub netns: PathBuf,
    /// The sandbox's container ID (`CNI_CONTAINERID`), where that is known.
    pub container_id: Option<String>,
    /// How it is known, for people.
    pub evidence: String,
    /// What the runtime's library, and Multus's, keeps of ADDs for it.
    pub attachments: Vec<CachedAttachment>,
    id: NetnsId,
}

/// An ADD of which the result is kept.
#[derive(Debug, Clone, PartialEq)]
pub struct CachedAttachment {
    /// The network's name.
    pub network: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// What it returned, in the version of its configuration: the next one's `prevResult`.
    pub result: Value,
}

impl FoundNetns {
    /// Opens the namespace: that which was found, whatever has come to be at its path since.
    ///
    /// # Errors
    /// It is there no more, or can't be opened.
    pub fn open(&self) -> Result<NetNs, Error> {
        let sandbox = NetNs::open(&self.netns)?.filter(|sandbox| sandbox.id() == self.id);
        sandbox.ok_or_else(|| wrong(format!("{}: the network namespace has gone meanwhile", self.netns.display())))
    }

    /// Whether one of `addresses` is held in it, as one of the pod's must be. Waits for a call of the
    /// plugin in the namespace, up to `patience`.
    ///
    /// # Errors
    /// As [`Self::open`] and [`Sandbox::enter`]; or the kernel does not list the addresses.
    pub fn holds(&self, addresses: &[IpAddr], patience: Duration) -> Result<bool, Error> {
        self.open()?.enter(patience, || Ok(own_addresses()?.iter().any(|own| addresses.contains(own))))
    }
}

/// Finds that of the pod that the node's runtime knows by `uid` (a static pod's is its
/// `kubernetes.io/config.hash`). `root` is where the node's file system is mounted, `/` on the node itself.
/// `None` where neither a result nor a process of it is there.
///
/// # Errors
/// What there is can't be read, or does not speak of one namespace: results and processes disagree, two
/// sandboxes of the pod are there, or it is on the node's own network.
pub fn of_pod(root: &Path, uid: &str) -> Result<Option<FoundNetns>, Error> {
    NodeSnapshot::look(root)?.of_pod(uid)
}

/// Finds that of a pod of which only the name is known, as where the API does not answer: by the pods for which
/// results are kept under that name. `root` as for [`of_pod`].
///
/// # Errors
/// As [`of_pod`]; or several pods of that name are there, of which one must have been deleted.
pub fn of_name(root: &Path, namespace: &str, name: &str) -> Result<Option<FoundNetns>, Error> {
    NodeSnapshot::look(root)?.of_name(namespace, name)
}

/// Finds that of a container: a sandbox, or one in a pod. `id` may be without its end, where it is that of one
/// container, and with the runtime's name before it, as in `containerStatuses` (`cri-o://ID`).
///
/// # Errors
/// As [`of_pod`]; or `id` is the beginning of several containers' IDs.
pub fn of_container(root: &Path, id: &str) -> Result<Option<FoundNetns>, Error> {
    NodeSnapshot::look(root)?.of_container(id.rsplit("://").next().unwrap_or(id))
}

/// What a node knows at a moment, for questions about several pods.
pub struct NodeSnapshot {
    root: HostRoot,
    /// Its own network namespace.
    own: NetnsId,
    kept: Vec<CachedResult>,
    processes: Vec<ContainerProcess>,
}

impl NodeSnapshot {
    /// Reads what is there now; `root` as for [`of_pod`].
    ///
    /// # Errors
    /// It can't be read.
    pub fn look(root: &Path) -> Result<Self, Error> {
        let proc = root.join("proc");
        let first = proc.join("1/ns/net");
        let unknown = |why: &str| wrong(format!("the node's own network namespace can't be known: {why}"));
        let none = || unknown(&format!("{} is not there; is the node's /proc mounted there?", first.display()));
        let own = NetNs::open(&first)
            .map_err(|error| unknown(&format!("{}; this needs root and CAP_SYS_PTRACE", error.msg)))?;
        let own = own.ok_or_else(none)?.id();
        let root = HostRoot::new(root);
        Ok(Self { own, kept: kept(&root)?, processes: contained(&proc)?, root })
    }

    /// As the function of that name, of the moment of the look.
    ///
    /// # Errors
    /// As there.
    pub fn of_pod(&self, uid: &str) -> Result<Option<FoundNetns>, Error> {
        let kept = self.kept.iter().filter(|kept| kept.pod.as_deref() == Some(uid));
        let inhabitant = self.oldest(|process| process.owner.pod.as_deref() == Some(uid))?;
        self.decide(&format!("pod {uid}"), &kept.collect::<Vec<_>>(), inhabitant)
    }

    fn of_name(&self, namespace: &str, name: &str) -> Result<Option<FoundNetns>, Error> {
        let is =
            |kept: &&CachedResult| kept.pod_name.as_ref().is_some_and(|(ns, pod)| (&**ns, &**pod) == (namespace, name));
        let uids: BTreeSet<&str> = self.kept.iter().filter(is).filter_map(|kept| kept.pod.as_deref()).collect();
        let mut all: Vec<(&str, FoundNetns)> = Vec::new();
        for uid in uids {
            all.extend(self.of_pod(uid)?.map(|found| (uid, found)));
        }
        match all.len() {
            0 | 1 => Ok(all.pop().map(|(_, found)| found)),
            _ => {
                let uids = all.iter().map(|(uid, _)| *uid).collect::<Vec<_>>().join(", ");
                Err(wrong(format!("pod {namespace}/{name}: several of that name are here, with the UIDs {uids}")))
            }
        }
    }

    fn of_container(&self, id: &str) -> Result<Option<FoundNetns>, Error> {
        let what = format!("container {id}");
        let whole = self.whole_id(id)?;
        let is = |container: &str| container == whole;
        let inhabitant = self.oldest(|process| process.owner.container.as_deref().is_some_and(is))?;
        let kept: Vec<&CachedResult> = self.kept.iter().filter(|kept| is(&kept.container_id)).collect();
        let pod = inhabitant.as_ref().and_then(|inhabitant| inhabitant.owner.pod.as_deref());
        let Some(pod) = pod.or_else(|| kept.iter().find_map(|kept| kept.pod.as_deref())) else {
            return self.decide(&what, &kept, inhabitant);
        };
        let Some(found) = self.of_pod(pod)? else { return Ok(None) };
        if let Some(other) = inhabitant.filter(|inhabitant| inhabitant.sandbox.id() != found.id) {
            return Err(wrong(format!("{what}: {} is not in its pod's namespace: {}", other.name, found.evidence)));
        }
        let is_old = !kept.is_empty() && found.container_id.as_deref().is_some_and(|sandbox| sandbox != whole);
        Ok((!is_old).then_some(found))
    }

    /// The one container's ID that begins with `id`; else `id` as it is.
    fn whole_id<'a>(&'a self, id: &'a str) -> Result<&'a str, Error> {
        let kept = self.kept.iter().map(|kept| kept.container_id.as_str());
        let running = self.processes.iter().filter_map(|process| process.owner.container.as_deref());
        let begin: BTreeSet<&str> = kept.chain(running).filter(|known| known.starts_with(id)).collect();
        match begin.len() {
            _ if begin.contains(id) => Ok(id),
            0 | 1 => Ok(begin.first().copied().unwrap_or(id)),
            _ => {
                let all = begin.into_iter().collect::<Vec<_>>().join(", ");
                Err(wrong(format!("container {id}: several IDs begin with that: {all}; give one of them")))
            }
        }
    }

    /// Where the first of such processes is that has not ended meanwhile.
    fn oldest(&self, is: impl Fn(&ContainerProcess) -> bool) -> Result<Option<NetnsProcess>, Error> {
        self.processes
            .iter()
            .filter(|process| is(process))
            .find_map(|process| process.inhabits().transpose())
            .transpose()
    }

    /// Weighs what is kept of `what` and its oldest process against each other.
    fn decide(
        &self,
        what: &str,
        kept: &[&CachedResult],
        oldest: Option<NetnsProcess>,
    ) -> Result<Option<FoundNetns>, Error> {
        if let Some(oldest) = oldest.as_ref().filter(|oldest| oldest.sandbox.id() == self.own) {
            let msg = format!(
                "{what}: {}, the oldest that is its, is in the node's own network namespace: a pod with hostNetwork has none of its own",
                oldest.name
            );
            return Err(wrong(msg));
        }
        let mut live = Vec::new();
        for &one in kept {
            live.extend(self.open(one)?.map(|sandbox| (one, sandbox)));
        }
        // containerd keeps one of lo too, which says less of the pod.
        live.sort_by_key(|(one, _)| one.ifname == "lo");
        let says = |(one, sandbox): &(&CachedResult, NetNs)| {
            format!("{} names {} for container {}", one.file, sandbox.path().display(), one.container_id)
        };
        let Some(id) = oldest.as_ref().map(|oldest| oldest.sandbox.id()).or(live.first().map(|(_, found)| found.id()))
        else {
            return Ok(None);
        };
        let first = live.iter().find(|(_, sandbox)| sandbox.id() == id);
        let other = live.iter().find(|(_, sandbox)| sandbox.id() != id);
        let evidence = match (&oldest, first, other) {
            (Some(oldest), None, Some(other)) => {
                let msg =
                    format!("{what}: {}, but {}, the oldest that is its, is in another one", says(other), oldest.name);
                return Err(wrong(msg));
            }
            (None, Some(first), Some(other)) => {
                let msg = format!("{what}: {}, but {}, and no process tells which counts", says(first), says(other));
                return Err(wrong(msg));
            }
            (Some(oldest), Some(first), _) => format!("{}, and {} is in it", says(first), oldest.name),
            (Some(oldest), None, None) => format!("{}, the oldest of {what}, is in it; no result is kept", oldest.name),
            (None, first, _) => format!("{}; no process is known to be in it", first.map(says).unwrap_or_default()),
        };
        let of_pause = || oldest.as_ref().filter(|oldest| oldest.is_pause)?.owner.container.clone();
        let netns = first.map(|(_, sandbox)| sandbox).or(oldest.as_ref().map(|oldest| &oldest.sandbox));
        let own = live.iter().filter(|(_, sandbox)| sandbox.id() == id).map(|(one, _)| *one);
        Ok(netns.map(|netns| FoundNetns {
            netns: netns.path().to_owned(),
            container_id: first.map(|(one, _)| one.container_id.clone()).or_else(of_pause),
            evidence,
            attachments: own
                .map(|one| CachedAttachment {
                    network: one.network.clone(),
                    ifname: one.ifname.clone(),
                    result: one.result.clone(),
                })
                .collect(),
            id,
        }))
    }

    /// The namespace of a result, where it is still there.
    fn open(&self, kept: &CachedResult) -> Result<Option<NetNs>, Error> {
        let Some(path) = &kept.netns else { return Ok(None) };
        let failed = |error| Error::new(Code::Io, format!("{path}: the links in it can't be followed: {error}"));
        let sandbox = NetNs::open(&self.root.reach(path).map_err(failed)?)?;
        if sandbox.as_ref().is_some_and(|sandbox| sandbox.id() == self.own) {
            return Err(wrong(format!("{} names {path}, which is the node's own network namespace", kept.file)));
        }
        Ok(sandbox)
    }
}

fn wrong(msg: String) -> Error {
    Error::new(Code::InvalidNetns, msg)
}
