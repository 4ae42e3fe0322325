//! GC: forgets the attachments of this network that the runtime no longer has. Their namespaces
//! are gone, so only what is kept of them is left.

use crate::cni::{Error, NetConf, Request, ValidAttachment};
use crate::state::{Attachment, ROOT, Store};
use serde_json::Value;

/// Nothing goes to stdout. Every attachment is tried.
///
/// # Errors
/// The first of those that could not be forgotten.
pub(super) fn run(_: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    // Without a list nothing is known of what is valid, which is not to say that nothing is.
    let Some(valid) = &conf.valid_attachments else { return Ok(None) };
    let store = Store::new(ROOT);
    let mut first_error = None;
    for container_id in store.containers()? {
        let stale = |attachment: &Attachment| attachment.network == conf.name && !valid.contains(&known_as(attachment));
        for attachment in store.of_container(&container_id)?.iter().filter(|a| stale(a)) {
            match store.remove(attachment) {
                Ok(()) => tracing::info!("forgot the {attachment}"),
                Err(error) => {
                    tracing::error!("{error}");
                    first_error.get_or_insert(error);
                }
            }
        }
    }
    first_error.map_or(Ok(None), Err)
}

fn known_as(attachment: &Attachment) -> ValidAttachment {
    ValidAttachment { container_id: attachment.container_id.clone(), ifname: attachment.ifname.clone() }
}
