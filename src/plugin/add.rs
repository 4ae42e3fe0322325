//! ADD: finds out what is asked for, makes the kernel hold it, and hands the result on.

use super::desired_policy::check_rules;
use super::desired_policy::wish;
use super::reconcile::{self, converge};
use super::record::{AttachmentRecord, NetnsRecord, attachment};
use crate::cni::{Code, Error, NetConf, Request, at_most, result};
use crate::netns::NetNs;
use crate::policy::Policy;
use crate::state::{Attachment, ROOT, Store};
use serde_json::Value;

/// The most attachments on one container: each call reads what all of them ask for.
const MOST_ATTACHMENTS: usize = 32;

/// The previous result, once the kernel holds what the attachment asks for.
///
/// # Errors
/// Why it does not; then nothing of this call is left.
pub(super) fn run(request: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    let result = result::passed_through(conf)?;
    let wish = wish(request, conf)?;
    wish.ignored.iter().for_each(|ignored| tracing::warn!("{ignored}"));
    tracing::info!(exclusions = wish.policy.exclusions.len(), "{}", wish.why);
    establish(request, conf, wish.policy)?;
    Ok(Some(result))
}

/// Makes the kernel hold what the attachment asks for, and keeps that.
///
/// # Errors
/// Why it does not; then nothing of this call is left.
pub(super) fn establish(request: &Request, conf: &NetConf, policy: Policy) -> Result<(), Error> {
    let (store, attachment) = (Store::new(ROOT), attachment(request, &conf.name));
    let others = store.of_container(&attachment.container_id)?;
    let count = others.len() + usize::from(!others.contains(&attachment));
    at_most(MOST_ATTACHMENTS, "attachments", &format!("pod {}: {attachment}", request.about()), count)?;
    check_rules(&policy, &format!("pod {}", request.about()))?;
    if policy.is_empty() && !has_rules(&store, &attachment)? {
        let record = AttachmentRecord { policy: policy.clone(), ..AttachmentRecord::default() };
        store.write(&attachment, &record)?;
        // Another ADD that came meanwhile may not have seen this one, which may ask for no rules at all.
        match has_rules(&store, &attachment) {
            Ok(false) => return Ok(()),
            Ok(true) => {}
            Err(error) => {
                store.remove(&attachment).unwrap_or_else(|error| tracing::warn!("undoing a failed ADD: {error}"));
                return Err(error);
            }
        }
    }
    converge(&store, &attachment, &sandbox(request)?, reconcile::Operation::Apply(policy, conf.dialect))
}

/// Whether this attachment or another on the container may have left something in the kernel.
fn has_rules(store: &Store, attachment: &Attachment) -> Result<bool, Error> {
    for other in store.of_container(&attachment.container_id)? {
        if store.read_part::<NetnsRecord>(&other)?.is_some_and(|record| record.sandbox.is_some()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The namespace of the call.
pub(super) fn sandbox(request: &Request) -> Result<NetNs, Error> {
    let path = request.netns.as_deref().unwrap_or_else(|| std::path::Path::new(""));
    let gone =
        || Error::new(Code::InvalidNetns, format!("CNI_NETNS {}: there is no network namespace", path.display()));
    NetNs::open(path)?.ok_or_else(gone)
}
