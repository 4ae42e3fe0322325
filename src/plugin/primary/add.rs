//! ADD: everything is found out first; then the intent is kept, the networks are added, the rules
//! made, the chain run. What fails is undone from there upwards, and nothing of it is kept.
//!
//! What the networks of a pod came to: the default route where it was asked for, and one result for
//! the runtime.

use super::invocation::Invocation;
use super::lazy_pod::LazyPod;
use super::plan::AddPlan;
use super::saved_state::SavedState;
use super::{PrimaryCall, lazy_pod, mesh, readiness};
use crate::cni::result::AddResult;
use crate::cni::{Code, Error, NetConf};
use crate::netns::{LockMode, NetNs, replace_default_routes};
use crate::networks::{DefaultRouteChange, Selection, move_default_route, moves_default_route};
use crate::plugin::add;
use crate::trusted_file;
use serde_json::Value;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::Duration;

/// The result for the runtime.
///
/// # Errors
/// Why it could not be done; then nothing of this call is left, or all that a DEL needs to remove it.
pub(super) fn run(context: &PrimaryCall<'_>) -> Result<Value, Error> {
    check_state_directory(&context.primary.cni_dir)?;
    let sandbox = add::sandbox(context.request)?;
    readiness::wait(context.primary)?;
    let known = LazyPod::of(context)?;
    let pod = known.annotated()?;
    let mut plan = AddPlan::of(context, &known, pod)?;
    mesh::ask_ahead(context, &known, &plan.attached)?;
    let (store, attachment) = (context.store(), context.attachment());
    store.write(&attachment, &SavedState::of(&sandbox, plan.members.clone()))?;
    let done = perform(context, &known, &mut plan, &sandbox).and_then(|done| {
        store.write(&attachment, &SavedState::of(&sandbox, plan.members.clone()))?;
        Ok(done)
    });
    match done {
        Ok(AddOutcome { result, networks }) => {
            lazy_pod::tell(context, &known, pod, &plan, &networks);
            Ok(result)
        }
        Err(error) => {
            let mut begun = SavedState::of(&sandbox, plan.members);
            begun.members.retain(|member| member.result.is_some());
            // What can't be undone now is for the DEL that the runtime makes next.
            let undone = context.take_away(&begun).and_then(|()| store.remove(&attachment));
            undone.unwrap_or_else(|error| tracing::warn!("undoing a failed ADD: {error}"));
            Err(error)
        }
    }
}

/// Refuses a directory in which another user could redirect what root writes. One that does not exist is
/// created if the nearest one above it is fine; that may be sticky, such as `/tmp`.
fn check_state_directory(directory: &Path) -> Result<(), Error> {
    let refused = |error| Err(Error::new(Code::InvalidConfig, format!("cniDir is not used: {error}")));
    for existing in directory.ancestors() {
        match trusted_file::check(existing) {
            Ok(_) if existing == directory => return Ok(()),
            Err(error) if error.is_not_found() => continue,
            Err(trusted_file::FileError::Writable { mode, .. }) if existing != directory && mode & STICKY != 0 => {}
            Err(error) => return refused(error),
            Ok(_) => {}
        }
        break;
    }
    let made = DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(trusted_file::FileError::from);
    made.and_then(|()| trusted_file::check(directory)).map(drop).or_else(refused)
}

/// Only the owner of an entry and of the directory can replace the entry (inode(7)).
const STICKY: u32 = 0o1000;

/// What an ADD came to.
struct AddOutcome {
    /// For the runtime.
    result: Value,
    /// Each network's own.
    networks: Vec<AddResult>,
}

/// Adds all members and makes the rules. Those that were added have a result, whatever comes after.
fn perform(
    context: &PrimaryCall<'_>,
    known: &LazyPod<'_>,
    plan: &mut AddPlan,
    sandbox: &NetNs,
) -> Result<AddOutcome, Error> {
    let call = context.call();
    let (mut networks, mut changes) = (Vec::new(), Vec::new());
    let moves = moves_default_route(plan.selections.iter().flatten());
    for (member, selection) in plan.members.iter_mut().zip(&plan.selections) {
        let mut result = member.add(&call, None)?;
        if moves {
            changes.extend(move_route(member, selection.as_ref(), &mut result, sandbox)?);
        }
        networks.push(result);
    }
    add_routes(&changes, sandbox)?;
    let mut default = networks.first().cloned().unwrap_or_default();
    let previous = default.to_json(&context.conf.cni_version)?;
    let (policy, dialect) = mesh::wish(context, known, &plan.attached, &previous)?;
    add::establish(context.request, &NetConf { dialect, ..context.conf.clone() }, policy)?;
    for member in plan.members.iter_mut().filter(|member| member.in_chain) {
        default = member.add(&call, Some(&default))?;
    }
    let result = merged(context, default, networks.get(1..).unwrap_or_default())?;
    Ok(AddOutcome { result, networks })
}

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
