//! What a call changes in the desired state of a pod sandbox's attachments, and how policies are adapted to the network
//! namespace.

use crate::cni::{Code, Error, LIST_ITEMS, at_most};
use crate::firewall::ForeignRedirection;
use crate::netns;
use crate::plugin::inputs::SavedInputs;
use crate::plugin::netns_state::{FormatPreference, beside};
use crate::plugin::record::{AttachmentRecord, SandboxRecords};
use crate::policy::{Interception, Policy};
use crate::state::Attachment;
use std::collections::HashSet;

/// What a call changes in the desired state of the pod sandbox.
#[derive(Debug, Clone)]
pub(in crate::plugin) enum Operation {
    /// ADD: replaces the policy of one attachment, with a preference for the rule format and the inputs to save.
    Add(Policy, FormatPreference, Option<SavedInputs>),
    /// The agent's repeated ADD for a running pod: the policies of recorded attachments, all or none.
    Repeat(Vec<(Attachment, Policy)>),
    /// DEL: removes the policy of one attachment.
    Remove,
}

/// The changes of a call.
#[derive(Debug)]
pub(super) struct Changes {
    pub(super) kind: Kind,
    pub(super) list: Vec<Change>,
    pub(super) format: FormatPreference,
}

/// The kind of an [`Operation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Add,
    Repeat,
    Remove,
}

/// The new policy of one attachment.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) attachment: Attachment,
    /// The policy, adapted to the interfaces in the network namespace.
    policy: Policy,
    /// What an ADD saves: its inputs, or none if its policy can't change while the pod runs.
    pub(super) inputs: Option<Option<SavedInputs>>,
}

impl Operation {
    pub(super) const fn kind(&self) -> Kind {
        match self {
            Self::Add(..) => Kind::Add,
            Self::Repeat(_) => Kind::Repeat,
            Self::Remove => Kind::Remove,
        }
    }

    /// Returns the changes of the operation on `attachment`; `None` if there is nothing to do. Call it in the network
    /// namespace.
    ///
    /// # Errors
    /// An attachment has no saved state, or the interfaces can't be listed.
    pub(super) fn changes(self, attachment: &Attachment, saved: &SandboxRecords) -> Result<Option<Changes>, Error> {
        let kind = self.kind();
        let mut format = FormatPreference::default();
        let mut list = match self {
            Self::Add(policy, preference, inputs) => {
                format = preference;
                vec![Change { inputs: Some(inputs), ..Change::new(attachment.clone(), policy) }]
            }
            Self::Repeat(policies) => {
                let change = |(attachment, policy)| match saved.get(&attachment) {
                    Some(_) => Ok(Change::new(attachment, policy)),
                    None => Err(gone(&attachment)),
                };
                policies.into_iter().map(change).collect::<Result<_, _>>()?
            }
            Self::Remove if saved.get(attachment).is_some() => {
                vec![Change::new(attachment.clone(), Policy::default())]
            }
            Self::Remove if saved.attachments.is_empty() => Vec::new(),
            Self::Remove => return Ok(None),
        };
        list.iter_mut().try_for_each(Change::exclude_secondary_networks)?;
        Ok(Some(Changes { kind, list, format }))
    }
}

/// Returns the error for an attachment without saved state.
pub(super) fn gone(attachment: &Attachment) -> Error {
    Error::new(Code::NoAdd, format!("no saved state of the {attachment}: the pod was deleted"))
}

impl Changes {
    pub(super) fn redirects(&self) -> bool {
        self.kind != Kind::Remove && self.list.iter().any(|change| change.policy.redirect().is_some())
    }
}

impl Change {
    const fn new(attachment: Attachment, policy: Policy) -> Self {
        Self { attachment, policy, inputs: None }
    }

    /// Excludes the interfaces of secondary networks that exist already, if the policy does not capture such networks. An
    /// interface with a route to public addresses, or the default one according to the pod's annotations, is no secondary
    /// one: the pod's traffic leaves over it. Only a setting that names it excludes it.
    fn exclude_secondary_networks(&mut self) -> Result<(), Error> {
        let Interception::On(redirect) = &mut self.policy.interception else { return Ok(()) };
        if redirect.capture_secondary_networks {
            return Ok(());
        }
        let (secondary, mut default) = (netns::secondary_interfaces()?, netns::public_route_interfaces()?);
        default.extend(redirect.default_interfaces.iter().cloned());
        at_most(LIST_ITEMS, "interfaces", "the pod's network namespace", secondary.len())?;
        let known: HashSet<String> = redirect.exclude_interfaces.iter().cloned().collect();
        for name in secondary.into_iter().filter(|name| !known.contains(name)) {
            redirect.secondary_interfaces.push(name.clone());
            redirect.exclude_interfaces.push(name);
        }
        let found: HashSet<&String> = redirect.secondary_interfaces.iter().collect();
        redirect.exclude_interfaces.retain(|name| !default.contains(name) || !found.contains(name));
        Ok(())
    }

    /// Returns the policy, adapted to the redirection of another tool. What the saved record `own` redirects stays
    /// redirected, whatever another tool or a process in the pod adds later, and its exclusions follow.
    pub(super) fn adapted(
        &self,
        kind: Kind,
        own: Option<&AttachmentRecord>,
        foreign: Option<ForeignRedirection>,
    ) -> Policy {
        let policy = self.policy.clone();
        let is_recorded = own.is_some_and(|own| own.policy.redirect().is_some()) && policy.redirect().is_some();
        let is_adapted = kind == Kind::Repeat && own.is_some_and(|own| !own.policy.is_empty());
        match foreign.filter(|_| kind != Kind::Remove && !is_recorded && !is_adapted) {
            Some(foreign) => beside(foreign, policy),
            None => policy,
        }
    }
}
