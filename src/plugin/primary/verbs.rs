//! CHECK: every network against the result that was kept of it, then the pod's rules.
//!
//! DEL: from what was kept, without asking anybody.
//!
//! GC: a DEL for whatever was kept of containers that the runtime no longer has; then the default
//! network is told.
//!
//! STATUS: whether an ADD could be served now.

use super::invocation::Invocation;
use super::saved_state::SavedState;
use super::{PrimaryCall, readiness};
use crate::cni::{CniCommand, Code, DefaultNetwork, Error, NetworkName, ValidAttachment};
use crate::delegate::{Call, Executables, NetworkConfiguration};
use crate::networks::PodNetworks;
use crate::plugin::{check, gc, status};
use crate::state::Attachment;
use std::path::PathBuf;

/// Nothing goes to stdout.
///
/// # Errors
/// There was no ADD, a network or a member of the chain is not content, or the rules are not what
/// they should be.
pub(super) fn run_check(context: &PrimaryCall<'_>) -> Result<(), Error> {
    let attachment = context.attachment();
    let Some(kept) = context.store().read::<SavedState>(&attachment)? else {
        let msg =
            format!("there was no ADD of the {attachment}: nothing is kept in {}", context.primary.cni_dir.display());
        return Err(Error::new(Code::NoAdd, msg));
    };
    let call = context.call();
    let (chain, networks): (Vec<_>, Vec<_>) = kept.members.iter().partition(|member| member.in_chain);
    networks.iter().try_for_each(|member| member.check(&call))?;
    check::run(context.request, context.conf)?;
    chain.iter().try_for_each(|member| member.check(&call))
}

/// Takes away what the ADD made: in reverse, everything tried. It succeeds without a namespace,
/// twice, and without an ADD; where nothing is kept, the networks that the configuration itself
/// holds get their DEL all the same, so that no address stays taken.
///
/// # Errors
/// What failed; with `retryDeleteOnError` what is needed for another try is kept. State that can't be read
/// now is kept in any case.
pub(super) fn run_del(context: &PrimaryCall<'_>) -> Result<(), Error> {
    let (store, attachment) = (context.store(), context.attachment());
    let kept = match SavedState::read_to_remove(&store, &attachment) {
        Err(error) if error.code == Code::State => {
            tracing::warn!("DEL uses the configuration only, without saved state: {error}");
            None
        }
        other => other?,
    };
    let taken = context.take_away(&kept.unwrap_or_else(|| configured(context)));
    if taken.is_ok() || !context.primary.retry_delete_on_error {
        store.remove(&attachment).unwrap_or_else(|error| tracing::warn!("{error}"));
    }
    taken
}

/// What the configuration says of any pod.
fn configured(context: &PrimaryCall<'_>) -> SavedState {
    let PodNetworks { networks, .. } = context.common_networks(None).unwrap_or_else(|error| {
        tracing::warn!("nothing was kept of this pod, and its networks can't be known without: {error}");
        PodNetworks::default()
    });
    let (request, conf) = (context.request, context.conf);
    let member = |(position, network)| Invocation::network_of(network, position == 0, &conf.runtime_config, request);
    let mut members: Vec<_> = networks.iter().enumerate().map(member).collect();
    let default = networks.first().map_or(request.ifname.as_str(), |network| network.interface.as_str());
    members.extend(Invocation::executables(&conf.name, default, conf, &request.args_text));
    SavedState::without_namespace(members)
}

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
fn interfaces_of(
    context: &PrimaryCall<'_>,
    attachment: &Attachment,
    network: Option<&NetworkConfiguration>,
) -> Vec<ValidAttachment> {
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
    let kept = match SavedState::read_to_remove(&store, attachment) {
        Err(error) if error.code == Code::State => {
            tracing::warn!("GC removes the damaged record; the default network's own GC frees addresses: {error}");
            None
        }
        other => other?,
    };
    let taken = match kept {
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

/// Nothing goes to stdout. The readiness file is not waited for.
///
/// # Errors
/// [`Code::NotAvailable`], or the default network's own code where it is that.
pub(super) fn run_status(context: &PrimaryCall<'_>) -> Result<(), Error> {
    let unavailable = |error: Error| Error { code: Code::NotAvailable, ..error };
    readiness::look(context.primary).map_err(unavailable)?;
    let by_name = matches!(context.primary.default, DefaultNetwork::Cluster(NetworkName::Name(_)));
    // Its definition can't be looked up now, and the agent repairs that.
    if !status::available(context.conf)? && by_name {
        return Ok(());
    }
    let network = status_default_network(context).map_err(unavailable)?;
    let call = context.call();
    network
        .find(&Executables, &call)
        .and_then(|()| network.status(&Executables, &call))
        .map_err(|error| unavailable(Error { msg: format!("network {}: {}", network.name, error.msg), ..error }))
}

fn status_default_network(context: &PrimaryCall<'_>) -> Result<NetworkConfiguration, Error> {
    let source = context.source();
    let networks = context.common_networks(source.as_deref())?.networks;
    let network = networks.first().map(|network| NetworkConfiguration::from(&network.configuration));
    network.ok_or_else(|| Error::new(Code::Internal, "there is no default network"))
}
