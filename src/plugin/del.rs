//! DEL: takes away what the attachment's ADD put in, and nothing else. It succeeds with whatever
//! is left to work on: no namespace, no state, no ADD, twice.

use super::converge::{Wish, converge};
use super::record::{InSandbox, Record, attachment};
use crate::cni::{Code, Error, NetConf, Request};
use crate::sandbox::Sandbox;
use crate::state::{Attachment, ROOT, Store};
use serde_json::Value;

/// Nothing goes to stdout.
///
/// # Errors
/// What is in the kernel could not be taken away and the namespace is still there.
pub(super) fn run(request: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    let sandbox = request.netns.as_deref().map(Sandbox::open).transpose()?.flatten();
    take_away(&Store::new(ROOT), &attachment(request, &conf.name), sandbox.as_ref())?;
    Ok(None)
}

/// Takes away what the attachment left in the namespace, where that is still there, and forgets
/// the attachment. State that can't be read or written is logged; it must not keep a pod from going.
///
/// # Errors
/// As [`run`].
pub(super) fn take_away(store: &Store, attachment: &Attachment, sandbox: Option<&Sandbox>) -> Result<(), Error> {
    let own = store.read::<Record>(attachment).unwrap_or_else(|error| {
        tracing::warn!("a redirection that it may have made is left in the pod: {error}");
        forget(store, attachment);
        None
    });
    if let Some(sandbox) = sandbox.filter(|sandbox| !is_of_another(store, attachment, own.as_ref(), sandbox)) {
        match converge(store, attachment, sandbox, Wish::Leave) {
            Err(error) if matches!(error.code, Code::State | Code::Io) => tracing::warn!("{error}"),
            other => other?,
        }
    }
    forget(store, attachment);
    Ok(())
}

/// Whether the namespace is not the one of the ADD but, at the same path, that of another pod.
fn is_of_another(store: &Store, attachment: &Attachment, own: Option<&Record>, sandbox: &Sandbox) -> bool {
    if let Some(record) = own {
        return record.sandbox.is_some_and(|id| id != sandbox.id());
    }
    let containers = store.containers().unwrap_or_default();
    let others = containers.iter().filter(|container_id| **container_id != attachment.container_id);
    let kept = others.flat_map(|container_id| store.of_container(container_id).unwrap_or_default());
    let mut records = kept.filter_map(|other| store.read::<InSandbox>(&other).ok().flatten());
    records.any(|record| record.sandbox == Some(sandbox.id()))
}

fn forget(store: &Store, attachment: &Attachment) {
    if let Err(error) = store.remove(attachment) {
        tracing::warn!("{error}");
    }
}
