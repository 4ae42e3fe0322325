//! DEL: takes away what the attachment's ADD put in, and nothing else. It succeeds with whatever
//! is left to work on: no namespace, no state, no ADD, twice.

use super::converge::{Wish, converge};
use super::record::attachment;
use crate::cni::{Code, Error, NetConf, Request};
use crate::sandbox::Sandbox;
use crate::state::{ROOT, Store};
use serde_json::Value;

/// Nothing goes to stdout.
///
/// # Errors
/// What is in the kernel could not be taken away and the namespace is still there.
pub(super) fn run(request: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    let (store, attachment) = (Store::new(ROOT), attachment(request, &conf.name));
    let sandbox = request.netns.as_deref().map(Sandbox::open).transpose()?.flatten();
    if let Some(sandbox) = sandbox {
        match converge(&store, &attachment, &sandbox, Wish::Leave) {
            // What can't be read can't say what to take away; it must not keep the pod from going.
            Err(error) if error.code == Code::State => tracing::warn!("rules are left in the pod: {error}"),
            other => other?,
        }
    }
    store.remove(&attachment)?;
    Ok(None)
}
