//! The view of the node's agent on a running container: its live state, repair from saved state, and removal of saved
//! state whose network namespace is gone. No call of a runtime and no configuration is involved.

use crate::cni::Error;
use crate::firewall::LiveRuleset;
use crate::host_path::{HostPath, HostRoot};
use crate::netns::{NetNs, NetnsId};
use crate::plugin::check::differences;
use crate::plugin::del::remove;
use crate::plugin::netns_state::ruleset;
use crate::plugin::open_netns;
use crate::plugin::reconcile::{Operation, reconcile};
use crate::plugin::record::{NetnsRecord, SandboxRecords};
use crate::state::{Attachment, ROOT, Store};
use std::path::Path;
use std::time::Duration;

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
    let (store, netns) = (Store::new(ROOT), open_netns::at(netns)?);
    netns.enter(timeout, || {
        let records = SandboxRecords::read(&store, container_id, &netns)?;
        let live = LiveRuleset::now()?;
        let policy = records.policy()?;
        let desired = policy.redirect().is_some();
        let foreign = live.foreign_redirection(&records.known_rules());
        let drift = if records.attachments.is_empty() {
            Vec::new()
        } else {
            differences(&records, &policy, &ruleset(&policy, records.ip6()), &live)?
        };
        Ok(ContainerStatus {
            // Native tables with these names belong to detour, even without saved state.
            redirected: foreign.is_some()
                || (desired && drift.is_empty())
                || (records.attachments.is_empty() && live.redirects_natively()),
            attachments: records.attachments.into_iter().map(|(attachment, _)| attachment).collect(),
            drift,
        })
    })
}

/// Restores the rules of the container's attachments from saved state, with the facts of their ADD. Does nothing for
/// a container without an ADD.
///
/// # Errors
/// The rules can't be applied; the kernel's rules are unchanged.
pub fn restore(container_id: &str, netns: &Path) -> Result<(), Error> {
    let (store, netns) = (Store::new(ROOT), open_netns::at(netns)?);
    // Reconciling one attachment applies the rules of all.
    match SandboxRecords::read(&store, container_id, &netns)?.attachments.first() {
        Some((attachment, _)) => reconcile(&store, attachment, &netns, Operation::Reapply),
        None => Ok(()),
    }
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
    for container_id in store.sandboxes()? {
        for attachment in store.attachments_of(&container_id)? {
            // A damaged record must not block the others.
            let Some((path, id)) = NetnsRecord::location(&store, &attachment)? else { continue };
            if is_gone(&HostRoot::new(root), &path, id) {
                remove(&store, &attachment, None)?;
                removed.push(attachment);
            }
        }
    }
    Ok(removed)
}

/// Returns whether the network namespace `id` certainly no longer exists at the runtime's path, on the node at `root`.
pub(super) fn is_gone(root: &HostRoot, path: &Path, id: NetnsId) -> bool {
    if path.starts_with(root.mount()) {
        NetNs::open(path).is_ok_and(|netns| netns.is_none_or(|netns| netns.id() != id))
    } else {
        is_gone_from_node(root, path, id)
    }
}

/// Returns whether the runtime's path does not exist on the node, or is another network namespace. A path that exists
/// but is no namespace proves nothing: without mount propagation, every namespace below `root` looks like that.
fn is_gone_from_node(root: &HostRoot, path: &Path, id: NetnsId) -> bool {
    let Some(path) = HostPath::new(path) else { return false };
    let exists = |path: &HostPath| root.reach(path).and_then(|path| path.try_exists()).ok();
    match (exists(&path.parent()), exists(&path)) {
        (Some(true), Some(false)) => true,
        (_, Some(true)) => {
            let netns = open_netns::on_node(root, path.as_path());
            netns.is_ok_and(|netns| netns.is_some_and(|netns| netns.id() != id))
        }
        _ => false,
    }
}
