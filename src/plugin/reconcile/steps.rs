//! The values that one call passes from step to step: what it reads, what it has begun, and what it commits.

use super::operation::Changes;
use crate::cni::Error;
use crate::firewall::{ForeignRedirection, RuleFormat, Ruleset};
use crate::netns::{Fixture, Fixtures, OwnFamilies};
use crate::plugin::netns_state::{FormatFacts, FormatPreference, choose_format};
use crate::plugin::record::SandboxRecords;
use crate::state::Attachment;
use std::collections::BTreeSet;

/// The saved state of a pod sandbox.
pub(super) struct Saved {
    /// The attachments that have a record, in any network namespace.
    pub(super) attachments: Vec<Attachment>,
    /// The records of this network namespace.
    pub(super) records: SandboxRecords,
}

/// The inputs of one attempt.
#[derive(Clone, Copy)]
pub(super) struct Attempt<'a> {
    pub(super) changes: &'a Changes,
    /// The saved state; `None` to read it again.
    pub(super) saved: Option<&'a Saved>,
    pub(super) addresses: OwnFamilies,
    /// Whether the kernel has refused the rules in iptables format.
    pub(super) force_nftables: bool,
}

/// What a call has begun, and may have to undo.
#[derive(Default)]
pub(super) struct StartedWork {
    /// Whether the intent is saved, or may be.
    pub(super) has_intent: bool,
    /// The fixtures that were added to the network namespace, or may be.
    pub(super) added: BTreeSet<Fixture>,
    /// The generation of the rules before a transaction whose outcome is unknown.
    pub(super) unknown_since: Option<u32>,
}

/// The changes to commit after the intent is saved.
pub(super) struct PendingWork {
    /// The records that are saved until the changes are complete.
    pub(super) records: SandboxRecords,
    pub(super) rule_format: RuleFormat,
    /// The rules that the records described before.
    pub(super) known_rules: Ruleset,
    pub(super) desired: Ruleset,
    /// Whether the rules can be written in nftables format if the kernel refuses this one.
    pub(super) may_use_nftables: bool,
    pub(super) fixtures: PlannedFixtures,
}

/// The fixtures that the desired rules need, and what happens to them.
pub(super) struct PlannedFixtures {
    pub(super) needed: Fixtures,
    /// Those of `needed` that do not exist.
    pub(super) missing: BTreeSet<Fixture>,
    /// Those that this call records as added.
    pub(super) added: Fixtures,
    /// The fixtures of rules without saved state.
    pub(super) unrecorded: Fixtures,
}

/// What exists in the network namespace before the changes.
pub(super) struct Existing {
    /// The rules that the records describe.
    pub(super) known_rules: Ruleset,
    /// Another tool's redirection.
    pub(super) foreign: Option<ForeignRedirection>,
    pub(super) format: FormatFacts,
}

impl Existing {
    pub(super) fn choose_format(&self, changes: &Changes) -> Result<RuleFormat, Error> {
        let preference = if changes.redirects() { changes.format } else { FormatPreference::default() };
        choose_format(preference, self.format)
    }
}
