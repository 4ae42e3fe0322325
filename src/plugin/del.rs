//! DEL and GC: remove what the ADD of an attachment added, and nothing else. DEL succeeds without a network namespace,
//! without saved state, without an ADD, and when it is repeated.

use super::reconcile::{Operation, reconcile};
use super::record::{AttachmentRecord, NetnsRecord, attachment};
use crate::cni::{Code, Error, NetConf, Request, ValidAttachment};
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
/// The first attachment that could not be removed.
pub(super) fn run_gc(conf: &NetConf) -> Result<(), Error> {
    // A missing list does not mean that all attachments are stale.
    let Some(valid) = &conf.valid_attachments else { return Ok(()) };
    let store = Store::new(ROOT);
    let as_valid = |attachment: &Attachment| ValidAttachment {
        container_id: attachment.container_id.clone(),
        ifname: attachment.ifname.clone(),
    };
    let is_stale = |attachment: &Attachment| attachment.network == conf.name && !valid.contains(&as_valid(attachment));
    let mut failures = Vec::new();
    for container_id in store.sandboxes()? {
        let attachments = store.attachments_of(&container_id).unwrap_or_else(|error| {
            failures.push(error);
            Vec::new()
        });
        for attachment in attachments.iter().filter(|attachment| is_stale(attachment)) {
            match recorded_netns(&store, attachment).and_then(|netns| remove(&store, attachment, netns.as_ref())) {
                Ok(()) => tracing::info!("removed the stale {attachment}"),
                Err(error) => failures.push(error),
            }
        }
    }
    failures.iter().for_each(|error| tracing::error!("{error}"));
    failures.into_iter().next().map_or(Ok(()), Err)
}

/// Removes the attachment's rules, if the network namespace exists, and its saved state. Damaged or read-only state is
/// logged: it must not block the deletion of a pod. State that can't be read now is an error, because the next DEL
/// needs it.
///
/// # Errors
/// As [`run`].
pub(super) fn remove(store: &Store, attachment: &Attachment, netns: Option<&NetNs>) -> Result<(), Error> {
    let record = match AttachmentRecord::read(store, attachment) {
        Err(error) if error.code == Code::State => recover_record(store, attachment, &error),
        other => other?,
    };
    let is_of_another_pod = |own, netns| NetnsRecord::is_of_another(store, &attachment.container_id, own, netns);
    match netns {
        Some(netns) if is_of_another_pod(record.and_then(|record| record.netns_id), netns)? => {}
        Some(netns) => match reconcile(store, attachment, netns, Operation::Remove) {
            Err(error) if error.code == Code::State => tracing::warn!("{error}"),
            // The record is gone. A concurrent ADD may have written another one since, which describes its rules.
            other => return other,
        },
        // Calls remove their own locks, unless they are killed.
        None => remove_stale_locks(),
    }
    forget(store, attachment);
    Ok(())
}

/// Replaces a damaged record by what is readable of it; removes it if nothing is.
fn recover_record(store: &Store, attachment: &Attachment, error: &Error) -> Option<AttachmentRecord> {
    let recovered = store.read_part(attachment).ok().flatten().and_then(|fields| AttachmentRecord::recover(&fields));
    let written = recovered.map(|record| record.write(store, attachment).map(|()| record)).transpose();
    let record = written.unwrap_or_else(|error| {
        tracing::warn!("{error}");
        None
    });
    if record.is_some() {
        tracing::warn!("DEL removes the rules that the readable part of a damaged record describes: {error}");
    } else {
        tracing::warn!("DEL leaves the rules of an unreadable record in the pod, if there are any: {error}");
        forget(store, attachment);
    }
    record
}

/// Returns whether a DEL comes so late that `netns` is the path of another pod's network namespace. If that can't be
/// determined, the namespace is not touched.
pub(super) fn is_late(attachment: &Attachment, netns: &Path) -> bool {
    let store = Store::new(ROOT);
    let Some(netns) = NetNs::open(netns).ok().flatten() else { return false };
    let own = NetnsRecord::read(&store, attachment).map(|record| record.and_then(|record| record.netns_id));
    own.and_then(|own| NetnsRecord::is_of_another(&store, &attachment.container_id, own, &netns)).unwrap_or(true)
}

/// Opens the network namespace of an attachment, if its path still exists.
///
/// # Errors
/// The saved state can't be read now, or the network namespace can't be opened.
fn recorded_netns(store: &Store, attachment: &Attachment) -> Result<Option<NetNs>, Error> {
    match NetnsRecord::read(store, attachment)?.and_then(|record| record.netns_path) {
        Some(path) => NetNs::open(&path),
        None => Ok(None),
    }
}

fn forget(store: &Store, attachment: &Attachment) {
    if let Err(error) = store.remove(attachment) {
        tracing::warn!("{error}");
    }
}
