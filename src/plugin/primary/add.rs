//! ADD: plans everything, saves the plan, adds the networks, moves the default route, applies the rules, runs the
//! chained plugins, merges the results, and writes the pod's network status. If a step fails, the steps before it are
//! undone and the saved state is removed.

use super::invocation::{Invocation, PrimaryCall};
use super::networks::{networks_of, require_ready};
use super::plan::{AddPlan, InProcessAttachment, rule_format, united};
use crate::cni::result::AddResult;
use crate::cni::{Code, Error, NetworkStatus};
use crate::netns::{LockMode, NetNs, replace_default_routes};
use crate::networks::{
    AddedNetwork, DefaultRouteChange, added_interface, move_default_route, moves_default_route, network_status,
};
use crate::plugin::evaluation::{LazyPod, desired_policies, evaluated_with, is_injected};
use crate::plugin::netns_state::FormatPreference;
use crate::plugin::{add, netns_state};
use crate::pod::Pod;
use crate::trusted_file::{self, FileError};
use serde_json::Value;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::Duration;

/// How long to wait for another call in the same network namespace.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// Only the owner of an entry and of the directory can replace the entry (inode(7)).
const STICKY: u32 = 0o1000;

/// Adds the networks of the pod and applies its rules. Returns the result for the runtime.
///
/// # Errors
/// The first step that failed. The call is undone; if that fails, the state that a DEL needs remains.
pub(super) fn run(call: &PrimaryCall<'_>) -> Result<Value, Error> {
    check_state_directory(&call.primary.cni_dir)?;
    let netns = netns_state::open_of_request(call.request)?;
    require_ready(call.primary, Some(call.primary.readiness_timeout))?;
    let pod = LazyPod::new(call.request, call.conf);
    let annotated = pod.with_annotations()?;
    let mut plan = AddPlan::of(call, networks_of(call, &pod, annotated)?, is_injected(call.conf).unwrap_or(true))?;
    // The facts are fetched before anything is changed.
    plan.evaluated.iter().try_for_each(|one| evaluated_with(&pod, &one.conf).map(drop))?;
    let (store, attachment) = (call.store(), call.attachment());
    store.write(&attachment, &plan.saved)?;
    let outcome = perform(call, &pod, &mut plan, &netns).and_then(|outcome| {
        store.write(&attachment, &plan.saved)?;
        Ok(outcome)
    });
    match outcome {
        Ok((result, network_results)) => {
            report_networks(call, &pod, annotated, &plan, &network_results);
            Ok(result)
        }
        Err(error) => {
            plan.saved.invocations.retain(|invocation| invocation.result.is_some());
            // The runtime follows a failed ADD with a DEL, which retries what can't be undone now.
            let undone = call.remove(&plan.saved, &[]).and_then(|()| store.remove(&attachment));
            undone.unwrap_or_else(|error| tracing::warn!("can't undo the failed ADD: {attachment}: {error}"));
            Err(error)
        }
    }
}

/// Refuses a state directory in which another user could redirect what root writes. A missing directory is created
/// if its nearest existing ancestor is trusted or sticky, such as `/tmp`.
fn check_state_directory(directory: &Path) -> Result<(), Error> {
    let refused = |error| Err(Error::new(Code::InvalidConfig, format!("cniDir is not used: {error}")));
    for existing in directory.ancestors() {
        match trusted_file::check(existing) {
            Ok(_) if existing == directory => return Ok(()),
            Err(error) if error.is_not_found() => continue,
            Err(FileError::Writable { mode, .. }) if existing != directory && mode & STICKY != 0 => {}
            Err(error) => return refused(error),
            Ok(_) => {}
        }
        break;
    }
    let created = DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(FileError::from);
    created.and_then(|()| trusted_file::check(directory)).map(drop).or_else(refused)
}

/// Runs all invocations and applies the rules. An invocation that succeeds gets its result, even if a later step
/// fails. Returns the result for the runtime and that of each network, in the order of the plan.
fn perform(
    call: &PrimaryCall<'_>,
    pod: &LazyPod<'_>,
    plan: &mut AddPlan,
    netns: &NetNs,
) -> Result<(Value, Vec<AddResult>), Error> {
    let delegate_call = call.delegate_call();
    let (mut network_results, mut route_changes) = (Vec::new(), Vec::new());
    let moves_route = moves_default_route(plan.saved.invocations.iter().filter_map(|one| one.selection.as_ref()));
    for invocation in plan.saved.invocations.iter_mut().filter(|invocation| !invocation.is_chained) {
        let previous = invocation.is_auxiliary.then(AddResult::default);
        let mut result = invocation.add(&delegate_call, previous.as_ref())?;
        if moves_route {
            route_changes.extend(remove_default_routes(invocation, &mut result, netns)?);
        }
        network_results.push(result);
    }
    if !route_changes.is_empty() {
        netns.enter_to(LockMode::Change, LOCK_TIMEOUT, || {
            route_changes.iter().try_for_each(|change| replace_default_routes(&change.interface, &change.gateways))
        })?;
    }
    let mut default_result = network_results.first().cloned().unwrap_or_default();
    let previous = default_result.to_json(&call.conf.cni_version)?;
    for InProcessAttachment { conf, .. } in &mut plan.evaluated {
        conf.prev_result = Some(previous.clone());
    }
    let evaluated = plan.evaluated.iter().map(|one| (Some(one.name.as_str()), &one.conf));
    let (policies, inputs) = desired_policies(call.request, pod, evaluated)?;
    let has_executables =
        plan.saved.invocations.iter().any(|invocation| invocation.is_chained || invocation.is_auxiliary);
    let requested = rule_format(call.conf, &plan.evaluated)?;
    let format = FormatPreference { requested, auto: call.conf.auto_format.filter(|_| !has_executables) };
    add::apply(call.request, call.conf, united(&policies)?, format, inputs)?;
    for invocation in plan.saved.invocations.iter_mut().filter(|invocation| invocation.is_chained) {
        default_result = invocation.add(&delegate_call, Some(&default_result))?;
    }
    let others = network_results.get(1..).unwrap_or_default();
    let result = default_result.merged(others, call.primary.merge_addresses).to_json(&call.conf.cni_version)?;
    Ok((result, network_results))
}

/// Removes a network's own default routes right after its ADD, so that the next network's plugin can add one. Updates
/// the network's result, because CHECK compares it with the routes. Returns the routes for [`perform`].
///
/// # Errors
/// The kernel refuses the change.
fn remove_default_routes(
    invocation: &mut Invocation,
    result: &mut AddResult,
    netns: &NetNs,
) -> Result<Option<DefaultRouteChange>, Error> {
    let selection = invocation.selection.as_ref();
    let Some(change) = move_default_route(&invocation.interface, selection, result) else { return Ok(None) };
    netns
        .enter_to(LockMode::Change, LOCK_TIMEOUT, || replace_default_routes(&change.interface, &[]))
        .map_err(|error| invocation.about(error))?;
    invocation.set_result(result)?;
    Ok((!change.gateways.is_empty()).then_some(change))
}

/// Writes the pod's network status and its Events, if `networkStatus` demands them. A failure is logged and does not
/// fail the ADD.
fn report_networks(
    call: &PrimaryCall<'_>,
    pod: &LazyPod<'_>,
    annotated: Option<&Pod>,
    plan: &AddPlan,
    results: &[AddResult],
) {
    let enabled = match call.primary.network_status {
        NetworkStatus::Auto => plan.selects_networks,
        NetworkStatus::Always => true,
        NetworkStatus::Never => false,
    };
    let (Some(reports), Some(pod), true) = (pod.cluster(), annotated, enabled) else { return };
    let (mut networks, mut events) = (Vec::new(), Vec::new());
    let devices: Vec<_> = plan.saved.invocations.iter().map(Invocation::device_info).collect();
    for (position, ((invocation, result), device)) in
        plan.saved.invocations.iter().zip(results).zip(&devices).enumerate()
    {
        let added =
            AddedNetwork { name: &invocation.name, default: position == 0, result, device_info: device.as_ref() };
        networks.push(added);
        events.extend(added_interface(&invocation.interface, added));
    }
    let reported = reports.report(pod, Some(&network_status(&networks)), &events);
    reported.unwrap_or_else(|failure| tracing::warn!("{failure}"));
}
