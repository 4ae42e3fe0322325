//! DEL: takes away what the attachment's ADD put in, and nothing else. It succeeds with whatever
//! is left to work on: no namespace, no state, no ADD, twice.

use super::converge::{Wish, converge};
use super::record::{Record, attachment};
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
    if let Some(sandbox) = sandbox {
        if let Err(error) = store.read::<Record>(attachment) {
            tracing::warn!("a redirection that it may have made is left in the pod: {error}");
            forget(store, attachment);
        }
        match converge(store, attachment, sandbox, Wish::Leave) {
            Err(error) if matches!(error.code, Code::State | Code::Io) => tracing::warn!("{error}"),
            other => other?,
        }
    }
    forget(store, attachment);
    Ok(())
}

fn forget(store: &Store, attachment: &Attachment) {
    if let Err(error) = store.remove(attachment) {
        tracing::warn!("{error}");
    }
}
