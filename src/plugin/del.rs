//! DEL: takes away what the attachment's ADD put in, and nothing else. It succeeds with whatever
//! is left to work on: no namespace, no state, no ADD, twice.

use super::reconcile::{Operation, converge};
use super::record::{AttachmentRecord, NetnsRecord, attachment};
use crate::cni::{Code, Error, NetConf, Request};
use crate::netns::{NetNs, remove_stale_locks};
use crate::state::{Attachment, ROOT, Store};
use serde_json::Value;

/// Nothing goes to stdout.
///
/// # Errors
/// What is in the kernel could not be taken away and the namespace is still there, or state can't be read
/// now. Then state is still there for the next DEL.
pub(super) fn run(request: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    let sandbox = request.netns.as_deref().map(NetNs::open).transpose()?.flatten();
    take_away(&Store::new(ROOT), &attachment(request, &conf.name), sandbox.as_ref())?;
    Ok(None)
}

/// Takes away what the attachment left in the namespace, where that is still there, and forgets
/// the attachment. State that can't be understood or written is logged; it must not keep a pod from going.
/// State that can't be read now is an error: the next DEL needs it.
///
/// # Errors
/// As [`run`].
pub(super) fn take_away(store: &Store, attachment: &Attachment, sandbox: Option<&NetNs>) -> Result<(), Error> {
    let own = match store.read::<AttachmentRecord>(attachment) {
        Err(error) if error.code == Code::State => {
            let understood = store.read_part(attachment).ok().flatten();
            let understood = understood.and_then(|fields| AttachmentRecord::understood(&fields));
            let written = understood.map(|record| store.write(attachment, &record).map(|()| record)).transpose();
            let record = written.unwrap_or_else(|error| {
                tracing::warn!("{error}");
                None
            });
            if record.is_some() {
                tracing::warn!("the rules are removed as far as the record is understood: {error}");
            } else {
                tracing::warn!("a redirection that it may have made is left in the pod: {error}");
                forget(store, attachment);
            }
            record
        }
        other => other?,
    };
    match sandbox {
        Some(sandbox) if is_of_another(store, attachment, own.as_ref(), sandbox)? => {}
        Some(sandbox) => match converge(store, attachment, sandbox, Operation::Remove) {
            Err(error) if error.code == Code::State => tracing::warn!("{error}"),
            other => other?,
        },
        // Each call removes its own, unless it is killed.
        None => remove_stale_locks(),
    }
    forget(store, attachment);
    Ok(())
}

/// Whether the namespace is not the one of the ADD but, at the same path, that of another pod.
///
/// # Errors
/// State can't be read now.
fn is_of_another(
    store: &Store,
    attachment: &Attachment,
    own: Option<&AttachmentRecord>,
    sandbox: &NetNs,
) -> Result<bool, Error> {
    if let Some(record) = own {
        return Ok(record.sandbox.is_some_and(|id| id != sandbox.id()));
    }
    for container_id in store.containers()?.iter().filter(|container_id| **container_id != attachment.container_id) {
        for other in store.of_container(container_id)? {
            // What can't be understood is of another pod, and no reason to keep this one.
            let record = match store.read_part::<NetnsRecord>(&other) {
                Err(error) if error.code == Code::State => None,
                other => other?,
            };
            if record.is_some_and(|record| record.sandbox == Some(sandbox.id())) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

fn forget(store: &Store, attachment: &Attachment) {
    if let Err(error) = store.remove(attachment) {
        tracing::warn!("{error}");
    }
}
