//! What the forms of a block mean for one pod: everything that they are resolved against.

use super::{Resolvers, settings};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Pod};
use crate::policy::{Ranges, Redirect};
use std::fmt::Display;

/// How a configuration gets facts, for messages.
pub(super) const SOURCES: &str =
    "set kubernetes.kubeconfig, kubernetes.agent_socket or kubernetes.manifests_dir in the configuration";

/// One pod, seen from a sub-plugin.
#[derive(Clone, Copy)]
pub(super) struct PodContext<'a> {
    /// The pod's facts, where there is a source of them.
    pub facts: Option<&'a Facts>,
    /// Addresses of resolvers, by where they are known from.
    pub resolvers: Resolvers<'a>,
    /// The redirection that this chain asks for.
    pub redirect: Option<&'a Redirect>,
}

/// Who wrote a list down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListAuthor {
    /// The administrator, of the node or of the namespace, for many pods: what one of them
    /// doesn't have is passed over.
    Administrator,
    /// The pod's own: what the pod doesn't have is a mistake.
    Pod,
}

impl<'a> PodContext<'a> {
    /// The facts, for the form `item` that stands at `place`.
    pub(super) fn facts(&self, place: &str, item: &dyn Display) -> Result<&'a Facts, Error> {
        self.facts.ok_or_else(|| {
            let msg = format!("{place}: {:?} needs facts of the pod: {SOURCES}", item.to_string());
            Error::new(Code::InvalidConfig, msg)
        })
    }

    /// Where outbound traffic is not redirected to: as this chain has it or, where somebody else
    /// redirects, as the pod asks.
    pub(super) fn excluded_ranges(&self) -> Result<Ranges, Error> {
        if let Some(redirect) = self.redirect {
            return Ok(redirect.outbound_ip_ranges_exclude.clone());
        }
        let asked = self.facts.map(|facts| settings::excluded_ranges(&facts.pod)).transpose()?;
        Ok(asked.flatten().unwrap_or_else(|| Redirect::default().outbound_ip_ranges_exclude))
    }
}

/// A pod's name as messages have it.
pub(super) fn name_of(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Facts, and nothing else that is known.
    pub(in super::super) fn scene(facts: Option<&Facts>) -> PodContext<'_> {
        PodContext { facts, resolvers: Resolvers::default(), redirect: None }
    }
}
