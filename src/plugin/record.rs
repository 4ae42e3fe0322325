//! What is kept of one attachment.

use crate::cni::{Error, Request};
use crate::firewall::{Dialect, Made};
use crate::policy::Policy;
use crate::sandbox::Id;
use crate::state::Attachment;
use serde::{Deserialize, Serialize};

/// What an attachment asks for, and what it left in the namespace besides rules.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// What it asks for.
    pub(super) policy: Policy,
    /// What it asked for before, until the kernel is known to hold `policy`.
    pub(super) before: Option<Policy>,
    /// The namespace that the rules are in; `None` where the attachment never had any.
    pub(super) sandbox: Option<Id>,
    /// How the rules are written.
    #[serde(default)]
    pub(super) dialect: Dialect,
    /// The rules are there for IPv6 too.
    pub(super) ip6: bool,
    /// Tables and built-in chains that were made for it.
    pub(super) made: Made,
    /// The proxy's loopback address was added for it.
    pub(super) proxy_loopback: bool,
}

impl Record {
    fn dialect_of_rules(&self) -> Option<Dialect> {
        let may_have_rules = self.sandbox.is_some() && !(self.policy.is_empty() && self.before.is_none());
        may_have_rules.then_some(self.dialect)
    }
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
#[derive(Debug, Default)]
pub(super) struct Records(pub(super) Vec<(Attachment, Record)>);

impl Records {
    /// What all of them ask for together.
    ///
    /// # Errors
    /// Two contradict each other.
    pub(super) fn policy(&self) -> Result<Policy, Error> {
        self.union(|record| &record.policy)
    }

    /// What all of them asked for together before the change that is under way.
    ///
    /// # Errors
    /// Two contradict each other.
    pub(super) fn policy_before(&self) -> Result<Policy, Error> {
        self.union(|record| record.before.as_ref().unwrap_or(&record.policy))
    }

    fn union(&self, of: impl Fn(&Record) -> &Policy) -> Result<Policy, Error> {
        let mut all = Policy::default();
        for (index, (attachment, record)) in self.0.iter().enumerate() {
            all = all.union(of(record)).map_err(|conflict| {
                let contradicts = |(_, other): &&(Attachment, Record)| of(other).union(of(record)).is_err();
                let other = self.0[..index].iter().find(contradicts).map(|(other, _)| other.to_string());
                let msg = format!(
                    "{attachment} and {} contradict each other: {conflict}; a pod has one redirection, so give both the same value",
                    other.unwrap_or_else(|| "the others".to_owned())
                );
                Error::new(crate::cni::Code::InvalidConfig, msg)
            })?;
        }
        Ok(all)
    }

    /// How the rules are written; `None` where there are none.
    pub(super) fn dialect(&self) -> Option<Dialect> {
        self.0.iter().find_map(|(_, record)| record.dialect_of_rules())
    }

    /// How the rules that others than `attachment` asked for are written.
    pub(super) fn dialect_of_others(&self, attachment: &Attachment) -> Option<Dialect> {
        let mut others = self.0.iter().filter(|(other, _)| other != attachment);
        others.find_map(|(_, record)| record.dialect_of_rules())
    }

    /// Whether the rules are there for IPv6 too.
    pub(super) fn ip6(&self) -> bool {
        self.0.iter().any(|(_, record)| record.ip6)
    }

    /// Whether the proxy's loopback address is there because of one of them.
    pub(super) fn proxy_loopback(&self) -> bool {
        self.0.iter().any(|(_, record)| record.proxy_loopback)
    }

    /// Everything that was made for any of them.
    pub(super) fn made(&self) -> Made {
        let mut made = Made::default();
        self.0.iter().for_each(|(_, record)| made.add(&record.made));
        made
    }

    /// One of them.
    pub(super) fn get(&self, attachment: &Attachment) -> Option<&Record> {
        self.0.iter().find(|(other, _)| other == attachment).map(|(_, record)| record)
    }

    /// In place of what was kept of `attachment`; in the order of their names, so that the union
    /// does not depend on which came first.
    pub(super) fn put(&mut self, attachment: &Attachment, record: Record) {
        self.0.retain(|(other, _)| other != attachment);
        self.0.push((attachment.clone(), record));
        self.0.sort_by(|(a, _), (b, _)| a.cmp(b));
    }
}
