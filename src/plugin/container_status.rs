//! What the node's agent asks of a container that runs: what is kept of it, whether that still holds,
//! and that it hold again. No runtime's call is behind it, and no configuration is needed.

use super::check::differences;
use super::del::take_away;
use super::netns_state::ForeignRedirection;
use super::reconcile::{Operation, converge, records};
use super::record::NetnsRecord;
use crate::cni::{Code, Error};
use crate::firewall::LiveRuleset;
use crate::host_path::{HostPath, HostRoot};
use crate::netns::{NetNs, NetnsId};
use crate::state::{Attachment, ROOT, Store};
use std::path::Path;
use std::time::Duration;

/// What there is of a container in its namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerStatus {
    /// The attachments of which something is kept; none where there was no ADD.
    pub attachments: Vec<Attachment>,
    /// Whether its traffic is sent to a sidecar, by what the attachments asked for or by another
    /// tool's rules.
    pub redirected: bool,
    /// How the kernel differs from what the attachments ask for, one line each.
    pub drift: Vec<String>,
}

impl ContainerStatus {
    /// Whether the kernel redirects it, and exactly as its attachments asked for.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.redirected && self.drift.is_empty() && !self.attachments.is_empty()
    }
}

/// Looks at a container, and changes nothing. Waits for another call in its namespace, up to `patience`.
///
/// # Errors
/// [`Code::TryAgain`]: that took longer. The namespace is gone, is this process's own or can't be looked at; what is kept can't be
/// understood.
pub fn standing(container_id: &str, netns: &Path, patience: Duration) -> Result<ContainerStatus, Error> {
    let (store, sandbox) = (Store::new(ROOT), open(netns)?);
    sandbox.enter(patience, || {
        let records = records(&store, container_id, &sandbox)?;
        let live = LiveRuleset::now()?;
        let asked = records.policy()?.redirect().is_some();
        let foreign = ForeignRedirection::find(&live, &records.known_rules(), asked);
        let drift = if records.0.is_empty() { Vec::new() } else { differences(&records, &live)? };
        Ok(ContainerStatus {
            // Native tables of these names are detour's, with saved state or without.
            redirected: foreign.is_some()
                || (asked && drift.is_empty())
                || (records.0.is_empty() && live.redirects_natively()),
            attachments: records.0.into_iter().map(|(attachment, _)| attachment).collect(),
            drift,
        })
    })
}

/// Makes the kernel hold again what the container's attachments asked for when they were added. Nobody
/// is asked for facts: what was true then counts. Does nothing where there was no ADD.
///
/// # Errors
/// Why it does not hold; then the kernel is as it was.
pub fn restore(container_id: &str, netns: &Path) -> Result<(), Error> {
    let (store, sandbox) = (Store::new(ROOT), open(netns)?);
    // What holds for one of them holds for all.
    match records(&store, container_id, &sandbox)?.0.first() {
        Some((attachment, _)) => converge(&store, attachment, &sandbox, Operation::Reapply),
        None => Ok(()),
    }
}

/// Forgets attachments whose namespace is there no more: runtimes make no DEL for what they did not add
/// themselves, and Multus none that it missed. `root` is where the node's file system is mounted. Gives those that are forgotten.
///
/// # Errors
/// What is kept can't be read or removed.
pub fn forget_gone(root: &Path) -> Result<Vec<Attachment>, Error> {
    let store = Store::new(ROOT);
    let mut forgotten = Vec::new();
    for container_id in store.containers()? {
        for attachment in store.of_container(&container_id)? {
            let record = match store.read_part(&attachment) {
                // It must not keep all others.
                Err(error) if error.code == Code::State => {
                    tracing::warn!("{error}");
                    None
                }
                other => other?,
            };
            let Some(NetnsRecord { sandbox: Some(id), netns: Some(netns) }) = record else { continue };
            let gone = if netns.starts_with(root) {
                NetNs::open(&netns).is_ok_and(|there| there.is_none_or(|there| there.id() != id))
            } else {
                is_gone_from_node(root, &netns, id)
            };
            if gone {
                take_away(&store, &attachment, None)?;
                forgotten.push(attachment);
            }
        }
    }
    Ok(forgotten)
}

/// Whether the runtime's path leads nowhere, or to another namespace. A file that is no namespace says nothing:
/// without mount propagation, each looks so below `root`.
fn is_gone_from_node(root: &Path, netns: &Path, id: NetnsId) -> bool {
    let Some(path) = HostPath::new(netns) else { return false };
    let root = HostRoot::new(root);
    let exists = |path: &HostPath| root.reach(path).and_then(|path| path.try_exists()).ok();
    match (exists(&path.parent()), exists(&path)) {
        (Some(true), Some(false)) => true,
        (_, Some(true)) => {
            let there = root.reach(&path).ok().and_then(|path| NetNs::open(&path).ok().flatten());
            there.is_some_and(|there| there.id() != id)
        }
        _ => false,
    }
}

fn open(netns: &Path) -> Result<NetNs, Error> {
    super::check_own_netns(netns)?;
    let gone = || Error::new(Code::InvalidNetns, format!("{}: there is no network namespace", netns.display()));
    NetNs::open(netns)?.ok_or_else(gone)
}
