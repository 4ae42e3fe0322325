//! GC: a DEL for each attachment of this network that the runtime no longer has.

use super::del::take_away;
use super::record::NetnsRecord;
use crate::cni::{Code, Error, NetConf, Request, ValidAttachment};
use crate::netns::NetNs;
use crate::state::{Attachment, ROOT, Store};
use serde_json::Value;

/// Nothing goes to stdout. Every attachment is tried.
///
/// # Errors
/// The first of those that could not be taken away.
pub(super) fn run(_: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    // Without a list nothing is known of what is valid, which is not to say that nothing is.
    let Some(valid) = &conf.valid_attachments else { return Ok(None) };
    let store = Store::new(ROOT);
    let is_stale = |attachment: &Attachment| attachment.network == conf.name && !valid.contains(&known_as(attachment));
    let mut failures = Vec::new();
    for container_id in store.containers()? {
        let attachments = store.of_container(&container_id).unwrap_or_else(|error| {
            failures.push(error);
            Vec::new()
        });
        for attachment in attachments.iter().filter(|attachment| is_stale(attachment)) {
            let taken = namespace(&store, attachment).and_then(|there| take_away(&store, attachment, there.as_ref()));
            match taken {
                Ok(()) => tracing::info!("took away the {attachment}"),
                Err(error) => failures.push(error),
            }
        }
    }
    failures.iter().for_each(|error| tracing::error!("{error}"));
    failures.into_iter().next().map_or(Ok(None), Err)
}

fn known_as(attachment: &Attachment) -> ValidAttachment {
    ValidAttachment { container_id: attachment.container_id.clone(), ifname: attachment.ifname.clone() }
}

/// What is where the attachment's namespace was.
///
/// # Errors
/// State can't be read now, or what is there can't be opened.
fn namespace(store: &Store, attachment: &Attachment) -> Result<Option<NetNs>, Error> {
    let record = match store.read_part::<NetnsRecord>(attachment) {
        Err(error) if error.code == Code::State => None,
        other => other?,
    };
    match record.and_then(|record| record.netns) {
        Some(netns) => NetNs::open(&netns),
        None => Ok(None),
    }
}
