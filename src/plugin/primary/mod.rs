//! The primary plugin: the plugin that the runtime calls for the whole network of a pod. It runs networks as
//! [`crate::delegate`]s, applies the redirection rules in this process, and merges all results into one. DEL and GC work
//! from the saved state, without the cluster.

mod add;
pub(crate) mod invocation;
mod networks;
mod plan;

pub use invocation::NetworkRunner;
pub(super) use invocation::PrimaryCall;
pub use plan::{InProcessAttachment, Preview, UNREAD, preview, united};

use crate::cni::{CniCommand, Code, DefaultNetwork, Error, NetworkName, Request, ValidAttachment};
use crate::delegate::{Call, Executables};
use crate::networks::{PodNetwork, PodNetworks};
use crate::plugin::evaluation::source_of;
use crate::plugin::record::{SandboxRecord, read_to_remove};
use crate::plugin::{check, del, status};
use crate::state::{Attachment, ROOT, Store};
use invocation::{Invocation, MultusRecord, SavedState};
use networks::require_ready;
use plan::AddPlan;
use serde_json::Value;
use std::path::PathBuf;

/// Serves a call. Returns the result for stdout, for ADD only.
///
/// # Errors
/// The error for stdout.
pub(super) fn run(call: &PrimaryCall<'_>) -> Result<Option<Value>, Error> {
    match call.request.command {
        CniCommand::Add => return add::run(call).map(Some),
        CniCommand::Check => check(call)?,
        CniCommand::Del => del(call)?,
        CniCommand::Gc => gc(call)?,
        CniCommand::Status => status(call)?,
    }
    Ok(None)
}

/// CHECK: compares every network with the saved result of its ADD, then the pod's rules, then the chained plugins.
///
/// # Errors
/// No saved state of an ADD, a plugin reports a failure, or the rules have drifted.
fn check(call: &PrimaryCall<'_>) -> Result<(), Error> {
    let attachment = call.attachment();
    let Some(saved) = call.store().read::<SavedState>(&attachment)? else {
        let directory = call.primary.cni_dir.display();
        let msg = format!("CHECK without ADD: no saved state of the {attachment} in {directory}; recreate the pod");
        return Err(Error::new(Code::NoAdd, msg));
    };
    let delegate_call = call.delegate_call();
    let (chained, networks): (Vec<_>, Vec<_>) = saved.invocations.iter().partition(|invocation| invocation.is_chained);
    networks.iter().try_for_each(|invocation| invocation.check(&delegate_call))?;
    check::run(call.request, call.conf)?;
    chained.iter().try_for_each(|invocation| invocation.check(&delegate_call))
}

/// DEL: undoes the ADD in reverse order. Every step is tried even if one fails. It succeeds without a network
/// namespace, after another DEL, and without an ADD. Without saved state, the networks in Multus's record get a DEL, or
/// those in the configuration itself, so that their addresses are released.
///
/// # Errors
/// The steps that failed. The saved state remains if `retryDeleteOnError` is set or if it can't be read now.
fn del(call: &PrimaryCall<'_>) -> Result<(), Error> {
    let (store, attachment) = (call.store(), call.attachment());
    let saved = read_to_remove(&store, &attachment, SavedState::recover)?;
    let multus = if saved.is_none() { MultusRecord::read(call) } else { None };
    let removed = match (&saved, &multus) {
        (Some(saved), _) => call.remove(saved, &[]),
        (None, Some(multus)) => call.remove(&multus.saved, &multus.attachments),
        (None, None) => call.remove(&configured(call), &[]),
    };
    if removed.is_ok() || !call.primary.retry_delete_on_error {
        store.remove(&attachment).unwrap_or_else(|error| tracing::warn!("{error}"));
        multus.iter().for_each(MultusRecord::remove);
    }
    removed
}

/// Returns what the configuration alone says about the networks of any pod.
fn configured(call: &PrimaryCall<'_>) -> SavedState {
    let PodNetworks { networks, .. } = call.common_networks(None).unwrap_or_else(|error| {
        tracing::warn!("DEL skips the networks: no saved state of the {}, and {error}", call.attachment());
        PodNetworks::default()
    });
    let (request, conf) = (call.request, call.conf);
    let invocation =
        |(position, network)| Invocation::for_network(network, position == 0, &conf.runtime_config, request);
    // In-process attachments have no executable; their rules are removed afterwards.
    let runs = |(_, network): &(usize, &PodNetwork)| {
        NetworkRunner::of(call.primary, &network.configuration) != NetworkRunner::Here
    };
    let mut invocations: Vec<_> = networks.iter().enumerate().filter(runs).map(invocation).collect();
    let default = networks.first().map_or(request.ifname.as_str(), |network| network.interface.as_str());
    invocations.extend(Invocation::for_executables(&conf.name, default, conf, &request.args_text));
    SavedState { invocations }
}

/// GC: runs DEL for every saved pod sandbox that the runtime no longer has, then GC for the default network and for the
/// rules. Every step is tried even if one fails.
///
/// # Errors
/// The steps that failed.
fn gc(call: &PrimaryCall<'_>) -> Result<(), Error> {
    // A missing list does not mean that all attachments are stale.
    let Some(valid) = &call.conf.valid_attachments else { return Ok(()) };
    let (mut results, mut valid_interfaces) = (Vec::new(), valid.clone());
    let common = call.common_networks(source_of(call.conf).as_deref()).unwrap_or_else(|error| {
        tracing::warn!("GC skips the default network: {error}");
        PodNetworks::default()
    });
    // The default network of pods that select no other.
    let network = common.networks.first().map(|network| &network.configuration);
    let is_of_network = |invocation: &&Invocation| {
        invocation.network().is_ok_and(|own| network.is_some_and(|network| network.name == own.name))
    };
    for attachment in call.store().attachments()?.into_iter().filter(|own| own.network == call.conf.name) {
        let with_interface = |ifname: &String| {
            let (container_id, ifname) = (attachment.container_id.clone(), ifname.clone());
            ValidAttachment { container_id, ifname }
        };
        let saved = read_to_remove(&call.store(), &attachment, SavedState::recover);
        if valid.contains(&with_interface(&attachment.ifname)) {
            // Under each name that selected the network.
            let invocations = saved.ok().flatten().map(|saved| saved.invocations).unwrap_or_default();
            let own = invocations.iter().filter(is_of_network);
            valid_interfaces.extend(own.map(|invocation| with_interface(&invocation.interface)));
        } else {
            results.push(saved.and_then(|saved| remove_stale(call, &attachment, saved)));
        }
    }
    valid_interfaces.sort();
    valid_interfaces.dedup();
    let delegate_call =
        Call { container_id: String::new(), ifname: String::new(), netns: PathBuf::new(), ..call.delegate_call() };
    results.extend(network.map(|network| network.gc(&Executables, &delegate_call, Some(&valid_interfaces))));
    results.push(del::run_gc(call.conf));
    Error::all(results)
}

/// Runs DEL for a pod sandbox that the runtime no longer has. Without readable saved state, the default network's own GC
/// releases its addresses.
fn remove_stale(call: &PrimaryCall<'_>, attachment: &Attachment, saved: Option<SavedState>) -> Result<(), Error> {
    if saved.is_none() {
        return call.store().remove(attachment);
    }
    let request = Request {
        command: CniCommand::Del,
        container_id: attachment.container_id.clone(),
        ifname: attachment.ifname.clone(),
        netns: SandboxRecord::location_of(&Store::new(ROOT), attachment)?.map(|(path, _)| path),
        ..call.request.clone()
    };
    del(&PrimaryCall { request: &request, ..*call })?;
    tracing::info!("removed the stale {attachment}");
    Ok(())
}

/// STATUS: checks that an ADD would succeed now, with the networks that all pods have in common. It does not wait for
/// the readiness file.
///
/// # Errors
/// [`Code::NotAvailable`], or the default network's own error with its code.
fn status(call: &PrimaryCall<'_>) -> Result<(), Error> {
    let unavailable = |error: Error| Error { code: Code::NotAvailable, ..error };
    require_ready(call.primary, None).map_err(unavailable)?;
    let is_by_name = matches!(call.primary.default, DefaultNetwork::Cluster(NetworkName::Name(_)));
    // Without facts, the definition of that name can't be fetched either; the agent repairs that.
    if !status::check_availability(call.conf)? && is_by_name {
        return Ok(());
    }
    let resolved = call.common_networks(source_of(call.conf).as_deref()).map_err(unavailable)?;
    let default = resolved.networks.first().map(|network| network.configuration.clone());
    let network = default.ok_or_else(|| Error::new(Code::Internal, "no default network is configured"))?;
    let plan = AddPlan::of(call, resolved, true).map_err(unavailable)?;
    for InProcessAttachment { name, conf } in &plan.evaluated {
        status::check_chain(conf).map_err(|error| unavailable(error.of_network(Some(name))))?;
    }
    network
        .status(&Executables, &call.delegate_call())
        .map_err(|error| unavailable(Error { msg: format!("network {}: {}", network.name, error.msg), ..error }))
}
