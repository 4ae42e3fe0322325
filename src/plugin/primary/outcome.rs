//! What the networks of a pod came to: the default route where it was asked for, and one result for
//! the runtime.

use super::Context;
use super::member::Member;
use super::plan::Plan;
use crate::cni::Error;
use crate::cni::result::AddResult;
use crate::networks::{Selection, move_default_route};
use crate::sandbox::{Access, Sandbox, replace_default_routes};
use serde_json::Value;
use std::time::Duration;

/// How long to wait for another call in the same namespace.
const PATIENCE: Duration = Duration::from_secs(30);

/// Moves the pod's default route where a selection asks for it, in the namespace and in the results,
/// which are kept anew: CHECK must find what is there.
///
/// # Errors
/// The kernel refuses.
pub(super) fn move_route(plan: &mut Plan, results: &mut [AddResult], sandbox: &Sandbox) -> Result<(), Error> {
    let Plan { members, selections, .. } = plan;
    let changes = {
        let mut networks: Vec<(&str, Option<&Selection>, &mut AddResult)> = members
            .iter()
            .zip(selections.iter())
            .zip(results.iter_mut())
            .map(|((member, selection), result)| (member.interface.as_str(), selection.as_ref(), result))
            .collect();
        move_default_route(&mut networks)
    };
    if changes.is_empty() {
        return Ok(());
    }
    sandbox.enter_to(Access::Change, PATIENCE, || {
        changes.iter().try_for_each(|change| replace_default_routes(&change.interface, &change.gateways))
    })?;
    members.iter_mut().zip(&*results).try_for_each(|(member, result): (&mut Member, _)| member.keep(result))
}

/// The result for the runtime: `default`, the default network's after the chain, and what the
/// others add to it.
///
/// # Errors
/// The configuration's version has no place for it.
pub(super) fn merged(context: &Context<'_>, default: AddResult, others: &[AddResult]) -> Result<Value, Error> {
    default.merged(others, context.primary.merge_addresses).to_json(&context.conf.cni_version)
}
