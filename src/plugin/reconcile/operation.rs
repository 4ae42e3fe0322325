//! What a call changes in the desired state of a pod sandbox's attachments, and how policies are adapted to the network
//! namespace.

use crate::cni::{Code, Error, LIST_ITEMS, at_most};
use crate::netns;
use crate::plugin::inputs::SavedInputs;
use crate::plugin::netns_state::{ForeignRedirection, FormatPreference};
use crate::plugin::record::SandboxRecords;
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
            Self::Remove if saved.0.is_empty() => Vec::new(),
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
    /// interface with a default route, in the kernel or according to the pod's annotations, is no secondary one: the pod's
    /// traffic leaves over it. Only a setting that names it excludes it.
    fn exclude_secondary_networks(&mut self) -> Result<(), Error> {
        let Interception::On(redirect) = &mut self.policy.interception else { return Ok(()) };
        if redirect.capture_secondary_networks {
            return Ok(());
        }
        let (secondary, mut default) = (netns::secondary_interfaces()?, netns::default_route_interfaces()?);
        default.extend(redirect.default_interfaces.iter().cloned());
        at_most(LIST_ITEMS, "interfaces", "the pod's network namespace", secondary.len())?;
        let is_named = |name: &String| !redirect.secondary_interfaces.contains(name);
        let named: HashSet<String> =
            redirect.exclude_interfaces.iter().filter(|name| is_named(name)).cloned().collect();
        let known: HashSet<String> = redirect.exclude_interfaces.iter().cloned().collect();
        redirect.exclude_interfaces.extend(secondary.into_iter().filter(|name| !known.contains(name)));
        redirect.exclude_interfaces.retain(|name| !default.contains(name) || named.contains(name));
        Ok(())
    }

    /// Returns the policy, adapted to the redirection of another tool, to which a running pod is adapted already: its
    /// redirection neither begins nor ends.
    pub(super) fn adapted(&self, kind: Kind, foreign: Option<ForeignRedirection>) -> Policy {
        let policy = self.policy.clone();
        match foreign.filter(|_| kind == Kind::Add) {
            Some(foreign) => foreign.adapt(policy),
            None => policy,
        }
    }
}
