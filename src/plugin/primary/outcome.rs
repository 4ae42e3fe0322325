//! What the networks of a pod came to: the default route where it was asked for, and one result for
//! the runtime.

use super::PrimaryCall;
use super::invocation::Invocation;
use crate::cni::Error;
use crate::cni::result::AddResult;
use crate::networks::{DefaultRouteChange, Selection, move_default_route};
use crate::netns::{LockMode, NetNs, replace_default_routes};
use serde_json::Value;
use std::time::Duration;

/// How long to wait for another call in the same namespace.
const PATIENCE: Duration = Duration::from_secs(30);

/// Removes a network's own default routes right after its ADD, so that the next network's plugin can add one, and
/// moves them in its result, which is saved anew because CHECK must find the routes that there are. Returns what
/// [`add_routes`] adds.
///
/// # Errors
/// The kernel refuses.
pub(super) fn move_route(
    member: &mut Invocation,
    selection: Option<&Selection>,
    result: &mut AddResult,
    sandbox: &NetNs,
) -> Result<Option<DefaultRouteChange>, Error> {
    let Some(change) = move_default_route(&member.interface, selection, result) else { return Ok(None) };
    sandbox
        .enter_to(LockMode::Change, PATIENCE, || replace_default_routes(&change.interface, &[]))
        .map_err(|error| member.about(error))?;
    member.keep(result)?;
    Ok((!change.gateways.is_empty()).then_some(change))
}

/// Adds the default routes that selections ask for, after the ADD of all networks.
///
/// # Errors
/// The kernel refuses.
pub(super) fn add_routes(changes: &[DefaultRouteChange], sandbox: &NetNs) -> Result<(), Error> {
    if changes.is_empty() {
        return Ok(());
    }
    sandbox.enter_to(LockMode::Change, PATIENCE, || {
        changes.iter().try_for_each(|change| replace_default_routes(&change.interface, &change.gateways))
    })
}

/// The result for the runtime: `default`, the default network's after the chain, and what the
/// others add to it.
///
/// # Errors
/// The configuration's version has no place for it.
pub(super) fn merged(context: &PrimaryCall<'_>, default: AddResult, others: &[AddResult]) -> Result<Value, Error> {
    default.merged(others, context.primary.merge_addresses).to_json(&context.conf.cni_version)
}
