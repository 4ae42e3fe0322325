//! The saved state of attachments: one record per attachment, and all records of one pod sandbox.

use super::inputs::SavedInputs;
use crate::cni::{Code, Error, Request, at_most};
use crate::firewall::rule::Family;
use crate::firewall::{CreatedTables, RuleFormat, Ruleset};
use crate::netns::{Fixtures, NetNs, NetnsId, Routing};
use crate::policy::{Contradiction, DnsCapture, Exclusion, Interception, InterceptionMode, Ipv6, Policy, Redirect};
use crate::state::{Attachment, Store, format};
use nix::time::{ClockId, clock_gettime};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The maximum number of attachments of one pod sandbox: each call reads the records of all of them.
pub(super) const MAX_ATTACHMENTS: usize = 32;

/// The maximum size of the saved policies of one pod sandbox, in bytes: the author of a pod must not fill the node's
/// memory, which the files use.
const MAX_POLICY_BYTES: usize = 1 << 20;

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

/// A long list of exclusions, which is saved once for all attachments of a pod sandbox that have the same.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ExclusionList {
    exclusions: BTreeSet<Exclusion>,
}

impl ExclusionList {
    /// The maximum length of a list in the record itself.
    const MAX_INLINE: usize = 64;
    /// The start of the names of their files. A digest of the contents follows.
    const FILE: &str = ".exclusions-";
    /// The keys of the policies in a record.
    const KEYS: [&str; 2] = ["policy", "before"];

    /// Saves the list, if it is not saved yet. Returns the name of its file.
    fn write(&self, store: &Store, container_id: &str) -> Result<String, Error> {
        let text = serde_json::to_vec(&self.exclusions).unwrap_or_default();
        let digest: String = digest(&SHA256, &text).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("{}{digest}", Self::FILE);
        if !store.has_shared(container_id, &name) {
            store.write_shared(container_id, &name, self)?;
        }
        Ok(name)
    }

    /// Removes the lists that no record of a pod sandbox names.
    ///
    /// # Errors
    /// The saved state can't be read or removed.
    pub(super) fn remove_unused(store: &Store, container_id: &str) -> Result<(), Error> {
        let mut unused = store.shared_with(container_id, Self::FILE)?;
        if unused.is_empty() {
            return Ok(());
        }
        for attachment in store.attachments_of(container_id)? {
            let fields: Map<String, Value> = store.read_part(&attachment)?.unwrap_or_default();
            let used = |name: &String| {
                Self::KEYS.iter().any(|key| fields.get(*key).is_some_and(|it| it["exclusions"] == **name))
            };
            unused.retain(|name| !used(name));
        }
        unused.iter().try_for_each(|name| store.remove_shared(container_id, name))
    }
}

/// The saved state that the attachments of a pod sandbox share.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SandboxRecord {
    /// The network namespace.
    netns_id: Option<NetnsId>,
    /// Its path.
    #[serde(rename = "netns")]
    netns_path: Option<PathBuf>,
    /// When the first attachment was added to it, in nanoseconds since the node's boot; zero if unknown.
    #[serde(rename = "added_at")]
    added_since_boot: u64,
    /// Whether there may be rules for IPv6.
    #[serde(default)]
    ip6: bool,
    /// Tables and built-in chains that were created.
    #[serde(default, rename = "made")]
    pub(super) created_tables: CreatedTables,
    /// Routes, policy rules and addresses that were added.
    #[serde(default)]
    pub(super) fixtures: Fixtures,
}

impl SandboxRecord {
    /// The name of its file.
    const FILE: &str = ".sandbox";

    /// Reads the record of a pod sandbox; `None` if it is missing, damaged, or of another network namespace.
    fn read(store: &Store, container_id: &str, netns: NetnsId) -> Option<Self> {
        let found: Option<Self> = store.read_shared(container_id, Self::FILE).unwrap_or_else(|error| {
            tracing::warn!("{error}");
            None
        });
        found.filter(|found| found.netns_id == Some(netns))
    }

    /// Writes the record of a pod sandbox.
    ///
    /// # Errors
    /// The file can't be written.
    pub(super) fn write(&self, store: &Store, container_id: &str) -> Result<(), Error> {
        store.write_shared(container_id, Self::FILE, self)
    }

    /// Records the network namespace of a pod sandbox without rules, unless it is recorded. Another ADD may record what
    /// it adds at the same time.
    ///
    /// # Errors
    /// The file can't be written.
    pub(super) fn claim(store: &Store, container_id: &str, netns: &(PathBuf, NetnsId)) -> Result<(), Error> {
        let (mut own, (path, id)) = (Self::default(), netns);
        own.set_netns(path, *id);
        if store.create_shared(container_id, Self::FILE, &own)? || Self::read(store, container_id, *id).is_some() {
            return Ok(());
        }
        own.write(store, container_id)
    }

    /// Sets the network namespace. Its path is updated only with it: the agent's path differs from the runtime's.
    pub(super) fn set_netns(&mut self, path: &Path, id: NetnsId) {
        if self.netns_id.replace(id) != Some(id) {
            self.netns_path = Some(path.to_owned());
            self.added_since_boot = since_boot();
        }
    }

    /// Adds what 0.2.0 saved in the record of an attachment.
    fn add_from(&mut self, record: &AttachmentRecord, is_recorded: bool) {
        self.ip6 |= record.ip6;
        self.created_tables.add(&record.created_tables);
        match &record.fixtures {
            Some(fixtures) => self.fixtures.extend(fixtures),
            // Everything that the rules may need.
            None if !is_recorded => {
                let policies = [Some(&record.policy), record.previous_policy.as_ref()];
                policies.into_iter().flatten().for_each(|policy| self.fixtures.extend(&fixtures(policy, true)));
            }
            None => {}
        }
        if !is_recorded && let (Some(id), Some(path)) = (record.netns_id, &record.netns_path) {
            self.set_netns(path, id);
            self.added_since_boot = record.added_since_boot;
        }
    }
}

impl AttachmentRecord {
    /// Reads the record of an attachment; `None` without a record.
    ///
    /// # Errors
    /// The record can't be read, is damaged, or was written by a newer version.
    pub(super) fn read(store: &Store, attachment: &Attachment) -> Result<Option<Self>, Error> {
        Self::read_with(store, attachment, &mut BTreeMap::new())
    }

    /// Reads a record as [`Self::read`] does. `known` are the lists of its pod sandbox that have been read before.
    fn read_with(
        store: &Store,
        attachment: &Attachment,
        known: &mut BTreeMap<String, ExclusionList>,
    ) -> Result<Option<Self>, Error> {
        match store.read(attachment) {
            Err(error) if error.code == Code::State => {
                Self::read_with_lists(store, attachment, known).map(Some).ok_or(error)
            }
            other => other,
        }
    }

    /// Reads a record whose exclusions are in files of their own.
    fn read_with_lists(
        store: &Store,
        attachment: &Attachment,
        known: &mut BTreeMap<String, ExclusionList>,
    ) -> Option<Self> {
        let mut fields: Map<String, Value> = store.read(attachment).ok()??;
        let mut lists = Vec::new();
        for key in ExclusionList::KEYS {
            let Some(exclusions) = fields.get_mut(key).and_then(|policy| policy.get_mut("exclusions")) else {
                continue;
            };
            if let Value::String(name) = exclusions {
                if !known.contains_key(name) {
                    known.insert(name.clone(), store.read_shared(&attachment.container_id, name).ok()??);
                }
                lists.push((key, name.clone()));
                *exclusions = Value::Array(Vec::new());
            }
        }
        let mut record = Self::deserialize(&Value::Object(fields)).ok()?;
        for (key, name) in lists {
            let (_, policy) = record.policies().into_iter().find(|(own, _)| *own == key)?;
            policy?.exclusions.clone_from(&known.get(&name)?.exclusions);
        }
        Some(record)
    }

    /// Writes the record of an attachment.
    ///
    /// # Errors
    /// The directory or a file can't be written.
    pub(super) fn write(&self, store: &Store, attachment: &Attachment) -> Result<(), Error> {
        match self.with_lists(store, attachment)? {
            Some(fields) => store.write(attachment, &fields),
            None => store.write(attachment, self),
        }
    }

    /// Replaces the record of an attachment. Returns false if it has none ([`Store::update`]).
    ///
    /// # Errors
    /// A file can't be written.
    pub(super) fn update(&self, store: &Store, attachment: &Attachment) -> Result<bool, Error> {
        match self.with_lists(store, attachment)? {
            Some(fields) => store.update(attachment, &fields),
            None => store.update(attachment, self),
        }
    }

    /// Saves long lists of exclusions in files of their own. Returns the fields of the record with the names of the files
    /// instead; `None` without long lists.
    fn with_lists(&self, store: &Store, attachment: &Attachment) -> Result<Option<Map<String, Value>>, Error> {
        let all = [Some(&self.policy), self.previous_policy.as_ref()];
        if all.into_iter().flatten().all(|policy| policy.exclusions.len() <= ExclusionList::MAX_INLINE) {
            return Ok(None);
        }
        let (mut record, mut names) = (self.clone(), Vec::new());
        for (key, policy) in record.policies() {
            let Some(policy) = policy.filter(|policy| policy.exclusions.len() > ExclusionList::MAX_INLINE) else {
                continue;
            };
            let list = ExclusionList { exclusions: std::mem::take(&mut policy.exclusions) };
            names.push((key, list.write(store, &attachment.container_id)?));
        }
        let Ok(Value::Object(mut fields)) = serde_json::to_value(&record) else { return Ok(None) };
        for (key, name) in names {
            fields[key]["exclusions"] = name.into();
        }
        Ok(Some(fields))
    }

    /// Returns the policies with their keys.
    fn policies(&mut self) -> [(&'static str, Option<&mut Policy>); 2] {
        let policies = [Some(&mut self.policy), self.previous_policy.as_mut()];
        let mut keys = ExclusionList::KEYS.into_iter();
        policies.map(|policy| (keys.next().unwrap_or_default(), policy))
    }

    /// Recovers what is readable of a damaged or newer record, so that a DEL can remove the attachment. If the
    /// redirection is missing or unreadable, every netfilter chain of a redirection is attributed to it.
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
        Some(record)
    }

    /// Returns the policy before a change that may not be committed; the policy itself without such a change.
    fn previous(&self) -> &Policy {
        self.previous_policy.as_ref().unwrap_or(&self.policy)
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

    /// Reads the path and the identity of an attachment's network namespace: from its record, or without rules from the
    /// record of the pod sandbox. Returns `None` if both are missing or damaged.
    ///
    /// # Errors
    /// A record can't be read now.
    pub(super) fn location(store: &Store, attachment: &Attachment) -> Result<Option<(PathBuf, NetnsId)>, Error> {
        let location = |found: Option<Self>| found.and_then(|found| found.netns_path.zip(found.netns_id));
        let shared = || match store.read_shared(&attachment.container_id, SandboxRecord::FILE) {
            Err(error) if error.code == Code::State => Ok(None),
            other => other,
        };
        match location(Self::read(store, attachment)?) {
            Some(found) => Ok(Some(found)),
            None => Ok(location(shared()?)),
        }
    }

    /// Reads which record says that `netns` is that of a pod sandbox: the one of the sandbox, or of 0.2.0 the newest of
    /// its attachments.
    fn of_sandbox(store: &Store, container_id: &str, netns: &NetNs) -> Result<Option<Self>, Error> {
        let is_of_netns = |found: &Self| found.netns_id == Some(netns.id());
        match store.read_shared::<Self>(container_id, SandboxRecord::FILE) {
            Ok(Some(found)) => return Ok(Some(found).filter(is_of_netns)),
            Err(error) if error.code != Code::State => return Err(error),
            _ => {}
        }
        // Other programs may have files in the directory.
        let attachments = store.attachments_of(container_id).unwrap_or_else(|error| {
            tracing::debug!("{error}");
            Vec::new()
        });
        let mut newest: Option<Self> = None;
        for attachment in attachments {
            let found = Self::read(store, &attachment)?.filter(is_of_netns);
            newest = newest.into_iter().chain(found).max_by_key(|record| record.added_since_boot);
        }
        Ok(newest)
    }

    /// Reads which pod sandboxes have a record of `netns`. The kernel reuses the identity of a namespace that is gone, and
    /// a runtime may reuse its path; so two sandboxes can have one.
    ///
    /// # Errors
    /// The saved state can't be read now.
    fn all_of(store: &Store, netns: &NetNs) -> Result<Vec<(String, Self)>, Error> {
        let mut all = Vec::new();
        for container_id in store.sandboxes()? {
            let found = Self::of_sandbox(store, &container_id, netns)?;
            all.extend(found.map(|found| (container_id, found)));
        }
        Ok(all)
    }

    /// Returns the pod sandbox of a network namespace; `None` if no record has it.
    ///
    /// # Errors
    /// As [`Self::all_of`].
    pub(super) fn owner(store: &Store, netns: &NetNs) -> Result<Option<String>, Error> {
        let all = Self::all_of(store, netns)?.into_iter();
        let newest = all.max_by_key(|(_, found)| (found.leads_to(netns), found.added_since_boot));
        Ok(newest.map(|(container_id, _)| container_id))
    }

    /// Returns whether a call for the pod sandbox `container_id` comes so late that `netns` is the network namespace of
    /// another one by now. `own_id` is the network namespace in its own record. A namespace belongs to the sandbox that
    /// was added last, unless the path in that record does not lead to it: then the DEL of that sandbox never came.
    ///
    /// # Errors
    /// As [`Self::all_of`].
    pub(super) fn is_of_another(
        store: &Store,
        container_id: &str,
        own_id: Option<NetnsId>,
        netns: &NetNs,
    ) -> Result<bool, Error> {
        if own_id.is_some_and(|own| own != netns.id()) {
            return Ok(true);
        }
        let all = Self::all_of(store, netns)?;
        let own = all.iter().find(|(id, _)| id == container_id).map_or(0, |(_, own)| own.added_since_boot);
        let mut others = all.iter().filter(|(id, _)| id != container_id);
        Ok(others.any(|(_, other)| other.added_since_boot >= own && other.leads_to(netns)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{IdRange, TrafficOwner};
    use crate::scratch::Directory;

    /// A record of an attachment can have megabytes of exclusions.
    #[test]
    fn who_owns_a_network_namespace_is_answered_without_the_records_of_attachments() {
        let directory = Directory::new("record-owner");
        let store = Store::new(directory.join("attachments"));
        let netns = NetNs::open(Path::new("/proc/self/ns/net")).expect("readable").expect("a namespace");
        let attachment =
            |id: &str| Attachment { container_id: id.to_owned(), network: "n".to_owned(), ifname: "net1".to_owned() };
        let mut record = AttachmentRecord { netns_id: Some(netns.id()), ..AttachmentRecord::default() };
        record.netns_path = Some(netns.path().to_owned());
        record.added_since_boot = 7;
        record.write(&store, &attachment("other")).expect("writable");
        let is_of_another = || NetnsRecord::is_of_another(&store, "own", None, &netns).expect("readable");
        assert!(is_of_another(), "a record of 0.2.0");
        let elsewhere = (netns.path().to_owned(), NetnsId { inode: 1, ..netns.id() });
        SandboxRecord::claim(&store, "other", &elsewhere).expect("writable");
        assert!(!is_of_another(), "the record of the sandbox takes precedence");
        SandboxRecord::claim(&store, "other", &(netns.path().to_owned(), netns.id())).expect("writable");
        assert!(is_of_another());
        SandboxRecord::claim(&store, "own", &(netns.path().to_owned(), netns.id())).expect("writable");
        assert!(!is_of_another(), "it was added later");
        let location = NetnsRecord::location(&store, &attachment("own")).expect("readable");
        assert_eq!(location, Some((netns.path().to_owned(), netns.id())), "of an attachment without rules");
        assert_eq!(NetnsRecord::owner(&store, &netns).expect("readable").as_deref(), Some("own"));
    }

    #[test]
    fn a_long_list_of_exclusions_is_read_back() {
        let directory = Directory::new("record-lists");
        let store = Store::new(directory.join("attachments"));
        let one = Attachment { container_id: "c".to_owned(), network: "n".to_owned(), ifname: "net1".to_owned() };
        let exclusion = |uid| Exclusion {
            owner: TrafficOwner::Uid(IdRange::one(uid)),
            destination: None,
            protocol: None,
            ports: Vec::new(),
        };
        let policy = |count| Policy { exclusions: (0..count).map(exclusion).collect(), ..Policy::default() };
        for (policy, previous_policy) in
            [(policy(65), None), (policy(3), Some(policy(100))), (policy(70), Some(policy(70)))]
        {
            let record = AttachmentRecord { policy, previous_policy, ..AttachmentRecord::default() };
            record.write(&store, &one).expect("writable");
            assert_eq!(AttachmentRecord::read(&store, &one).expect("readable").as_ref(), Some(&record));
            ExclusionList::remove_unused(&store, "c").expect("removable");
            assert_eq!(store.shared_with("c", ExclusionList::FILE).expect("readable").len(), 1);
        }
    }
}
