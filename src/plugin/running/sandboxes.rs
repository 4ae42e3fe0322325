//! The pod sandboxes with saved state, by their pods: which one is a pod's, without its policies.

use super::container_status::is_gone;
use crate::cni::{Code, Error};
use crate::host_path::HostRoot;
use crate::netns::NetnsId;
use crate::plugin::open_netns;
use crate::pod::{Pod, PodRef};
use crate::state::{Attachment, ROOT, Store};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Files change within the resolution of the file system's clock: what may have changed since it was read is read again.
const CLOCK_RESOLUTION: Duration = Duration::from_secs(1);

/// A pod sandbox with saved state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// Its ID: `CNI_CONTAINERID`.
    pub container_id: String,
    pod: PodRef,
    /// The path of its network namespace in the runtime, and its identity.
    netns: Option<(PathBuf, NetnsId)>,
    added_since_boot: u64,
}

/// The pod sandboxes of the node.
#[derive(Debug, Default)]
pub struct Sandboxes(BTreeMap<String, CachedSandbox>);

/// What was read of one sandbox.
#[derive(Debug)]
struct CachedSandbox {
    /// The modification time of its directory: seconds and nanoseconds.
    modified: Option<(i64, i64)>,
    /// When this modification time was seen first, and when the records were read.
    seen: Instant,
    read: Instant,
    sandbox: Option<Sandbox>,
}

/// The part of a record that names the pod and the network namespace.
#[derive(Deserialize)]
struct RecordPart {
    #[serde(alias = "sandbox")]
    netns_id: Option<NetnsId>,
    #[serde(default)]
    netns: Option<PathBuf>,
    #[serde(default)]
    added_at: u64,
    #[serde(default)]
    inputs: Option<InputsPart>,
}

#[derive(Deserialize)]
struct InputsPart {
    pod: PodRef,
    #[serde(default)]
    netns: Option<(PathBuf, NetnsId)>,
}

/// The part of a record that tells whether the pod has a guard.
#[derive(Deserialize)]
struct GuardPart {
    policy: GuardedPart,
    #[serde(default)]
    inputs: Option<InputsPart>,
}

#[derive(Deserialize)]
struct GuardedPart {
    #[serde(default)]
    guard: Option<IgnoredAny>,
}

/// Returns the pods whose saved policy has a guard, as NAMESPACE/NAME. A record that can't be read is skipped.
#[must_use]
pub fn guarded_pods(store: &Store) -> Vec<String> {
    let attachments = |id: String| store.attachments_of(&id).unwrap_or_default();
    let guarded = |attachment: Attachment| {
        let GuardPart { policy, inputs } = store.read_part(&attachment).ok()??;
        let InputsPart { pod, .. } = policy.guard.and(inputs)?;
        Some(format!("{}/{}", pod.namespace, pod.name))
    };
    let all = store.sandboxes().unwrap_or_default().into_iter().flat_map(attachments);
    all.filter_map(guarded).collect::<BTreeSet<_>>().into_iter().collect()
}

impl Sandboxes {
    /// Reads what has changed in the saved state, one sandbox at a time. A damaged record is logged, and its sandbox is
    /// skipped.
    ///
    /// # Errors
    /// The saved state can't be read.
    pub fn refresh(&mut self) -> Result<(), Error> {
        let store = Store::new(ROOT);
        let ids = store.sandboxes()?;
        self.0.retain(|id, _| ids.contains(id));
        for id in ids {
            let metadata = fs::metadata(Path::new(ROOT).join(&id)).ok();
            let modified = metadata.map(|metadata| (metadata.mtime(), metadata.mtime_nsec()));
            let read = Instant::now();
            let known = self.0.get(&id).filter(|known| modified.is_some() && known.modified == modified);
            if known.is_some_and(|known| known.read > known.seen + CLOCK_RESOLUTION) {
                continue;
            }
            let seen = known.map_or(read, |known| known.seen);
            let sandbox = match Sandbox::read(&store, &id) {
                Err(error) if error.code == Code::State => {
                    tracing::debug!("{error}");
                    None
                }
                other => other?,
            };
            self.0.insert(id, CachedSandbox { modified, seen, read, sandbox });
        }
        Ok(())
    }

    /// Returns the sandbox of a pod on the node at `root`; `None` without saved state. While a previous sandbox is removed,
    /// there are two, and the newer one is the pod's.
    #[must_use]
    pub fn of(&self, pod: &Pod, root: &HostRoot) -> Option<&Sandbox> {
        let is_named = |sandbox: &&Sandbox| {
            let named = &sandbox.pod;
            (&named.namespace, &named.name) == (&pod.namespace, &pod.name) && pod.matches(named)
        };
        let of_pod = self.0.values().filter_map(|known| known.sandbox.as_ref()).filter(is_named);
        of_pod.filter(|sandbox| sandbox.is_present(root)).max_by_key(|sandbox| sandbox.added_since_boot)
    }
}

impl Sandbox {
    fn read(store: &Store, container_id: &str) -> Result<Option<Self>, Error> {
        let mut found: Option<Self> = None;
        for attachment in store.attachments_of(container_id)? {
            let Some(record) = store.read_part::<RecordPart>(&attachment)? else { continue };
            let Some(InputsPart { pod, netns }) = record.inputs else { continue };
            let netns = record.netns.zip(record.netns_id).or(netns);
            let own = Self { container_id: container_id.to_owned(), pod, netns, added_since_boot: record.added_at };
            match &mut found {
                Some(found) => {
                    found.added_since_boot = found.added_since_boot.min(own.added_since_boot);
                    found.netns = found.netns.take().or(own.netns);
                }
                None => found = Some(own),
            }
        }
        Ok(found)
    }

    /// Returns whether its network namespace may exist. One that is unknown or not visible in this mount namespace may.
    fn is_present(&self, root: &HostRoot) -> bool {
        self.netns.as_ref().is_none_or(|(path, id)| {
            open_netns::recorded(root, path, *id).is_ok_and(|netns| netns.is_some()) || !is_gone(root, path, *id)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::NetNs;

    /// Also if the node's file system is not mounted elsewhere.
    #[test]
    fn a_network_namespace_that_is_gone_is_not_present() {
        let (own, root) = (Path::new("/proc/thread-self/ns/net"), HostRoot::new("/"));
        let id = NetNs::open(own).expect("readable").expect("there").id();
        let is_present = |path: &str, id| {
            let netns = Some((path.into(), id));
            Sandbox { container_id: "c".into(), pod: PodRef::default(), netns, added_since_boot: 0 }.is_present(&root)
        };
        assert!(is_present("/proc/thread-self/ns/net", id));
        assert!(!is_present("/run/netns/detour-gone", id));
        // The mount point remains as a file, or another network namespace has the path.
        assert!(!is_present("/proc/thread-self/status", id));
        assert!(!is_present("/proc/thread-self/ns/net", NetnsId { inode: id.inode + 1, ..id }));
    }
}
