//! What a call changes in the desired state of a pod sandbox's attachments, and how policies are adapted to the network
//! namespace.

use crate::cni::{Code, Error, LIST_ITEMS, at_most};
use crate::firewall::ForeignRedirection;
use crate::netns;
use crate::plugin::inputs::{AddInputs, SavedInputs};
use crate::plugin::netns_state::{FormatPreference, beside};
use crate::plugin::record::{AttachmentRecord, SandboxRecords};
use crate::policy::{Interception, Policy, Redirect};
use crate::state::Attachment;
use std::collections::HashSet;

/// What a call changes in the desired state of the pod sandbox.
#[derive(Debug, Clone)]
pub(in crate::plugin) enum Operation {
    /// ADD: replaces the policy of one attachment, with a preference for the rule format and the inputs to save.
    Apply(Policy, FormatPreference, Option<SavedInputs>),
    /// Live policy: replaces the evaluated policies of attachments with saved state, all or none.
    Follow(Vec<(Attachment, Policy)>),
    /// Repair: restores the saved policy of one attachment; does nothing without one.
    Reapply,
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
    Follow,
    Reapply,
    Remove,
}

/// The new policy of one attachment.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) attachment: Attachment,
    /// The policy as evaluated.
    pub(super) evaluated: Policy,
    /// The policy, adapted to the interfaces in the network namespace.
    policy: Policy,
    pub(super) inputs: InputsChange,
}

/// What happens to the saved inputs of an attachment.
#[derive(Debug)]
pub(super) enum InputsChange {
    /// The saved ones remain.
    Keep,
    /// An ADD replaces them, or removes them if its policy can't change while the pod runs.
    Replace(Option<SavedInputs>),
}

impl Operation {
    pub(super) const fn kind(&self) -> Kind {
        match self {
            Self::Apply(..) => Kind::Add,
            Self::Follow(_) => Kind::Follow,
            Self::Reapply => Kind::Reapply,
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
        let own = saved.get(attachment);
        let mut format = FormatPreference::default();
        let mut list = match self {
            Self::Apply(policy, preference, inputs) => {
                format = preference;
                vec![Change { inputs: InputsChange::Replace(inputs), ..Change::new(attachment, policy) }]
            }
            Self::Follow(policies) => {
                let list = followed(policies, saved)?;
                let settings = list.iter().filter_map(|change| saved.get(&change.attachment)?.inputs.as_ref());
                let mut settings = settings.filter_map(|inputs| AddInputs::read(inputs)?.rule_format);
                // Rules that exist already have a format.
                if saved.rule_format().is_none() {
                    format.requested = settings.next();
                }
                list
            }
            Self::Reapply => {
                let Some(own) = own else { return Ok(None) };
                vec![Change { evaluated: own.evaluated().clone(), ..Change::new(attachment, own.policy.clone()) }]
            }
            Self::Remove if own.is_some() => vec![Change::new(attachment, Policy::default())],
            Self::Remove if saved.attachments.is_empty() => Vec::new(),
            Self::Remove => return Ok(None),
        };
        if kind == Kind::Follow && list.is_empty() {
            return Ok(None);
        }
        list.iter_mut().try_for_each(Change::exclude_secondary_networks)?;
        Ok(Some(Changes { kind, list, format }))
    }
}

/// Returns the changes that differ from the saved state.
fn followed(policies: Vec<(Attachment, Policy)>, saved: &SandboxRecords) -> Result<Vec<Change>, Error> {
    let mut list = Vec::new();
    for (attachment, policy) in policies {
        let own = saved.get(&attachment).ok_or_else(|| gone(&attachment))?;
        if *own.evaluated() != policy || own.previous_policy.is_some() {
            let mut change = Change::new(&attachment, policy);
            change.keep_interfaces(own);
            list.push(change);
        }
    }
    Ok(list)
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
    fn new(attachment: &Attachment, policy: Policy) -> Self {
        Self { attachment: attachment.clone(), evaluated: policy.clone(), policy, inputs: InputsChange::Keep }
    }

    /// Excludes the interfaces of secondary networks that exist already, if the policy does not capture such networks. An
    /// interface with a default route, in the kernel or according to the pod's annotations, is no secondary one: the pod's
    /// traffic leaves over it. Only a setting that names it excludes it.
    fn exclude_secondary_networks(&mut self) -> Result<(), Error> {
        let Some(redirect) = not_capturing_secondary(&mut self.policy) else { return Ok(()) };
        let (secondary, mut default) = (netns::secondary_interfaces()?, netns::default_route_interfaces()?);
        default.extend(redirect.default_interfaces.iter().cloned());
        at_most(LIST_ITEMS, "interfaces", "the pod's network namespace", secondary.len())?;
        exclude_interfaces(redirect, secondary);
        let found: HashSet<&String> = redirect.secondary_interfaces.iter().collect();
        redirect.exclude_interfaces.retain(|name| !default.contains(name) || !found.contains(name));
        Ok(())
    }

    /// Excludes the interfaces that an earlier call found. They may be temporarily down or missing.
    fn keep_interfaces(&mut self, own: &AttachmentRecord) {
        let (Some(applied), Some(evaluated)) = (own.policy.redirect(), own.evaluated().redirect()) else { return };
        let Some(redirect) = not_capturing_secondary(&mut self.policy) else { return };
        if !evaluated.capture_secondary_networks {
            let known: HashSet<&String> = evaluated.exclude_interfaces.iter().collect();
            let found = applied.exclude_interfaces.iter().filter(|name| !known.contains(name));
            exclude_interfaces(redirect, found.cloned());
        }
    }

    /// Returns the policy, adapted to the redirection of another tool. What the saved record `own` redirects stays
    /// redirected, whatever another tool or a process in the pod adds later.
    pub(super) fn adapted(
        &self,
        kind: Kind,
        own: Option<&AttachmentRecord>,
        foreign: Option<ForeignRedirection>,
    ) -> Policy {
        let mut policy = self.policy.clone();
        let is_recorded = own.is_some_and(|own| own.policy.redirect().is_some());
        if kind == Kind::Remove || (is_recorded && policy.redirect().is_some()) {
            return policy;
        }
        if let (Kind::Follow, Some(own)) = (kind, own) {
            policy = as_adapted_before(policy, own);
        }
        match foreign {
            Some(foreign) => beside(foreign, policy),
            None => policy,
        }
    }
}

/// Returns the policy with the adaptations of the ADD to another tool's redirection, even if its rules are not found now:
/// the tool may restore them at any time, and detour does not begin to redirect a running pod.
fn as_adapted_before(mut policy: Policy, own: &AttachmentRecord) -> Policy {
    let evaluated = own.evaluated();
    if evaluated.redirect().is_some() && own.policy.redirect().is_none() && policy.redirect().is_some() {
        policy.interception = Interception::Unset;
    }
    if evaluated.dns_captured_elsewhere != own.policy.dns_captured_elsewhere {
        policy.dns_captured_elsewhere = own.policy.dns_captured_elsewhere;
    }
    policy
}

fn not_capturing_secondary(policy: &mut Policy) -> Option<&mut Redirect> {
    match &mut policy.interception {
        Interception::On(redirect) if !redirect.capture_secondary_networks => Some(redirect),
        _ => None,
    }
}

/// Excludes interfaces that no setting names.
fn exclude_interfaces(redirect: &mut Redirect, names: impl IntoIterator<Item = String>) {
    let mut excluded: HashSet<String> = redirect.exclude_interfaces.iter().cloned().collect();
    for name in names.into_iter().filter(|name| excluded.insert(name.clone())) {
        redirect.secondary_interfaces.push(name.clone());
        redirect.exclude_interfaces.push(name);
    }
}
