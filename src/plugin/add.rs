//! ADD of an attachment: evaluates the desired policy and applies it.

use super::evaluation::{LazyPod, desired_policies};
use super::inputs::AddInputs;
use super::netns_state::{self, FormatPreference};
use super::reconcile::{Committed, Operation, reconcile};
use super::record::{AttachmentRecord, MAX_ATTACHMENTS, SandboxRecord, attachment, check_rules, since_boot};
use crate::cni::{Error, NetConf, Request, RuleFormat, at_most, result};
use crate::policy::{Interception, Policy};
use crate::state::{Attachment, ROOT, Store};
use crate::sub_plugins;
use serde_json::Value;

/// Applies the policy of the attachment. Returns the previous result.
///
/// # Errors
/// Invalid configuration, missing facts, or the rules can't be applied. The call leaves nothing behind.
pub(super) fn run(request: &Request, conf: &NetConf) -> Result<Value, Error> {
    let result = result::passed_through(conf)?;
    let (mut policies, inputs) = desired_policies(request, &LazyPod::new(request, conf), [(None, conf)])?;
    let policy = policies.pop().map(|(_, policy)| policy).unwrap_or_default();
    let has_executables = sub_plugins::executables(&conf.chain).next().is_some();
    let format = FormatPreference { requested: conf.rule_format, auto: conf.auto_format.filter(|_| !has_executables) };
    apply(request, conf, policy, format, inputs)?;
    Ok(result)
}

/// Applies a policy and saves it with the inputs that live policy needs. An empty policy enters the network namespace
/// only if another attachment of the pod sandbox may have rules there.
///
/// # Errors
/// A limit is exceeded, the attachments contradict each other, or the rules can't be applied. The call leaves nothing
/// behind.
pub(super) fn apply(
    request: &Request,
    conf: &NetConf,
    policy: Policy,
    format: FormatPreference,
    inputs: Option<AddInputs>,
) -> Result<(), Error> {
    let (store, attachment) = (Store::new(ROOT), attachment(request, &conf.name));
    let attachments = store.attachments_of(&attachment.container_id)?;
    let count = attachments.len() + usize::from(!attachments.contains(&attachment));
    at_most(MAX_ATTACHMENTS, "attachments", format_args!("pod {}: {attachment}", request.about), count)?;
    check_rules(&policy, format_args!("pod {}", request.about))?;
    let inputs = inputs.as_ref().and_then(AddInputs::to_saved);
    // A policy that forbids all rules counts for an attachment that is added at the same time.
    if policy.is_empty() && policy.interception == Interception::Unset && !may_have_rules(&store, &attachments)? {
        if let Some(path) = request.netns.as_deref()
            && let Some(id) = netns_state::identity(path)?
        {
            SandboxRecord::claim(&store, &attachment.container_id, path, id)?;
        }
        let record = AttachmentRecord { policy, inputs, added_since_boot: since_boot(), ..AttachmentRecord::default() };
        return store.write(&attachment, &record);
    }
    let netns = netns_state::open_of_request(request)?;
    let committed =
        reconcile(&store, &attachment, &netns, &Operation::Add(format, inputs), &[(attachment.clone(), policy)])?;
    let executables: Vec<&str> = sub_plugins::executables(&conf.chain).map(|(kind, _)| kind).collect();
    let is_native = |it: Committed| it.rule_format == RuleFormat::Nftables && it.policy.redirect().is_some();
    if !executables.is_empty() && committed.is_some_and(is_native) {
        tracing::warn!(
            "the redirection is in format nftables: iptables rules of {} can't exclude traffic from it; set \"dialect\": \
             \"iptables\", or use uid-exclude or dns-exclude instead of the executable",
            executables.join(", ")
        );
    }
    Ok(())
}

/// Returns whether one of the attachments may have rules in the kernel.
fn may_have_rules(store: &Store, attachments: &[Attachment]) -> Result<bool, Error> {
    for attachment in attachments {
        if store.read_part::<SandboxRecord>(attachment)?.is_some_and(|record| record.netns_id.is_some()) {
            return Ok(true);
        }
    }
    Ok(false)
}
