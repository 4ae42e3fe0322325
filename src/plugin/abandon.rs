//! DEL in a network namespace that holds too much to find the rules of one attachment: what the pod's
//! processes put there must not keep the pod from being deleted.

use super::reconcile::records;
use crate::cni::Error;
use crate::firewall;
use crate::netns::{Fixtures, NetNs};
use crate::state::{Attachment, Store};

/// Removes the rules, or makes them have no effect, if no other attachment of the container needs them, and
/// forgets the attachment. To be called in the namespace.
///
/// # Errors
/// The saved state can't be read or written.
pub(super) fn abandon(store: &Store, attachment: &Attachment, sandbox: &NetNs, why: &Error) -> Result<(), Error> {
    tracing::warn!("the rules are removed as far as they are found: {why}");
    let records = records(store, &attachment.container_id, sandbox)?;
    let known = records.policy();
    let other = records.0.iter().find(|(other, record)| other != attachment && record.sandbox.is_some());
    if let Some((other, record)) = other {
        // The chains of the attachment that leaves are known as ours by the one that stays.
        let mut record = record.clone();
        record.before = Some(known?);
        store.write(other, &record)?;
    } else {
        let dialect = records.dialect().unwrap_or_default();
        firewall::remove(dialect, &records.known_rules(), &records.made())
            .unwrap_or_else(|error| tracing::warn!("rules stay in the network namespace until it is deleted: {error}"));
        let removed = records.fixtures().remove_but(&Fixtures::default());
        removed.unwrap_or_else(|error| tracing::warn!("{error}"));
    }
    store.remove(attachment)
}
