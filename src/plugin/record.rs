//! What is kept of one attachment.

use super::desired_policy::{fixtures, ruleset};
use crate::cni::{Code, Error, Request};
use crate::firewall::{CreatedTables, LiveRuleset, RuleFormat, Ruleset};
use crate::netns::{Fixtures, NetnsId};
use crate::policy::{DnsCapture, Interception, InterceptionMode, Policy, Redirect};
use crate::state::{Attachment, format};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// What an attachment asks for, and what it left in the namespace besides rules.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AttachmentRecord {
    /// What it asks for.
    pub(super) policy: Policy,
    /// What it asked for before, until the kernel is known to hold `policy`.
    pub(super) before: Option<Policy>,
    /// The namespace that the rules are in; `None` where the attachment never had any.
    pub(super) sandbox: Option<NetnsId>,
    /// How the rules are written.
    #[serde(default)]
    pub(super) dialect: RuleFormat,
    /// Where that namespace was.
    #[serde(default)]
    pub(super) netns: Option<PathBuf>,
    /// The rules are there for IPv6 too.
    #[serde(default)]
    pub(super) ip6: bool,
    /// Tables and built-in chains that were made for it.
    #[serde(default)]
    pub(super) made: CreatedTables,
    /// What was added to the namespace for it besides rules. Every version writes it: a default would hide damage.
    pub(super) fixtures: Fixtures,
}

impl AttachmentRecord {
    /// What is understood of a damaged or newer record, to remove what its attachment added. If the
    /// redirection is missing or not understood, every chain of a redirection counts as its own; so does, without
    /// `fixtures`, all that the rules need besides themselves.
    pub(super) fn understood(fields: &Map<String, Value>) -> Option<Self> {
        let policy = fields.get("policy")?.as_object()?;
        let mut record: Self = format::understood(fields);
        if Policy::deserialize(&Value::Object(policy.clone())).ok().as_ref() != Some(&record.policy) {
            record.policy = format::understood(policy);
        }
        let interception = policy.get("interception");
        if interception.is_none_or(|found| Interception::deserialize(found).is_err()) {
            let settings = interception.and_then(Value::as_object);
            let settings = settings.and_then(|found| found.values().find_map(Value::as_object));
            let redirect: Redirect = settings.map(format::understood).unwrap_or_default();
            let everything = Redirect {
                inbound_interception_mode: InterceptionMode::Tproxy,
                dns: DnsCapture::All,
                drop_invalid: true,
                ..redirect.clone()
            };
            record.policy.interception = Interception::On(Box::new(redirect));
            let interception = Interception::On(Box::new(everything));
            record.before = Some(Policy { interception, ..record.policy.clone() });
        }
        if fields.get("fixtures").is_none_or(|found| Fixtures::deserialize(found).is_err()) {
            for policy in [Some(&record.policy), record.before.as_ref()].into_iter().flatten() {
                record.fixtures.extend(&fixtures(policy, true));
            }
        }
        Some(record)
    }

    fn dialect_of_rules(&self) -> Option<RuleFormat> {
        let may_have_rules = self.sandbox.is_some() && !(self.policy.is_empty() && self.before.is_none());
        may_have_rules.then_some(self.dialect)
    }
}

/// The part of a [`Record`] that says where its rules are.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct NetnsRecord {
    /// As in [`Record`].
    pub(super) sandbox: Option<NetnsId>,
    /// As in [`Record`].
    pub(super) netns: Option<PathBuf>,
}

/// The attachment that a call is for.
pub(super) fn attachment(request: &Request, network: &str) -> Attachment {
    Attachment {
        container_id: request.container_id.clone(),
        network: network.to_owned(),
        ifname: request.ifname.clone(),
    }
}

/// All that attachments on one container ask for.
#[derive(Debug, Clone, Default)]
pub(super) struct ContainerRecords(pub(super) Vec<(Attachment, AttachmentRecord)>);

impl ContainerRecords {
    /// What all of them ask for together.
    ///
    /// # Errors
    /// Two contradict each other.
    pub(super) fn policy(&self) -> Result<Policy, Error> {
        let mut all = Policy::default();
        for (index, (attachment, AttachmentRecord { policy, .. })) in self.0.iter().enumerate() {
            all = all.union(policy).map_err(|conflict| {
                let contradicts = |(_, other): &&(Attachment, AttachmentRecord)| other.policy.union(policy).is_err();
                let other = self.0[..index].iter().find(contradicts).map(|(other, _)| other.to_string());
                let msg = format!(
                    "{attachment} and {} contradict each other: {conflict}; a pod has one redirection, so give both the same value",
                    other.unwrap_or_else(|| "the others".to_owned())
                );
                Error::new(Code::InvalidConfig, msg)
            })?;
        }
        Ok(all)
    }

    /// How the rules are written; `None` where there are none.
    pub(super) fn dialect(&self) -> Option<RuleFormat> {
        self.0.iter().find_map(|(_, record)| record.dialect_of_rules())
    }

    /// How the rules that others than `attachment` asked for are written.
    pub(super) fn dialect_of_others(&self, attachment: &Attachment) -> Option<RuleFormat> {
        let mut others = self.0.iter().filter(|(other, _)| other != attachment);
        others.find_map(|(_, record)| record.dialect_of_rules())
    }

    /// Every chain and built-in rule that may be in iptables' tables because of them, whichever call
    /// was killed when.
    pub(super) fn known_rules(&self) -> Ruleset {
        if self.dialect() == Some(RuleFormat::Nftables) {
            return Ruleset::default();
        }
        let together = self.policy().unwrap_or_default();
        let each = self.0.iter().flat_map(|(_, record)| [Some(&record.policy), record.before.as_ref()]);
        let mut known = ruleset(&together, true);
        each.flatten().for_each(|policy| known.know_also(&ruleset(policy, true)));
        known
    }

    /// Notes what is about to be made in the namespace, and forgets what is there no more. What an
    /// attachment that leaves was the one to know goes to one that stays.
    pub(super) fn remember(
        &mut self,
        own: &Attachment,
        leaving: bool,
        live: &LiveRuleset,
        made: &CreatedTables,
        missing: &Fixtures,
    ) {
        self.0.iter_mut().for_each(|(_, record)| record.made.forget_absent(live));
        let left = self.get(own).filter(|_| leaving).cloned().unwrap_or_default();
        let stays = |(other, record): &&mut (Attachment, AttachmentRecord)| other != own && record.sandbox.is_some();
        let heir = if leaving { self.0.iter_mut().find(stays) } else { self.0.iter_mut().find(|(a, _)| a == own) };
        if let Some((_, heir)) = heir {
            heir.made.add(made);
            heir.made.add(&left.made);
            heir.fixtures.extend(missing);
            heir.fixtures.extend(&left.fixtures);
            heir.ip6 |= left.ip6;
        }
    }

    /// Whether the rules are there for IPv6 too.
    pub(super) fn ip6(&self) -> bool {
        self.0.iter().any(|(_, record)| record.ip6)
    }

    /// Everything that was added for any of them besides rules.
    pub(super) fn fixtures(&self) -> Fixtures {
        let mut fixtures = Fixtures::default();
        self.0.iter().for_each(|(_, record)| fixtures.extend(&record.fixtures));
        fixtures
    }

    /// Everything that was made for any of them.
    pub(super) fn made(&self) -> CreatedTables {
        let mut made = CreatedTables::default();
        self.0.iter().for_each(|(_, record)| made.add(&record.made));
        made
    }

    /// One of them.
    pub(super) fn get(&self, attachment: &Attachment) -> Option<&AttachmentRecord> {
        self.0.iter().find(|(other, _)| other == attachment).map(|(_, record)| record)
    }

    /// In place of what was kept of `attachment`; in the order of their names, so that the union
    /// does not depend on which came first.
    pub(super) fn put(&mut self, attachment: &Attachment, record: AttachmentRecord) {
        self.0.retain(|(other, _)| other != attachment);
        self.0.push((attachment.clone(), record));
        self.0.sort_by(|(a, _), (b, _)| a.cmp(b));
    }
}
