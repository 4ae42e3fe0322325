//! The saved state of a pod sandbox: the record of each attachment, and the one that they share.

mod sandbox;

use super::inputs::{AddInputs, SavedInputs};
use crate::cni::{Code, Error, Request, at_most};
use crate::firewall::rule::Family;
use crate::firewall::{CreatedTables, MAX_RULES, RuleFormat, Ruleset, max_rules};
use crate::netns::{Fixtures, NetNs, NetnsId, Routing};
use crate::pod::PodRef;
use crate::policy::{
    ContainerExclusion, Contradiction, DnsCapture, Interception, InterceptionMode, Ipv6, Policy, Redirect,
};
use crate::state::{Attachment, Store, format};
pub(super) use sandbox::{SandboxRecord, since_boot, unless_damaged};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::PathBuf;

/// The maximum number of attachments of one pod sandbox: each call reads the records of all of them.
pub(super) const MAX_ATTACHMENTS: usize = 32;

/// The maximum size of the saved policies of one pod sandbox, in bytes: the author of a pod must not fill the node's
/// memory, which the files use.
const MAX_POLICY_BYTES: usize = 1 << 20;

/// The saved state of one attachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachmentRecord {
    /// The desired policy.
    pub(super) policy: Policy,
    /// The policy before, until the rules of `policy` are committed.
    #[serde(rename = "before")]
    pub(super) previous_policy: Option<Policy>,
    /// The network namespace of the rules; `None` if the attachment never had any.
    pub(super) netns_id: Option<NetnsId>,
    /// The format of the redirection; the default without one.
    #[serde(default, rename = "dialect")]
    pub(crate) rule_format: RuleFormat,
    /// The path of the network namespace.
    #[serde(default, rename = "netns")]
    pub(super) netns_path: Option<PathBuf>,
    /// When the attachment was added to the network namespace, in nanoseconds since the node's boot; zero if unknown. The
    /// agent finds the newest pod sandbox by it.
    #[serde(default, rename = "added_at")]
    pub(super) added_since_boot: u64,
    /// Whether there are rules for IPv6.
    #[serde(default)]
    pub(super) ip6: bool,
    /// The inputs of its ADD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) inputs: Option<SavedInputs>,
    /// Tables and built-in chains that were created for it; from 0.2.0, now in the [`SandboxRecord`].
    #[serde(default, rename = "made", skip_serializing_if = "CreatedTables::is_empty")]
    pub(super) created_tables: CreatedTables,
    /// Routes, policy rules and addresses that were added for it; from 0.2.0, now in the [`SandboxRecord`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) fixtures: Option<Fixtures>,
}

impl AttachmentRecord {
    /// Recovers what is readable of a damaged or newer record, so that a DEL can remove the attachment. If the
    /// redirection is missing or unreadable, every netfilter chain of a redirection is attributed to it.
    pub(crate) fn recover(fields: &Map<String, Value>) -> Option<Self> {
        let policy = fields.get("policy")?.as_object()?;
        let mut record = Self { policy: format::parse_known_fields(policy), ..format::parse_known_fields(fields) };
        let interception = policy.get("interception");
        if interception.is_none_or(|found| Interception::deserialize(found).is_err()) {
            let settings = interception.and_then(Value::as_object);
            let settings = settings.and_then(|found| found.values().find_map(Value::as_object));
            let redirect: Redirect = settings.map(format::parse_known_fields).unwrap_or_default();
            let everything = Redirect {
                inbound_interception_mode: InterceptionMode::Tproxy,
                dns: DnsCapture::All,
                drop_invalid: true,
                ..redirect.clone()
            };
            record.policy.interception = Interception::On(Box::new(redirect));
            let interception = Interception::On(Box::new(everything));
            record.previous_policy = Some(Policy { interception, ..record.policy.clone() });
        }
        Some(record)
    }

    /// Returns the policy before a change that may not be committed; without such a change, the policy.
    fn before(&self) -> &Policy {
        self.previous_policy.as_ref().unwrap_or(&self.policy)
    }

    /// Returns the policy whose redirection may be in the kernel. After a call that was killed, it is that of both
    /// policies; if they contradict each other, the one before.
    pub(super) fn known_policy(&self) -> Policy {
        let before = self.before();
        before.union(&self.policy).unwrap_or_else(|_| before.clone())
    }

    /// Adds what 0.2.0 saved in the record of each attachment. `is_recorded`: whether the pod sandbox has a record.
    fn add_shared_to(&self, sandbox: &mut SandboxRecord, is_recorded: bool) {
        sandbox.ip6 |= self.ip6;
        sandbox.created_tables.add(&self.created_tables);
        match &self.fixtures {
            Some(fixtures) => sandbox.fixtures.extend(fixtures),
            // Everything that the rules may need.
            None if !is_recorded => {
                let policies = [Some(&self.policy), self.previous_policy.as_ref()];
                policies.into_iter().flatten().for_each(|policy| sandbox.fixtures.extend(&fixtures(policy, true)));
            }
            None => {}
        }
        if !is_recorded && let (Some(id), Some(path)) = (self.netns_id, &self.netns_path) {
            sandbox.set_netns(path, id);
            sandbox.added_since_boot = self.added_since_boot;
        }
    }

    /// Returns the format of the redirection that may be in the kernel because of this attachment.
    fn format_of_redirection(&self) -> Option<RuleFormat> {
        let redirects = |policy: &Policy| policy.redirect().is_some();
        let may_redirect = redirects(&self.policy) || self.previous_policy.as_ref().is_some_and(redirects);
        (self.netns_id.is_some() && may_redirect).then_some(self.rule_format)
    }
}

/// The records of one pod sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SandboxRecords {
    /// Those of all attachments, sorted by attachment.
    pub(super) attachments: Vec<(Attachment, AttachmentRecord)>,
    /// What the attachments share.
    pub(super) sandbox: SandboxRecord,
}

impl SandboxRecords {
    /// Reads the records of a pod sandbox. Skips those of another network namespace, which is gone. Of a damaged record of
    /// `removed`, the readable part is used.
    pub(super) fn read(
        store: &Store,
        container_id: &str,
        netns: &NetNs,
        removed: Option<&Attachment>,
    ) -> Result<Self, Error> {
        let mut records = Self::read_all(store, container_id, removed)?.of_netns(netns.id());
        let found = SandboxRecord::in_netns(store, container_id, netns.id())?;
        let is_recorded = found.is_some();
        records.sandbox = found.unwrap_or_default();
        for (_, record) in &records.attachments {
            record.add_shared_to(&mut records.sandbox, is_recorded);
        }
        Ok(records)
    }

    /// Reads the records of a pod sandbox, also those of another network namespace, without what they share.
    pub(super) fn read_all(store: &Store, container_id: &str, removed: Option<&Attachment>) -> Result<Self, Error> {
        let mut records = Self::default();
        for attachment in store.attachments_of(container_id)? {
            let record = match removed == Some(&attachment) {
                true => read_to_remove(store, &attachment, AttachmentRecord::recover)?,
                false => store.read(&attachment)?,
            };
            records.attachments.extend(record.map(|record| (attachment, record)));
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

    /// Checks the number of rules and the size of the saved policies.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`] with `place`, the limit and the number.
    pub(super) fn check_limits(&self, place: impl Display) -> Result<(), Error> {
        check_rules(&Policy::union_of(self.attachments.iter().map(|(_, record)| &record.policy)), &place)?;
        let size = |AttachmentRecord { policy, inputs, .. }: &AttachmentRecord| {
            serde_json::to_vec(&(&policy.exclusions, inputs)).map_or(0, |text| text.len())
        };
        let size = self.attachments.iter().map(|(_, record)| size(record)).sum();
        at_most(MAX_POLICY_BYTES, "bytes of saved policies", place, size)
    }

    /// Returns the union of all policies.
    ///
    /// # Errors
    /// Two policies contradict each other.
    pub(crate) fn policy(&self) -> Result<Policy, Error> {
        self.union(|record| &record.policy)
    }

    fn union<'a>(&'a self, policy: impl Fn(&'a AttachmentRecord) -> &'a Policy) -> Result<Policy, Error> {
        let policies: Vec<_> =
            self.attachments.iter().map(|(attachment, record)| (attachment, policy(record))).collect();
        Policy::united(&policies).map_err(Contradiction::into_error)
    }

    /// Returns the format of the redirection of all attachments, except `other` if it is given; `None` without one.
    pub(crate) fn rule_format(&self, other: Option<&Attachment>) -> Option<RuleFormat> {
        let mut others = self.attachments.iter().filter(|(attachment, _)| other != Some(attachment));
        others.find_map(|(_, record)| record.format_of_redirection())
    }

    /// Returns every netfilter chain and built-in rule that may be in the iptables tables because of these attachments,
    /// even if a call was killed.
    pub(crate) fn known_rules(&self) -> Ruleset {
        if self.rule_format(None) != Some(RuleFormat::Iptables) {
            return Ruleset::default();
        }
        // A change may not be committed. Some rules depend on several settings, which different attachments may have.
        let unions = [self.policy().unwrap_or_default(), self.union(AttachmentRecord::before).unwrap_or_default()];
        let own = self.attachments.iter().flat_map(|(_, record)| [&record.policy, record.before()]);
        // Usually, a pod sandbox has one attachment, whose policy is the union, and no unfinished change.
        let mut policies: Vec<&Policy> = unions.iter().chain(own).collect();
        policies.dedup();
        let mut known = Ruleset::default();
        policies.iter().for_each(|policy| known.add_owned(&Ruleset::of_redirection(policy, &Family::ALL)));
        known
    }

    /// Returns whether there are rules for IPv6.
    pub(crate) fn ip6(&self) -> bool {
        self.sandbox.ip6 || self.attachments.iter().any(|(_, record)| record.ip6)
    }
}

/// The part of a record that the agent reads often. Other exclusions than those of containers, of which there can be many,
/// are not read.
#[derive(Deserialize)]
pub(super) struct RecordPart {
    pub(super) policy: PolicyPart,
    netns_id: Option<NetnsId>,
    inputs: Option<SavedInputs>,
}

#[derive(Deserialize)]
pub(super) struct PolicyPart {
    #[serde(default)]
    pub(super) containers: BTreeSet<ContainerExclusion>,
}

impl RecordPart {
    /// Reads the records of a pod sandbox, without those of an earlier network namespace, what they share, and the pod, if
    /// the inputs of an ADD are recorded.
    ///
    /// # Errors
    /// A record is damaged, or can't be read now.
    pub(super) fn read_all(store: &Store, id: &str) -> Result<(SandboxRecord, Vec<Self>, Option<PodRef>), Error> {
        let shared = SandboxRecord::find(store, id)?.unwrap_or_default();
        let attachments = store.attachments_of(id)?;
        let parts = attachments.iter().filter_map(|attachment| store.read_part(attachment).transpose());
        let mut parts: Vec<Self> = parts.collect::<Result<_, _>>()?;
        parts.retain(|part| part.netns_id.is_none() || part.netns_id == shared.netns_id);
        let pod = parts.iter().find_map(|part| AddInputs::read(part.inputs.as_ref()?)).map(|inputs| inputs.pod);
        Ok((shared, parts, pod))
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
            let records = SandboxRecords::read_all(store, &sandbox, None).unwrap_or_default();
            match records.rule_format(None) {
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

/// Refuses a policy with too many rules. Only an ADD calls it, so that existing rules can always be repaired and
/// removed.
///
/// # Errors
/// [`Code::InvalidConfig`](crate::cni::Code::InvalidConfig) with `place` and both numbers.
pub(super) fn check_rules(policy: &Policy, place: impl Display) -> Result<(), Error> {
    let place = format_args!("{place}: the redirection with all exclusions, for IPv4 and IPv6");
    at_most(MAX_RULES, "rules", place, max_rules(policy))
}

/// Reads a record to remove what it describes; of a damaged or newer record, what `recover` finds in the readable part.
/// Returns `None` for a missing record and if nothing of it is readable.
///
/// # Errors
/// The record can't be read now.
pub(super) fn read_to_remove<T: DeserializeOwned>(
    store: &Store,
    attachment: &Attachment,
    recover: impl FnOnce(&Map<String, Value>) -> Option<T>,
) -> Result<Option<T>, Error> {
    store.read(attachment).or_else(|error| {
        if error.code != Code::State {
            return Err(error);
        }
        tracing::warn!("DEL removes what the readable part of a damaged record describes: {error}");
        let fields = store.read_part(attachment).ok().flatten();
        Ok(fields.as_ref().and_then(recover))
    })
}

/// Returns the attachment of a call.
pub(super) fn attachment(request: &Request, network: &str) -> Attachment {
    Attachment {
        container_id: request.container_id.clone(),
        network: network.to_owned(),
        ifname: request.ifname.clone(),
    }
}

/// Returns whether the rules for `policy` include IPv6, in a pod with or without IPv6.
pub(super) fn writes_ip6(policy: &Policy, ip6: bool) -> bool {
    match policy.redirect().map(|redirect| redirect.ipv6) {
        Some(Ipv6::On) => true,
        Some(Ipv6::Off) => false,
        Some(Ipv6::Auto) | None => ip6,
    }
}

/// Returns the routes, policy rules and addresses that the rules for `policy` need.
pub(super) fn fixtures(policy: &Policy, ip6: bool) -> Fixtures {
    let Some(redirect) = policy.redirect() else { return Fixtures::default() };
    let ip6 = writes_ip6(policy, ip6);
    let (mark, table) = (redirect.inbound_tproxy_mark, redirect.inbound_tproxy_route_table);
    let tproxy = redirect.inbound_interception_mode == InterceptionMode::Tproxy;
    let routing = tproxy.then_some(Routing { mark, table, ip6 }).into_iter().collect();
    Fixtures { proxy_loopback: ip6, routing }
}
