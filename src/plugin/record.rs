//! The saved state of attachments: one record per attachment, and all records of one pod sandbox.

use super::inputs::SavedInputs;
use crate::cni::{Code, Error, Request};
use crate::firewall::rule::Family;
use crate::firewall::{CreatedTables, LiveRuleset, RuleFormat, Ruleset};
use crate::netns::{Fixtures, NetNs, NetnsId, Routing};
use crate::policy::{Contradiction, DnsCapture, Interception, InterceptionMode, Ipv6, Policy, Redirect};
use crate::state::{Attachment, Store, format};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::time::Duration;

/// The maximum number of attachments of one pod sandbox: each call reads the records of all of them.
pub(super) const MAX_ATTACHMENTS: usize = 32;

/// The saved state of one attachment: its policy, and what was added to the network namespace for it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachmentRecord {
    /// The desired policy.
    pub(super) policy: Policy,
    /// The policy before, until the rules of `policy` are committed.
    #[serde(rename = "before")]
    pub(super) previous_policy: Option<Policy>,
    /// The network namespace of the rules; `None` if the attachment never had any.
    #[serde(alias = "sandbox")]
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
    /// Tables and built-in chains that were created for it.
    #[serde(default, rename = "made")]
    pub(super) created_tables: CreatedTables,
    /// The policy as it was evaluated, if it was adapted to the network namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) evaluated: Option<Policy>,
    /// The inputs of its ADD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) inputs: Option<SavedInputs>,
    /// Routes, policy rules and addresses that were added for it. A record without them gets all that its policy
    /// needs ([`AttachmentRecord::read`]).
    pub(super) fixtures: Fixtures,
}

impl AttachmentRecord {
    /// Reads the record of an attachment; `None` without a record.
    ///
    /// # Errors
    /// The record can't be read, is damaged, or was written by a newer version.
    pub(super) fn read(store: &Store, attachment: &Attachment) -> Result<Option<Self>, Error> {
        match store.read(attachment) {
            Err(error) if error.code == Code::State => {
                Self::read_without_fixtures(store, attachment).map(Some).ok_or(error)
            }
            other => other,
        }
    }

    fn read_without_fixtures(store: &Store, attachment: &Attachment) -> Option<Self> {
        let mut fields: Map<String, Value> = store.read(attachment).ok()??;
        let nothing = serde_json::to_value(Fixtures::default()).ok()?;
        if fields.insert("fixtures".to_owned(), nothing).is_some() {
            return None;
        }
        let mut record = Self::deserialize(&Value::Object(fields)).ok()?;
        record.assume_fixtures();
        Some(record)
    }

    /// Records everything that the policies need besides rules, as if it had been added.
    fn assume_fixtures(&mut self) {
        for policy in [Some(&self.policy), self.previous_policy.as_ref()].into_iter().flatten() {
            self.fixtures.extend(&fixtures(policy, true));
        }
    }

    /// Recovers what is readable of a damaged or newer record, so that the attachment can be removed. If the
    /// redirection is missing or unreadable, every netfilter chain of a redirection is attributed to it; if `fixtures`
    /// is, everything that the rules need besides themselves.
    pub(crate) fn recover(fields: &Map<String, Value>) -> Option<Self> {
        let policy = fields.get("policy")?.as_object()?;
        let mut record: Self = format::parse_known_fields(fields);
        if Policy::deserialize(&Value::Object(policy.clone())).ok().as_ref() != Some(&record.policy) {
            record.policy = format::parse_known_fields(policy);
        }
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
        if fields.get("fixtures").is_none_or(|found| Fixtures::deserialize(found).is_err()) {
            record.assume_fixtures();
        }
        Some(record)
    }

    /// Returns the policy before a change that may not be committed; the policy itself without such a change.
    fn previous(&self) -> &Policy {
        self.previous_policy.as_ref().unwrap_or(&self.policy)
    }

    /// Returns the policy as it was evaluated.
    pub(super) fn evaluated(&self) -> &Policy {
        self.evaluated.as_ref().unwrap_or(&self.policy)
    }

    /// Returns the format of the redirection that may be in the kernel because of this attachment.
    fn format_of_redirection(&self) -> Option<RuleFormat> {
        let redirects = |policy: &Policy| policy.redirect().is_some();
        let may_redirect = redirects(&self.policy) || self.previous_policy.as_ref().is_some_and(redirects);
        (self.netns_id.is_some() && may_redirect).then_some(self.rule_format)
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
                attachments.filter_map(|attachment| store.read::<AttachmentRecord>(&attachment).ok().flatten());
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

/// Returns the time since the node's boot, in nanoseconds. Changes of the wall clock do not affect it.
pub(super) fn since_boot() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default();
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The part of a record that identifies its network namespace. A record of the primary plugin has the same keys.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct NetnsRecord {
    /// The network namespace of the rules.
    #[serde(alias = "sandbox")]
    pub(super) netns_id: Option<NetnsId>,
    /// The path of the network namespace.
    #[serde(rename = "netns")]
    pub(super) netns_path: Option<PathBuf>,
    /// When the attachment was added, in nanoseconds since the node's boot; zero if unknown.
    #[serde(default, rename = "added_at")]
    added_since_boot: u64,
}

impl NetnsRecord {
    /// Reads where the rules of an attachment are; `None` if its record is missing or damaged.
    ///
    /// # Errors
    /// The record can't be read now.
    pub(super) fn read(store: &Store, attachment: &Attachment) -> Result<Option<Self>, Error> {
        match store.read_part(attachment) {
            Err(error) if error.code == Code::State => Ok(None),
            other => other,
        }
    }

    /// Reads which of a pod sandbox's records is the newest one of `netns`.
    fn newest_of(store: &Store, container_id: &str, netns: &NetNs) -> Result<Option<Self>, Error> {
        // Other programs may have files in the directory.
        let attachments = store.attachments_of(container_id).unwrap_or_else(|error| {
            tracing::debug!("{error}");
            Vec::new()
        });
        let mut newest: Option<Self> = None;
        for attachment in attachments {
            let found = Self::read(store, &attachment)?.filter(|found| found.netns_id == Some(netns.id()));
            newest = newest.into_iter().chain(found).max_by_key(|record| record.added_since_boot);
        }
        Ok(newest)
    }

    /// Returns whether a call for the pod sandbox `container_id` comes so late that `netns` is the network namespace of
    /// another one by now. `own_id` is the network namespace in its own record.
    ///
    /// The kernel reuses the identity of a namespace that is gone, and a runtime may reuse its path. So two sandboxes can
    /// have records of one namespace. It belongs to the one that was added last, unless the path in that record does not
    /// lead to it: then that record is stale, because its DEL never came.
    ///
    /// # Errors
    /// The saved state can't be read now.
    pub(super) fn is_of_another(
        store: &Store,
        container_id: &str,
        own_id: Option<NetnsId>,
        netns: &NetNs,
    ) -> Result<bool, Error> {
        if own_id.is_some_and(|own| own != netns.id()) {
            return Ok(true);
        }
        let mut own_added = None;
        for other in store.sandboxes()?.iter().filter(|other| *other != container_id) {
            let Some(other) = Self::newest_of(store, other, netns)?.filter(|other| other.leads_to(netns)) else {
                continue;
            };
            let own_added = match own_added {
                Some(added) => added,
                None => {
                    let own = Self::newest_of(store, container_id, netns)?.unwrap_or_default();
                    *own_added.insert(own.added_since_boot)
                }
            };
            if other.added_since_boot >= own_added {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns whether the path in the record leads to `netns`. In the agent's container, such paths may lead nowhere.
    fn leads_to(&self, netns: &NetNs) -> bool {
        let found = self.netns_path.as_deref().and_then(|path| NetNs::open(path).ok().flatten());
        found.is_some_and(|found| found.id() == netns.id())
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

/// The records of all attachments of one pod sandbox, sorted by attachment.
#[derive(Debug, Clone, Default)]
pub(crate) struct SandboxRecords(pub(super) Vec<(Attachment, AttachmentRecord)>);

impl SandboxRecords {
    /// Reads the records of a pod sandbox. Skips those of another network namespace, which is gone.
    pub(super) fn read(store: &Store, container_id: &str, netns: &NetNs) -> Result<Self, Error> {
        Self::read_of(store, &store.attachments_of(container_id)?, netns)
    }

    /// Reads the records of these `attachments` of a pod sandbox as [`Self::read`] does.
    pub(super) fn read_of(store: &Store, attachments: &[Attachment], netns: &NetNs) -> Result<Self, Error> {
        Ok(Self::read_all(store, attachments)?.of_netns(netns.id()))
    }

    /// Reads the records of these `attachments`, also those of another network namespace.
    pub(super) fn read_all(store: &Store, attachments: &[Attachment]) -> Result<Self, Error> {
        let mut records = Self::default();
        for attachment in attachments {
            records.0.extend(AttachmentRecord::read(store, attachment)?.map(|record| (attachment.clone(), record)));
        }
        Ok(records)
    }

    /// Returns the records without those of another network namespace.
    pub(super) fn of_netns(mut self, id: NetnsId) -> Self {
        self.0.retain(|(_, record)| record.netns_id.is_none_or(|own| own == id));
        self
    }

    /// Returns the record of an attachment.
    pub(super) fn get(&self, attachment: &Attachment) -> Option<&AttachmentRecord> {
        self.0.iter().find(|(other, _)| other == attachment).map(|(_, record)| record)
    }

    /// Inserts or replaces the record of `attachment`. The records stay sorted, so that the union of the policies does
    /// not depend on the order of the ADDs.
    pub(crate) fn insert(&mut self, attachment: &Attachment, record: AttachmentRecord) {
        self.0.retain(|(other, _)| other != attachment);
        self.0.push((attachment.clone(), record));
        self.0.sort_by(|(a, _), (b, _)| a.cmp(b));
    }

    /// Returns the union of all policies.
    ///
    /// # Errors
    /// Two policies contradict each other.
    pub(crate) fn policy(&self) -> Result<Policy, Error> {
        let policies: Vec<_> = self.0.iter().map(|(attachment, record)| (attachment, &record.policy)).collect();
        Policy::united(&policies).map_err(Contradiction::into_error)
    }

    /// Returns the format of the redirection; `None` without one.
    pub(crate) fn rule_format(&self) -> Option<RuleFormat> {
        self.0.iter().find_map(|(_, record)| record.format_of_redirection())
    }

    /// Returns the format of the redirection of all attachments except `attachment`.
    pub(super) fn rule_format_of_others(&self, attachment: &Attachment) -> Option<RuleFormat> {
        let mut others = self.0.iter().filter(|(other, _)| other != attachment);
        others.find_map(|(_, record)| record.format_of_redirection())
    }

    /// Returns every netfilter chain and built-in rule that may be in the iptables tables because of these attachments,
    /// even if a call was killed.
    pub(crate) fn known_rules(&self) -> Ruleset {
        if self.rule_format() != Some(RuleFormat::Iptables) {
            return Ruleset::default();
        }
        let ruleset = |policy: &Policy| Ruleset::of_redirection(policy, &Family::ALL);
        let policies = self.0.iter().flat_map(|(_, record)| [Some(&record.policy), record.previous_policy.as_ref()]);
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
        if self.0.iter().all(|(_, record)| record.previous_policy.is_none()) {
            return None;
        }
        let policies: Vec<_> = self.0.iter().map(|(attachment, record)| (attachment, record.previous())).collect();
        Policy::united(&policies).ok()
    }

    /// Returns whether there are rules for IPv6.
    pub(crate) fn ip6(&self) -> bool {
        self.0.iter().any(|(_, record)| record.ip6)
    }

    /// Returns the fixtures of all attachments.
    pub(crate) fn fixtures(&self) -> Fixtures {
        let mut fixtures = Fixtures::default();
        self.0.iter().for_each(|(_, record)| fixtures.extend(&record.fixtures));
        fixtures
    }

    /// Returns the tables and built-in chains that were created for any attachment.
    pub(crate) fn created_tables(&self) -> CreatedTables {
        let mut created = CreatedTables::default();
        self.0.iter().for_each(|(_, record)| created.add(&record.created_tables));
        created
    }

    /// Records the tables and fixtures that the call for `own` is about to add, and drops tables that no longer exist.
    /// If the call removes `own`, another attachment takes over what only `own` has recorded.
    pub(super) fn record_additions(
        &mut self,
        own: &Attachment,
        is_removal: bool,
        live: &LiveRuleset,
        created: &CreatedTables,
        fixtures: &Fixtures,
    ) {
        self.0.iter_mut().for_each(|(_, record)| record.created_tables.drop_missing(live));
        let removed = self.get(own).filter(|_| is_removal).cloned().unwrap_or_default();
        let remains = |(other, record): &&mut (Attachment, AttachmentRecord)| other != own && record.netns_id.is_some();
        let owner =
            if is_removal { self.0.iter_mut().find(remains) } else { self.0.iter_mut().find(|(a, _)| a == own) };
        if let Some((_, owner)) = owner {
            owner.created_tables.add(created);
            owner.created_tables.add(&removed.created_tables);
            owner.fixtures.extend(fixtures);
            owner.fixtures.extend(&removed.fixtures);
            owner.ip6 |= removed.ip6;
        }
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
