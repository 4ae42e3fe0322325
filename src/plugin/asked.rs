//! What all attachments in one network namespace ask for, found by the namespace alone.

use super::converge::records;
use super::desired::ruleset;
use crate::cni::Error;
use crate::firewall::{Dialect, Ruleset};
use crate::sandbox::Sandbox;
use crate::state::{Attachment, Store};

/// What is kept of a namespace's attachments, together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// Who asks.
    pub attachments: Vec<Attachment>,
    /// The rules that the namespace should hold.
    pub rules: Ruleset,
    /// How they are written.
    pub dialect: Dialect,
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
            let rules = ruleset(&records.policy()?, records.ip6());
            let dialect = records.dialect().unwrap_or_default();
            let attachments = records.0.into_iter().map(|(attachment, _)| attachment).collect();
            return Ok(Some(Asked { attachments, rules, dialect }));
        }
    }
    Ok(None)
}
