//! CHECK: every network against the result that was kept of it, then the pod's rules.

use super::PrimaryCall;
use super::saved_state::SavedState;
use crate::cni::{Code, Error};
use crate::plugin::check;

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
