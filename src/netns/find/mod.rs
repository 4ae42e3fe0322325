//! Finds the network namespace of a pod or container on the node, from two sources: the results that libcni caches
//! for each ADD (`results`), and the control groups of running processes (`processes`). Nothing is guessed: the
//! namespace must exist and must not be the node's own, and both sources must agree.

mod processes;
mod results;

pub use results::containers_by_type;

use super::namespace::NetNs;
use super::namespace::NetnsId;
use super::rtnetlink::own_addresses;
use crate::cni::{Code, Error};
use crate::host_path::HostRoot;
use crate::pod::{Pod, PodRef};
use processes::{ContainerProcess, NetnsProcess, container_processes};
use results::{CachedResult, cached_results};
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A network namespace that was found.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundNetns {
    /// Its path as seen by this process.
    pub netns: PathBuf,
    /// The container ID of the pod sandbox (`CNI_CONTAINERID`), if known.
    pub container_id: Option<String>,
    /// The evidence for it, as text for people.
    pub evidence: String,
    /// The ADDs for it whose results the runtime or Multus caches.
    pub attachments: Vec<CachedAttachment>,
    id: NetnsId,
}

/// An ADD whose result is cached.
#[derive(Debug, Clone, PartialEq)]
pub struct CachedAttachment {
    /// The network name.
    pub network: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// The result, in the CNI version of its configuration: the `prevResult` of the next call.
    pub result: Value,
}

impl FoundNetns {
    /// Opens the namespace that was found, never another one that now has the same path.
    ///
    /// # Errors
    /// It no longer exists, or can't be opened.
    pub fn open(&self) -> Result<NetNs, Error> {
        let netns = NetNs::open(&self.netns)?.filter(|netns| netns.id() == self.id);
        netns.ok_or_else(|| invalid(format!("network namespace {}: no longer exists", self.netns.display())))
    }

    /// Reports whether an interface in the namespace has one of `addresses`, the pod's. Waits up to `timeout` for a
    /// plugin call in the namespace.
    ///
    /// # Errors
    /// As [`Self::open`] and [`NetNs::enter`]; or the kernel does not list the addresses.
    pub fn has_any_address(&self, addresses: &[IpAddr], timeout: Duration) -> Result<bool, Error> {
        self.open()?.enter(timeout, || Ok(own_addresses()?.iter().any(|own| addresses.contains(own))))
    }
}

/// Returns the pod of a sandbox (`CNI_CONTAINERID`) from the runtime's cached results; `None` without a result for it.
///
/// # Errors
/// The cached results can't be read.
pub fn pod_of_sandbox(root: &HostRoot, container_id: &str) -> Result<Option<PodRef>, Error> {
    let pod = |result: CachedResult| {
        let ((namespace, name), uid) = (result.pod_name()?, result.pod_uid());
        Some(PodRef { namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.map(str::to_owned) })
    };
    Ok(cached_results(root)?.into_iter().filter(|result| result.container_id == container_id).find_map(pod))
}

/// A snapshot of the node's cached results and container processes, for lookups of pods and containers. All lookups return
/// `None` if there is neither a cached result nor a process.
pub struct NodeSnapshot {
    root: HostRoot,
    /// The node's own network namespace.
    own: NetnsId,
    results: Vec<CachedResult>,
    processes: Vec<ContainerProcess>,
}

impl NodeSnapshot {
    /// Takes a snapshot; `root` is where the node's file system is mounted, `/` on the node itself.
    ///
    /// # Errors
    /// Results, processes or the node's own network namespace can't be read.
    pub fn take(root: &Path) -> Result<Self, Error> {
        let proc = root.join("proc");
        let first = proc.join("1/ns/net");
        let unknown = |why: &str| invalid(format!("can't find the node's own network namespace: {why}"));
        let missing = || unknown(&format!("{} not found; mount the node's /proc there", first.display()));
        let own =
            NetNs::open(&first).map_err(|error| unknown(&format!("{}; run as root with CAP_SYS_PTRACE", error.msg)))?;
        let own = own.ok_or_else(missing)?.id();
        let root = HostRoot::new(root);
        Ok(Self { own, results: cached_results(&root)?, processes: container_processes(&proc)?, root })
    }

    /// Finds the network namespace of a pod of the cluster. The UID of a static pod is an annotation of its mirror, which
    /// proves nothing: a cached result must have the pod's name too.
    ///
    /// # Errors
    /// As [`Self::of_uid`]; or a cached result shows that the pod's UID on the node is that of another pod.
    pub fn of_pod(&self, pod: &Pod) -> Result<Option<FoundNetns>, Error> {
        let Some(uid) = pod.uid_on_node() else { return Ok(None) };
        let failed = |why: String| Err(invalid(format!("pod {}/{} (UID {uid}): {why}", pod.namespace, pod.name)));
        let mut is_named = false;
        for result in self.results.iter().filter(|result| result.pod_uid() == Some(uid)) {
            let Some((namespace, name)) = result.pod_name() else { continue };
            if (namespace, name) != (&*pod.namespace, &*pod.name) {
                return failed(format!("{} is the cached result of pod {namespace}/{name} with this UID", result.file));
            }
            is_named = true;
        }
        let found = self.of_uid(uid)?;
        match &found {
            Some(found) if pod.is_mirror() && !is_named => failed(format!(
                "its UID is an annotation, and no cached result confirms that it belongs to this pod: {}",
                found.evidence
            )),
            _ => Ok(found),
        }
    }

    /// Finds the network namespace of the pod that the runtime knows by `uid`: any pod that has it.
    ///
    /// # Errors
    /// Results and processes don't identify one network namespace: they disagree, the pod has two sandboxes, or it uses the
    /// node's own network.
    pub fn of_uid(&self, uid: &str) -> Result<Option<FoundNetns>, Error> {
        let results = self.results.iter().filter(|result| result.pod_uid() == Some(uid));
        let oldest = self.oldest(|process| process.owner.pod_uid.as_deref() == Some(uid))?;
        self.decide(&format!("pod {uid}"), &results.collect::<Vec<_>>(), oldest)
    }

    /// Finds the network namespace of the pod of that name, for callers that don't know its UID: the UID is read from the
    /// cached results.
    ///
    /// # Errors
    /// As [`Self::of_uid`]; or several pods of that name exist on the node (all but one were deleted).
    pub fn of_name(&self, namespace: &str, name: &str) -> Result<Option<FoundNetns>, Error> {
        let named = self.results.iter().filter(|result| result.pod_name() == Some((namespace, name)));
        let uids: BTreeSet<&str> = named.filter_map(CachedResult::pod_uid).collect();
        let mut all: Vec<(&str, FoundNetns)> = Vec::new();
        for uid in uids {
            all.extend(self.of_uid(uid)?.map(|found| (uid, found)));
        }
        if all.len() > 1 {
            let uids = all.iter().map(|(uid, _)| *uid).collect::<Vec<_>>().join(", ");
            let why = format!("expected one pod of that name on this node, got UIDs {uids}");
            return Err(invalid(format!("pod {namespace}/{name}: {why}")));
        }
        Ok(all.pop().map(|(_, found)| found))
    }

    /// Finds the network namespace of a container, which may be a pod sandbox. `id` may be a unique prefix of the ID and
    /// may start with the runtime's name, as in `containerStatuses` (`cri-o://ID`).
    ///
    /// # Errors
    /// As [`Self::of_uid`]; or `id` is a prefix of several container IDs.
    pub fn of_container(&self, id: &str) -> Result<Option<FoundNetns>, Error> {
        let id = id.rsplit("://").next().unwrap_or(id);
        let what = format!("container {id}");
        let full_id = self.full_id(id)?;
        let oldest = self.oldest(|process| process.owner.container.as_deref() == Some(full_id))?;
        let results: Vec<&CachedResult> = self.results.iter().filter(|result| result.container_id == full_id).collect();
        let pod_uid = oldest.as_ref().and_then(|oldest| oldest.owner.pod_uid.as_deref());
        let Some(pod_uid) = pod_uid.or_else(|| results.iter().find_map(|result| result.pod_uid())) else {
            return self.decide(&what, &results, oldest);
        };
        let Some(found) = self.of_uid(pod_uid)? else { return Ok(None) };
        if let Some(other) = oldest.filter(|oldest| oldest.netns.id() != found.id) {
            let msg = format!("{what}: {} is not in its pod's network namespace: {}", other.name, found.evidence);
            return Err(invalid(msg));
        }
        // An earlier sandbox of the pod, whose result is still cached.
        let is_earlier = !results.is_empty() && found.container_id.as_deref().is_some_and(|current| current != full_id);
        Ok((!is_earlier).then_some(found))
    }

    /// Returns the one container ID that starts with `id`; `id` itself if none does.
    fn full_id<'a>(&'a self, id: &'a str) -> Result<&'a str, Error> {
        let cached = self.results.iter().map(|result| result.container_id.as_str());
        let running = self.processes.iter().filter_map(|process| process.owner.container.as_deref());
        let candidates: BTreeSet<&str> = cached.chain(running).filter(|full| full.starts_with(id)).collect();
        match candidates.len() {
            _ if candidates.contains(id) => Ok(id),
            0 | 1 => Ok(candidates.first().copied().unwrap_or(id)),
            _ => {
                let all = candidates.into_iter().collect::<Vec<_>>().join(", ");
                Err(invalid(format!("container {id}: ambiguous ID prefix; expected one of {all}")))
            }
        }
    }

    /// Returns the oldest selected process that still runs, with its network namespace.
    fn oldest(&self, selected: impl Fn(&ContainerProcess) -> bool) -> Result<Option<NetnsProcess>, Error> {
        let mut selected = self.processes.iter().filter(|process| selected(process));
        selected.find_map(|process| process.netns().transpose()).transpose()
    }

    /// Decides which namespace is that of `what`, from its cached results and its oldest process.
    fn decide(
        &self,
        what: &str,
        results: &[&CachedResult],
        oldest: Option<NetnsProcess>,
    ) -> Result<Option<FoundNetns>, Error> {
        let refuse = |why: String| Err(invalid(format!("{what}: {why}")));
        if let Some(NetnsProcess { name, .. }) = oldest.as_ref().filter(|oldest| oldest.netns.id() == self.own) {
            return refuse(format!(
                "its oldest {name} is in the node's own network namespace: a pod with hostNetwork has no separate one"
            ));
        }
        let mut live = Vec::new();
        for &result in results {
            live.extend(self.open(result)?.map(|netns| (result, netns)));
        }
        // containerd caches a result for lo too, which has less information about the pod.
        live.sort_by_key(|(result, _)| result.ifname == "lo");
        let describe = |(result, netns): &(&CachedResult, NetNs)| {
            format!("{} names {} for container {}", result.file, netns.path().display(), result.container_id)
        };
        let of_process = oldest.as_ref().map(|oldest| oldest.netns.id());
        let Some(id) = of_process.or(live.first().map(|(_, netns)| netns.id())) else { return Ok(None) };
        let agreeing = live.iter().find(|(_, netns)| netns.id() == id);
        let other = live.iter().find(|(_, netns)| netns.id() != id).map(describe);
        let first = agreeing.map(describe);
        let evidence = match (oldest.as_ref().map(|oldest| &oldest.name), first, other) {
            (Some(process), None, Some(other)) => {
                return refuse(format!("{other}, but its oldest {process} is in another network namespace"));
            }
            (None, Some(first), Some(other)) => {
                let why = "no running process shows which one is current";
                return refuse(format!("{other}, but {first}, and {why}"));
            }
            (Some(process), Some(first), _) => format!("{first}, and {process} is in it"),
            (Some(process), None, None) => format!("the oldest {process} of {what} is in it; no cached result"),
            (None, first, _) => format!("{}; no running process found", first.unwrap_or_default()),
        };
        let pause_container = || oldest.as_ref().filter(|oldest| oldest.is_pause)?.owner.container.clone();
        let netns = agreeing.map(|(_, netns)| netns).or(oldest.as_ref().map(|oldest| &oldest.netns));
        let attachments = live.iter().filter(|(_, netns)| netns.id() == id).map(|(result, _)| CachedAttachment {
            network: result.network.clone(),
            ifname: result.ifname.clone(),
            result: result.result.clone(),
        });
        Ok(netns.map(|netns| FoundNetns {
            netns: netns.path().to_owned(),
            container_id: agreeing.map(|(result, _)| result.container_id.clone()).or_else(pause_container),
            evidence,
            attachments: attachments.collect(),
            id,
        }))
    }

    /// Opens the namespace of a cached result; `None` if it no longer exists.
    fn open(&self, result: &CachedResult) -> Result<Option<NetNs>, Error> {
        let Some(path) = result.netns() else { return Ok(None) };
        let failed = |error| Error::new(Code::Io, format!("network namespace {path}: can't follow its links: {error}"));
        let netns = NetNs::open(&self.root.reach(&path).map_err(failed)?)?;
        if netns.as_ref().is_some_and(|netns| netns.id() == self.own) {
            return Err(invalid(format!("{} names {path}, which is the node's own network namespace", result.file)));
        }
        Ok(netns)
    }
}

fn invalid(msg: String) -> Error {
    Error::new(Code::InvalidNetns, msg)
}
