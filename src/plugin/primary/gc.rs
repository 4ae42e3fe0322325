//! GC: a DEL for whatever was kept of containers that the runtime no longer has; then the default
//! network is told.

use super::PrimaryCall;
use super::saved_state::SavedState;
use crate::cni::{CniCommand, Error, ValidAttachment};
use crate::delegate::{Call, Executables, NetworkConfiguration};
use crate::plugin::gc;
use crate::state::Attachment;
use std::path::PathBuf;

/// Nothing goes to stdout. Everything is tried.
///
/// # Errors
/// What failed.
pub(super) fn run_gc(context: &PrimaryCall<'_>) -> Result<(), Error> {
    // Without a list nothing is known of what is valid, which is not to say that nothing is.
    let Some(valid) = &context.conf.valid_attachments else { return Ok(()) };
    let mut results = Vec::new();
    let mut known = valid.clone();
    let network = default_network(context);
    for attachment in attachments(context)? {
        let as_valid =
            ValidAttachment { container_id: attachment.container_id.clone(), ifname: attachment.ifname.clone() };
        if valid.contains(&as_valid) {
            known.extend(interfaces_of(context, &attachment, network.as_ref()));
        } else {
            results.push(take_away(context, &attachment));
        }
    }
    known.sort();
    known.dedup();
    let call = Call { container_id: String::new(), ifname: String::new(), netns: PathBuf::new(), ..context.call() };
    results.extend(network.map(|network| network.gc(&Executables, &call, Some(&known))));
    results.push(gc::run(context.request, context.conf).map(drop));
    Error::all(results)
}

/// All of this network of which something is kept.
fn attachments(context: &PrimaryCall<'_>) -> Result<Vec<Attachment>, Error> {
    let store = context.store();
    let mut all = Vec::new();
    for container_id in store.containers()? {
        // Others keep files there, too: Multus, and whoever installs this plugin.
        match store.of_container(&container_id) {
            Ok(attachments) => all.extend(attachments),
            Err(error) => tracing::debug!("{error}"),
        }
    }
    all.retain(|attachment| attachment.network == context.conf.name);
    Ok(all)
}

/// The default network of pods that select no other.
fn default_network(context: &PrimaryCall<'_>) -> Option<NetworkConfiguration> {
    let source = context.source();
    let networks = context
        .common_networks(source.as_deref())
        .inspect_err(|error| tracing::warn!("GC of the default network: {error}"));
    networks.ok()?.networks.first().map(|network| NetworkConfiguration::from(&network.configuration))
}

/// The interfaces that a container has of the default network, by whatever name it was selected.
fn interfaces_of(context: &PrimaryCall<'_>, attachment: &Attachment, network: Option<&NetworkConfiguration>) -> Vec<ValidAttachment> {
    let kept = SavedState::read_to_remove(&context.store(), attachment).ok().flatten().unwrap_or_default();
    let is_of = |name: &str| network.is_some_and(|network| network.name == name);
    let members = kept.members.iter().filter(|member| member.network().is_ok_and(|own| is_of(&own.name)));
    members
        .map(|member| ValidAttachment {
            container_id: attachment.container_id.clone(),
            ifname: member.interface.clone(),
        })
        .collect()
}

fn take_away(context: &PrimaryCall<'_>, attachment: &Attachment) -> Result<(), Error> {
    let store = context.store();
    let taken = match SavedState::read_to_remove(&store, attachment)? {
        Some(kept) => {
            let call = Call {
                command: CniCommand::Del,
                container_id: attachment.container_id.clone(),
                netns: kept.netns().unwrap_or_default(),
                ..context.call()
            };
            // The rules are for the GC of rules, which knows their namespace.
            kept.del(&call, || Ok(()))
        }
        None => Ok(()),
    };
    if taken.is_ok() || !context.primary.retry_delete_on_error {
        store.remove(attachment)?;
        tracing::info!("took away the {attachment}");
    }
    taken
}
