//! What all attachments in one network namespace ask for, found by the namespace alone.

use super::reconcile::records;
use super::desired::{fixtures, ruleset};
use super::record::{AttachmentRecord, ContainerRecords};
use crate::cni::Error;
use crate::firewall::{RuleFormat, Ruleset};
use crate::policy::Policy;
use crate::netns::{Fixtures, NetNs};
use crate::state::{Attachment, Store};

/// What is kept of a namespace's attachments, together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetnsState {
    /// Who asks.
    pub attachments: Vec<Attachment>,
    /// What they ask for together.
    pub policy: Policy,
    /// The rules that the namespace should hold.
    pub rules: Ruleset,
    /// How they are written.
    pub dialect: RuleFormat,
    /// What the rules need of the namespace besides themselves.
    pub fixtures: Fixtures,
}

/// Looks through all containers for the attachments whose rules are in `sandbox`; `None` where
/// nobody has asked for anything there.
///
/// # Errors
/// State can't be read, or the attachments contradict each other.
pub fn asked(store: &Store, sandbox: &NetNs) -> Result<Option<NetnsState>, Error> {
    let mut found = Vec::new();
    for container in store.containers()? {
        let mut records = records(store, &container, sandbox)?;
        records.0.retain(|(_, record)| record.sandbox == Some(sandbox.id()));
        if !records.0.is_empty() {
            found.push(records);
        }
    }
    // The kernel gives a namespace's number to a later one, and a pod that got no DEL leaves what it had.
    let current = found.iter().position(|records| records.0.iter().any(|(_, record)| leads_to(record, sandbox)));
    found.into_iter().nth(current.unwrap_or_default()).map(NetnsState::of).transpose()
}

/// Whether the path of the ADD still leads there. In the agent's container none may lead anywhere.
fn leads_to(record: &AttachmentRecord, sandbox: &NetNs) -> bool {
    let there = record.netns.as_deref().and_then(|path| NetNs::open(path).ok().flatten());
    there.is_some_and(|there| there.id() == sandbox.id())
}

impl NetnsState {
    fn of(records: ContainerRecords) -> Result<Self, Error> {
        let policy = records.policy()?;
        let (rules, fixtures) = (ruleset(&policy, records.ip6()), fixtures(&policy, records.ip6()));
        let dialect = records.dialect().unwrap_or_default();
        let attachments = records.0.into_iter().map(|(attachment, _)| attachment).collect();
        Ok(Self { attachments, policy, rules, dialect, fixtures })
    }
}
