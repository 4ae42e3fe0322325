//! The saved state of one attachment.

use crate::cni::{Code, Error};
use crate::firewall::{CreatedTables, RuleFormat};
use crate::netns::{Fixtures, NetnsId, Routing};
use crate::plugin::inputs::SavedInputs;
use crate::policy::{DnsCapture, Exclusion, Interception, InterceptionMode, Ipv6, Policy, Redirect};
use crate::state::{Attachment, Store, format};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// The saved state of one attachment: its policy, and what was added to the network namespace for it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachmentRecord {
    /// The desired policy.
    pub(in crate::plugin) policy: Policy,
    /// The policy before, until the rules of `policy` are committed.
    #[serde(rename = "before")]
    pub(in crate::plugin) previous_policy: Option<Policy>,
    /// The network namespace of the rules; `None` if the attachment never had any.
    #[serde(alias = "sandbox")]
    pub(in crate::plugin) netns_id: Option<NetnsId>,
    /// The format of the redirection; the default without one.
    #[serde(default, rename = "dialect")]
    pub(crate) rule_format: RuleFormat,
    /// The path of the network namespace.
    #[serde(default, rename = "netns")]
    pub(in crate::plugin) netns_path: Option<PathBuf>,
    /// When the attachment was added to the network namespace, in nanoseconds since the node's boot; zero if unknown. The
    /// agent finds the newest pod sandbox by it.
    #[serde(default, rename = "added_at")]
    pub(in crate::plugin) added_since_boot: u64,
    /// Whether there are rules for IPv6.
    #[serde(default)]
    pub(in crate::plugin) ip6: bool,
    /// The inputs of its ADD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::plugin) inputs: Option<SavedInputs>,
    /// Tables and built-in chains that were created for it; from 0.2.0, now in the [`SandboxRecord`].
    #[serde(default, rename = "made", skip_serializing_if = "CreatedTables::is_empty")]
    pub(in crate::plugin) created_tables: CreatedTables,
    /// Routes, policy rules and addresses that were added for it; from 0.2.0, now in the [`SandboxRecord`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::plugin) fixtures: Option<Fixtures>,
}

/// A long list of exclusions, which is saved once for all attachments of a pod sandbox that have the same.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::plugin) struct ExclusionList {
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
    pub(in crate::plugin) fn remove_unused(store: &Store, container_id: &str) -> Result<(), Error> {
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

impl AttachmentRecord {
    /// Reads the record of an attachment; `None` without a record.
    ///
    /// # Errors
    /// The record can't be read, is damaged, or was written by a newer version.
    pub(in crate::plugin) fn read(store: &Store, attachment: &Attachment) -> Result<Option<Self>, Error> {
        Self::read_with(store, attachment, &mut BTreeMap::new())
    }

    /// Reads a record as [`Self::read`] does. `known` are the lists of its pod sandbox that have been read before.
    pub(super) fn read_with(
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
    pub(in crate::plugin) fn write(&self, store: &Store, attachment: &Attachment) -> Result<(), Error> {
        match self.with_lists(store, attachment)? {
            Some(fields) => store.write(attachment, &fields),
            None => store.write(attachment, self),
        }
    }

    /// Replaces the record of an attachment. Returns false if it has none ([`Store::update`]).
    ///
    /// # Errors
    /// A file can't be written.
    pub(in crate::plugin) fn update(&self, store: &Store, attachment: &Attachment) -> Result<bool, Error> {
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
    pub(super) fn previous(&self) -> &Policy {
        self.previous_policy.as_ref().unwrap_or(&self.policy)
    }

    /// Returns the format of the redirection that may be in the kernel because of this attachment.
    pub(super) fn format_of_redirection(&self) -> Option<RuleFormat> {
        let redirects = |policy: &Policy| policy.redirect().is_some();
        let may_redirect = redirects(&self.policy) || self.previous_policy.as_ref().is_some_and(redirects);
        (self.netns_id.is_some() && may_redirect).then_some(self.rule_format)
    }
}

/// Returns whether the rules for `policy` include IPv6, in a pod with or without IPv6.
pub(in crate::plugin) fn writes_ip6(policy: &Policy, ip6: bool) -> bool {
    match policy.redirect().map(|redirect| redirect.ipv6) {
        Some(Ipv6::On) => true,
        Some(Ipv6::Off) => false,
        Some(Ipv6::Auto) | None => ip6,
    }
}

/// Returns the routes, policy rules and addresses that the rules for `policy` need.
pub(in crate::plugin) fn fixtures(policy: &Policy, ip6: bool) -> Fixtures {
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
