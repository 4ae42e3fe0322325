//! What users are told of a pod's networks as events, in Multus's words: tools look for them.

use super::AddedNetwork;
use crate::cluster::{Event, ObjectRef};

/// An interface was added. A result without interface and address is none.
#[must_use]
pub fn added_interface(interface: &str, added: AddedNetwork<'_>) -> Option<Event> {
    let ips: Vec<String> = added.result.ips.iter().map(|ip| ip.address.to_string()).collect();
    let message = format!("Add {interface} [{}] from {}", ips.join(" "), added.name);
    added.result.has_interface().then_some(Event { warning: false, reason: "AddedInterface".into(), message })
}

/// A definition is not there; `sought` says where and how it was looked for.
#[must_use]
pub fn no_network_found(wanted: &ObjectRef, sought: &str) -> Event {
    let ObjectRef { namespace, name } = wanted;
    let message = format!("cannot find a network-attachment-definition ({name}) in namespace ({namespace}): {sought}");
    Event { warning: true, reason: "NoNetworkFound".into(), message }
}
