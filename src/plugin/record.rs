//! What is kept of one attachment.

use crate::cni::{Error, Request};
use crate::firewall::Made;
use crate::policy::Policy;
use crate::sandbox::{Fixtures, Id};
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
    /// The rules are there for IPv6 too.
    pub(super) ip6: bool,
    /// Tables and built-in chains that were made for it.
    pub(super) made: Made,
    /// What was added to the namespace for it besides rules.
    pub(super) fixtures: Fixtures,
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
    pub(super) fn made(&self) -> Made {
        let mut made = Made::default();
        self.0.iter().for_each(|(_, record)| made.add(&record.made));
        made
    }

    /// One of them.
    pub(super) fn get(&self, attachment: &Attachment) -> Option<&Record> {
        self.0.iter().find(|(other, _)| other == attachment).map(|(_, record)| record)
    }

    /// One of them, to change.
    pub(super) fn get_mut(&mut self, attachment: &Attachment) -> Option<&mut Record> {
        self.0.iter_mut().find(|(other, _)| other == attachment).map(|(_, record)| record)
    }

    /// In place of what was kept of `attachment`; in the order of their names, so that the union
    /// does not depend on which came first.
    pub(super) fn put(&mut self, attachment: &Attachment, record: Record) {
        self.0.retain(|(other, _)| other != attachment);
        self.0.push((attachment.clone(), record));
        self.0.sort_by(|(a, _), (b, _)| a.cmp(b));
    }
}
