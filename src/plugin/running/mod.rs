//! Running pods, for the node's agent: which pod sandbox with saved state is a pod's, its live state, and whether its
//! network namespace is gone. Submodules repeat an ADD, exclude containers, and count connections. No CNI call uses this
//! module, and it does not use the cluster.

mod bypassing;
pub mod containers;
mod repeated_add;

pub use bypassing::bypassing;
pub use repeated_add::{Repeated, RepeatedAdd};

use crate::cni::{Code, Error};
use crate::firewall::{AmbientRedirection, LiveRuleset};
use crate::host_path::{HostPath, HostRoot};
use crate::netns::{NetnsId, listens};
use crate::plugin::check::differences;
use crate::plugin::del::remove;
use crate::plugin::inputs::AddInputs;
use crate::plugin::netns_state::{self, NetnsState};
use crate::plugin::record::{RecordPart, SandboxRecord, SandboxRecords};
use crate::pod::{Pod, PodRef};
use crate::state::{Attachment, ROOT, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The ports on which ztunnel listens in each pod: outbound, inbound, HBONE (istio/ztunnel, `ARCHITECTURE.md`).
const ZTUNNEL_PORTS: [u16; 3] = [15001, 15006, 15008];
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
    /// The modification time of its directory.
    modified: Option<SystemTime>,
    /// Whether a later change has another modification time.
    is_settled: bool,
    sandbox: Option<Sandbox>,
}

/// Returns the pods whose saved policy has a guard, as NAMESPACE/NAME. A pod sandbox that can't be read is skipped.
#[must_use]
pub fn guarded_pods(store: &Store) -> BTreeSet<String> {
    let guarded = |id: String| {
        let records = SandboxRecords::read_all(store, &id, None).ok()?;
        let (_, record) = records.attachments.iter().find(|(_, record)| record.policy.guard.is_some())?;
        let pod = AddInputs::read(record.inputs.as_ref()?)?.pod;
        Some(format!("{}/{}", pod.namespace, pod.name))
    };
    store.sandboxes().unwrap_or_default().into_iter().filter_map(guarded).collect()
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
            let modified = fs::metadata(Path::new(ROOT).join(&id)).and_then(|it| it.modified()).ok();
            let is_settled = modified.and_then(|it| it.elapsed().ok()).is_some_and(|age| age > CLOCK_RESOLUTION);
            if self.0.get(&id).is_some_and(|known| known.is_settled && known.modified == modified) {
                continue;
            }
            let sandbox = match Sandbox::read(&store, &id) {
                Err(error) if error.code == Code::State => {
                    tracing::debug!("{error}");
                    None
                }
                other => other?,
            };
            self.0.insert(id, CachedSandbox { modified, is_settled, sandbox });
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
    /// Reads a pod sandbox; `None` if no record names its pod.
    fn read(store: &Store, container_id: &str) -> Result<Option<Self>, Error> {
        let (shared, parts) = RecordPart::read_all(store, container_id)?;
        let pod = parts.iter().find_map(|part| AddInputs::read(part.inputs.as_ref()?)).map(|inputs| inputs.pod);
        Ok(pod.map(|pod| Self {
            container_id: container_id.to_owned(),
            pod,
            added_since_boot: shared.added_since_boot,
            netns: shared.location(),
        }))
    }

    /// Returns whether its network namespace may exist. One that is unknown or not visible in this mount namespace may.
    fn is_present(&self, root: &HostRoot) -> bool {
        self.netns.as_ref().is_none_or(|(path, id)| {
            netns_state::open_recorded(root, path, *id).is_ok_and(|netns| netns.is_some()) || !is_gone(root, path, *id)
        })
    }
}

/// The live state of a container in its network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerStatus {
    /// The attachments with saved state; empty without an ADD.
    pub attachments: Vec<Attachment>,
    /// Whether its traffic is redirected to a sidecar, by rules of its attachments or of another tool.
    pub redirected: bool,
    /// The drift of the kernel from the desired state of the attachments, one line per difference.
    pub drift: Vec<String>,
}

impl ContainerStatus {
    /// Returns whether the container has neither attachments nor a redirection.
    #[must_use]
    pub const fn is_bare(&self) -> bool {
        self.attachments.is_empty() && !self.redirected
    }

    /// Returns whether the container is redirected by its own attachments, without drift.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.redirected && self.drift.is_empty() && !self.attachments.is_empty()
    }
}

/// Reads the live state of a container. Waits up to `timeout` for another call in its network namespace.
///
/// # Errors
/// [`Code::TryAgain`]: timeout. The network namespace is gone, can't be read, or is this process's own; the saved
/// state is unreadable.
pub fn container_status(container_id: &str, netns: &Path, timeout: Duration) -> Result<ContainerStatus, Error> {
    let (store, netns) = (Store::new(ROOT), netns_state::open_at(netns)?);
    netns.enter(timeout, || {
        let state = NetnsState::read(&store, container_id, &netns)?;
        let live = LiveRuleset::now()?;
        let is_recorded = !state.attachments.is_empty();
        let drift = if is_recorded { differences(&state, &live)? } else { Vec::new() };
        Ok(ContainerStatus {
            // Native tables with these names belong to detour, even without saved state.
            redirected: live.foreign_redirection(&state.records.known_rules()).is_some()
                || (state.policy.redirect().is_some() && drift.is_empty())
                || (!is_recorded && live.redirects_natively()),
            attachments: state.attachments,
            drift,
        })
    })
}

/// Removes the saved state of attachments whose network namespace is gone: runtimes make no DEL for attachments that
/// they did not add themselves, and Multus repeats no DEL that it missed. `root` is the mount point of the node's file
/// system. Returns the removed attachments.
///
/// # Errors
/// The saved state can't be read or removed.
pub fn forget_gone(root: &Path) -> Result<Vec<Attachment>, Error> {
    let store = Store::new(ROOT);
    let mut removed = Vec::new();
    for attachment in store.attachments()? {
        // A damaged record must not block the others.
        let Some((path, id)) = SandboxRecord::location_of(&store, &attachment)? else { continue };
        if is_gone(&HostRoot::new(root), &path, id) {
            remove(&store, &attachment, None)?;
            removed.push(attachment);
        }
    }
    Ok(removed)
}

/// Returns what the pod in the network namespace at `netns` lacks, in words; `None` if its traffic reaches ztunnel.
///
/// # Errors
/// [`Code::TryAgain`]: another call locks the network namespace longer than `timeout`. The
/// network namespace is gone, or its rules or listeners can't be read.
pub fn lacks_of_ambient(netns: &Path, timeout: Duration) -> Result<Option<String>, Error> {
    netns_state::open_at(netns)?.enter(timeout, || {
        let mut lacking = Vec::new();
        if AmbientRedirection::of(&LiveRuleset::now()?).is_none() {
            lacking.push("istio-cni's redirection".to_owned());
        }
        for port in ZTUNNEL_PORTS {
            if !listens(port)? {
                lacking.push(format!("ztunnel's listener on port {port}"));
            }
        }
        Ok((!lacking.is_empty()).then(|| lacking.join(", ")))
    })
}

/// Returns whether the network namespace `id` certainly no longer exists at the runtime's path, on the node at `root`. A
/// path that exists but is no namespace proves nothing: without mount propagation, every namespace below `root` looks like
/// that.
fn is_gone(root: &HostRoot, path: &Path, id: NetnsId) -> bool {
    let exists = |path: &HostPath| root.reach(path).and_then(|path| path.try_exists()).ok();
    let is_missing = |path: HostPath| exists(&path.parent()) == Some(true) && exists(&path) == Some(false);
    match netns_state::open_on_node(root, path) {
        Ok(Some(netns)) => netns.id() != id,
        Ok(None) => path.starts_with(root.mount()) || HostPath::new(path).is_some_and(is_missing),
        Err(_) => false,
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
