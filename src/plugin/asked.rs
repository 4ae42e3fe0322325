//! What all attachments in one network namespace ask for, found by the namespace alone.

use super::converge::records;
use super::desired::{fixtures, ruleset};
use crate::cni::Error;
use crate::firewall::{Dialect, Ruleset};
use crate::policy::Policy;
use crate::sandbox::{Fixtures, Sandbox};
use crate::state::{Attachment, Store};

/// What is kept of a namespace's attachments, together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// Who asks.
    pub attachments: Vec<Attachment>,
    /// What they ask for together.
    pub policy: Policy,
    /// The rules that the namespace should hold.
    pub rules: Ruleset,
    /// How they are written.
    pub dialect: Dialect,
    /// What the rules need of the namespace besides themselves.
    pub fixtures: Fixtures,
}

/// Looks through all containers for the attachments whose rules are in `sandbox`; `None` where
/// nobody has asked for anything there.
///
/// # Errors
/// State can't be read, or the attachments contradict each other.
pub fn asked(store: &Store, sandbox: &Sandbox) -> Result<Option<Asked>, Error> {
    for container in store.containers()? {
        let mut records = records(store, &container, sandbox)?;
        records.0.retain(|(_, record)| record.sandbox == Some(sandbox.id()));
        if !records.0.is_empty() {
            let policy = records.policy()?;
            let (rules, fixtures) = (ruleset(&policy, records.ip6()), fixtures(&policy, records.ip6()));
            let dialect = records.dialect().unwrap_or_default();
            let attachments = records.0.into_iter().map(|(attachment, _)| attachment).collect();
            return Ok(Some(Asked { attachments, policy, rules, dialect, fixtures }));
        }
    }
    Ok(None)
}
