//! DEL and GC: remove what the ADD of an attachment added, and nothing else. DEL succeeds without a network namespace,
//! without saved state, without an ADD, and when it is repeated.

use super::reconcile::{Operation, reconcile};
use super::record::{SandboxRecord, attachment};
use crate::cni::{Code, Error, NetConf, Request};
use crate::netns::{NetNs, remove_stale_locks};
use crate::state::{Attachment, ROOT, Store};
use std::path::Path;

/// Runs DEL.
///
/// # Errors
/// The network namespace exists, but the rules can't be removed; or the saved state can't be read now. The saved state
/// remains for the next DEL.
pub(super) fn run(request: &Request, conf: &NetConf) -> Result<(), Error> {
    let netns = request.netns.as_deref().map(NetNs::open).transpose()?.flatten();
    remove(&Store::new(ROOT), &attachment(request, &conf.name), netns.as_ref())
}

/// Runs GC: a DEL for each attachment of this network that the runtime no longer has. All are
/// tried even if one fails.
///
/// # Errors
/// The attachments that could not be removed.
pub(super) fn run_gc(conf: &NetConf) -> Result<(), Error> {
    // A missing list does not mean that all attachments are stale.
    let Some(valid) = &conf.valid_attachments else { return Ok(()) };
    let store = Store::new(ROOT);
    let is_stale = |Attachment { container_id, network, ifname }: &Attachment| {
        *network == conf.name && !valid.iter().any(|one| (&one.container_id, &one.ifname) == (container_id, ifname))
    };
    let remove_stale = |attachment: &Attachment| {
        let recorded = SandboxRecord::location_of(&store, attachment)?;
        let netns = recorded.map_or(Ok(None), |(path, _)| NetNs::open(&path))?;
        remove(&store, attachment, netns.as_ref())?;
        tracing::info!("removed the stale {attachment}");
        Ok(())
    };
    Error::all(store.attachments()?.iter().filter(|attachment| is_stale(attachment)).map(remove_stale))
}

/// Removes the attachment's rules, if the network namespace exists, and its saved state. Damaged or read-only state is
/// logged: it must not block the deletion of a pod. State that can't be read now is an error, because the next DEL
/// needs it.
///
/// # Errors
/// As [`run`].
pub(super) fn remove(store: &Store, attachment: &Attachment, netns: Option<&NetNs>) -> Result<(), Error> {
    match netns {
        Some(netns) if SandboxRecord::is_of_another(store, attachment, netns)? => {}
        Some(netns) => match reconcile(store, attachment, netns, &Operation::Remove, &[]) {
            Err(error) if error.code == Code::State => tracing::warn!("{error}"),
            // The record is gone. A concurrent ADD may have written another one since, which describes its rules.
            other => return other.map(drop),
        },
        // Calls remove their own locks, unless they are killed.
        None => remove_stale_locks(),
    }
    store.remove(attachment).unwrap_or_else(|error| tracing::warn!("{error}"));
    Ok(())
}

/// Returns whether a DEL comes so late that `netns` is the path of another pod's network namespace. If that can't be
/// determined, the namespace is not touched.
pub(super) fn is_late(attachment: &Attachment, netns: &Path) -> bool {
    let netns = NetNs::open(netns).ok().flatten();
    netns.is_some_and(|netns| SandboxRecord::is_of_another(&Store::new(ROOT), attachment, &netns).unwrap_or(true))
}
