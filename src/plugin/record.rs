//! The saved state of attachments: all records of one pod sandbox.

mod attachment;
mod netns;

use super::inputs::SavedInputs;
use crate::cni::{Error, Request, at_most};
use crate::firewall::rule::Family;
use crate::firewall::{CreatedTables, RuleFormat, Ruleset};
use crate::netns::{Fixtures, NetNs, NetnsId};
use crate::policy::{Contradiction, Exclusion, Policy};
use crate::state::{Attachment, Store};
pub(crate) use attachment::AttachmentRecord;
pub(super) use attachment::{ExclusionList, fixtures, writes_ip6};
pub(super) use netns::{NetnsRecord, SandboxRecord, since_boot};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

/// The maximum number of attachments of one pod sandbox: each call reads the records of all of them.
pub(super) const MAX_ATTACHMENTS: usize = 32;

/// The maximum size of the saved policies of one pod sandbox, in bytes: the author of a pod must not fill the node's
/// memory, which the files use.
const MAX_POLICY_BYTES: usize = 1 << 20;

/// The records of one pod sandbox.
#[derive(Debug, Clone, Default)]
pub(crate) struct SandboxRecords {
    /// Those of all attachments, sorted by attachment.
    pub(super) attachments: Vec<(Attachment, AttachmentRecord)>,
    /// What the attachments share.
    pub(super) sandbox: SandboxRecord,
}

impl SandboxRecords {
    /// Reads the records of a pod sandbox. Skips those of another network namespace, which is gone.
    pub(super) fn read(store: &Store, container_id: &str, netns: &NetNs) -> Result<Self, Error> {
        Self::read_of(store, container_id, &store.attachments_of(container_id)?, netns.id())
    }

    /// Reads the records of these `attachments` of a pod sandbox as [`Self::read`] does.
    pub(super) fn read_of(
        store: &Store,
        container_id: &str,
        attachments: &[Attachment],
        netns: NetnsId,
    ) -> Result<Self, Error> {
        let mut records = Self::read_all(store, attachments)?.of_netns(netns);
        let found = SandboxRecord::read(store, container_id, netns);
        let is_recorded = found.is_some();
        records.sandbox = found.unwrap_or_default();
        for (_, record) in &records.attachments {
            records.sandbox.add_from(record, is_recorded);
        }
        Ok(records)
    }

    /// Reads the records of these `attachments`, also those of another network namespace, without what they share.
    pub(super) fn read_all(store: &Store, attachments: &[Attachment]) -> Result<Self, Error> {
        let (mut records, mut lists) = (Self::default(), BTreeMap::new());
        for attachment in attachments {
            let record = AttachmentRecord::read_with(store, attachment, &mut lists)?;
            records.attachments.extend(record.map(|record| (attachment.clone(), record)));
        }
        Ok(records)
    }

    /// Returns the records without those of another network namespace.
    pub(super) fn of_netns(mut self, id: NetnsId) -> Self {
        self.attachments.retain(|(_, record)| record.netns_id.is_none_or(|own| own == id));
        self
    }

    /// Returns the record of an attachment.
    pub(super) fn get(&self, attachment: &Attachment) -> Option<&AttachmentRecord> {
        self.attachments.iter().find(|(other, _)| other == attachment).map(|(_, record)| record)
    }

    /// Inserts or replaces the record of `attachment`. The records stay sorted, so that the union of the policies does
    /// not depend on the order of the ADDs.
    pub(crate) fn insert(&mut self, attachment: &Attachment, record: AttachmentRecord) {
        self.attachments.retain(|(other, _)| other != attachment);
        self.attachments.push((attachment.clone(), record));
        self.attachments.sort_by(|(a, _), (b, _)| a.cmp(b));
    }

    /// Checks the size of the saved policies, in which equal lists of exclusions count once.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`] with `place`, the limit and the size.
    pub(super) fn check_size(&self, place: impl Display) -> Result<(), Error> {
        let mut lists: Vec<&BTreeSet<Exclusion>> = Vec::new();
        for (_, AttachmentRecord { policy, .. }) in &self.attachments {
            if !lists.contains(&&policy.exclusions) {
                lists.push(&policy.exclusions);
            }
        }
        let inputs = self.attachments.iter().filter_map(|(_, record)| record.inputs.as_ref());
        let lists = lists.into_iter().map(|list| serde_json::to_vec(list).map_or(0, |text| text.len()));
        let size = lists.chain(inputs.map(SavedInputs::len)).sum();
        at_most(MAX_POLICY_BYTES, "bytes of saved policies", place, size)
    }

    /// Returns the union of all policies.
    ///
    /// # Errors
    /// Two policies contradict each other.
    pub(crate) fn policy(&self) -> Result<Policy, Error> {
        let policies: Vec<_> =
            self.attachments.iter().map(|(attachment, record)| (attachment, &record.policy)).collect();
        Policy::united(&policies).map_err(Contradiction::into_error)
    }

    /// Returns the format of the redirection; `None` without one.
    pub(crate) fn rule_format(&self) -> Option<RuleFormat> {
        self.attachments.iter().find_map(|(_, record)| record.format_of_redirection())
    }

    /// Returns the format of the redirection of all attachments except `attachment`.
    pub(super) fn rule_format_of_others(&self, attachment: &Attachment) -> Option<RuleFormat> {
        let mut others = self.attachments.iter().filter(|(other, _)| other != attachment);
        others.find_map(|(_, record)| record.format_of_redirection())
    }

    /// Returns every netfilter chain and built-in rule that may be in the iptables tables because of these attachments,
    /// even if a call was killed.
    pub(crate) fn known_rules(&self) -> Ruleset {
        if self.rule_format() != Some(RuleFormat::Iptables) {
            return Ruleset::default();
        }
        let ruleset = |policy: &Policy| Ruleset::of_redirection(policy, &Family::ALL);
        let policies =
            self.attachments.iter().flat_map(|(_, record)| [Some(&record.policy), record.previous_policy.as_ref()]);
        let union = self.policy().unwrap_or_default();
        let mut known = ruleset(&union);
        // Usually, a pod sandbox has one attachment, whose policy is the union.
        let others = policies.flatten().filter(|policy| **policy != union);
        others.for_each(|policy| known.add_owned(&ruleset(policy)));
        if let Some(before) = self.previous_union() {
            known.add_owned(&ruleset(&before));
        }
        known
    }

    /// Returns the union of the policies before a change that may not be committed; `None` without such a change. Some
    /// rules depend on several settings, which different attachments may have.
    fn previous_union(&self) -> Option<Policy> {
        if self.attachments.iter().all(|(_, record)| record.previous_policy.is_none()) {
            return None;
        }
        let policies: Vec<_> =
            self.attachments.iter().map(|(attachment, record)| (attachment, record.previous())).collect();
        Policy::united(&policies).ok()
    }

    /// Returns whether there are rules for IPv6.
    pub(crate) fn ip6(&self) -> bool {
        self.sandbox.ip6 || self.attachments.iter().any(|(_, record)| record.ip6)
    }

    /// Returns the routes, policy rules and addresses that were added.
    pub(crate) const fn fixtures(&self) -> &Fixtures {
        &self.sandbox.fixtures
    }

    /// Returns the tables and built-in chains that were created.
    pub(crate) const fn created_tables(&self) -> &CreatedTables {
        &self.sandbox.created_tables
    }
}

/// How many pod sandboxes have a redirection of detour in each rule format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FormatCounts {
    /// In the tables of iptables.
    pub iptables: u32,
    /// In native tables.
    pub nftables: u32,
}

impl FormatCounts {
    /// Counts the saved redirections of a node.
    ///
    /// # Errors
    /// The saved state can't be read.
    pub fn read(store: &Store) -> Result<Self, Error> {
        let mut counts = Self::default();
        for sandbox in store.sandboxes()? {
            let attachments = store.attachments_of(&sandbox)?.into_iter();
            let records =
                attachments.filter_map(|attachment| AttachmentRecord::read(store, &attachment).ok().flatten());
            match records.filter_map(|record| record.format_of_redirection()).next() {
                Some(RuleFormat::Iptables) => counts.iptables += 1,
                Some(RuleFormat::Nftables) => counts.nftables += 1,
                None => {}
            }
        }
        Ok(counts)
    }

    /// Returns the sum.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            iptables: self.iptables.saturating_add(other.iptables),
            nftables: self.nftables.saturating_add(other.nftables),
        }
    }
}

/// Returns the attachment of a call.
pub(super) fn attachment(request: &Request, network: &str) -> Attachment {
    Attachment {
        container_id: request.container_id.clone(),
        network: network.to_owned(),
        ifname: request.ifname.clone(),
    }
}
