//! What a sub-plugin evaluates its lists against: one pod's facts, resolvers and annotations; and the exclusions that
//! result.
//!
//! An invalid request of a pod or its namespace is an error for a new pod, and nothing for a running one.

use super::sub_plugin::{Note, SettingSource};
use crate::cni::{Code, Error, ItemList, at_most};
use crate::pod::{AnnotatedObject, Facts, Pod};
use crate::policy::{ContainerExclusion, Exclusion, PortRange, Protocol, Redirect, TrafficOwner};
use ipnet::IpNet;
use std::fmt::Display;
use std::net::IpAddr;

/// How a configuration gets facts, for messages.
pub(super) const FACT_SOURCES: &str =
    "set kubernetes.kubeconfig, kubernetes.agent_socket or kubernetes.manifests_dir in the configuration";

/// Limit of exclusions per pod; an exclusion with many ports counts several times.
pub(super) const MAX_EXCLUSIONS: usize = 10_000;
/// Limit of containers, including init containers, of a pod in which a list looks up containers.
pub(super) const MAX_CONTAINERS: usize = 100;
/// Number of port ranges that fit into one rule.
const PORTS_PER_RULE: usize = 7;

/// One pod as a sub-plugin sees it.
#[derive(Clone, Copy)]
pub(super) struct PodContext<'a> {
    /// The pod's facts; `None` if the configuration has no source of facts.
    pub facts: Option<&'a Facts>,
    /// Addresses of resolvers by source.
    pub resolvers: Resolvers<'a>,
    /// The redirection of the same sub-plugin chain.
    pub redirect: Option<&'a Redirect>,
    /// Whether the annotations for a redirection of another program apply.
    pub reads_annotations: bool,
}

impl<'a> PodContext<'a> {
    /// Returns the facts, which the list item `item` at `place` needs.
    pub(super) fn facts(&self, place: &str, item: &dyn Display) -> Result<&'a Facts, Error> {
        self.facts.ok_or_else(|| {
            let msg = format!("{place}: {:?} needs facts of the pod: {FACT_SOURCES}", item.to_string());
            Error::new(Code::InvalidConfig, msg)
        })
    }
}

/// Addresses of DNS servers by source.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resolvers<'a> {
    /// `runtimeConfig.dns.servers`: the pod's DNS servers according to the runtime.
    pub runtime: &'a [IpAddr],
    /// `kubernetes.cluster_dns`.
    pub cluster_dns: &'a [IpAddr],
    /// `prevResult.dns.nameservers`.
    pub previous: &'a [IpAddr],
}

/// Who wrote a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListAuthor {
    /// The administrator of the node or of the namespace. The list is for many pods, so items that do not apply to a
    /// pod are skipped.
    Administrator,
    /// The author of the pod. Items that do not apply are errors.
    Pod,
}

/// An annotation that is set. Its value may be empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AnnotationValue<'a> {
    /// For messages: the key and the object.
    pub place: String,
    pub value: &'a str,
    pub author: ListAuthor,
}

impl<'a> AnnotationValue<'a> {
    /// Returns the pod's annotation.
    pub(super) fn of_pod(pod: &'a Pod, key: &str) -> Option<Self> {
        let value = pod.annotations.get(key)?;
        Some(Self::of_object(AnnotatedObject::Pod(pod), key, value))
    }

    /// Returns the pod's annotation, or its namespace's if the pod has none.
    pub(super) fn of_pod_or_namespace(facts: &'a Facts, key: &str) -> Option<Self> {
        facts.annotation(key).map(|(object, value)| Self::of_object(object, key, value))
    }

    fn of_object(object: AnnotatedObject<'_>, key: &str, value: &'a str) -> Self {
        let author = match object {
            AnnotatedObject::Pod(_) => ListAuthor::Pod,
            AnnotatedObject::Namespace(_) => ListAuthor::Administrator,
        };
        Self { place: format!("annotation {key:?} of {object}"), value, author }
    }

    /// Returns the source of a setting that this annotation sets; `key` is the annotation's.
    pub(super) const fn source(&self, key: &'static str) -> SettingSource {
        match self.author {
            ListAuthor::Pod => SettingSource::Pod(key),
            ListAuthor::Administrator => SettingSource::Namespace(key),
        }
    }

    /// Returns the error for an invalid value.
    pub(super) fn reject(&self, accepted: &str) -> Error {
        ItemList { place: self.place.clone(), items: Vec::new() }.reject(self.value, accepted)
    }

    /// Returns the value as a comma-separated list.
    pub(super) fn list(&self) -> Result<ItemList, Error> {
        ItemList::from_text(&self.place, self.value)
    }
}

/// The exclusions that one block, argument or annotation requests. They are counted before they are created, because
/// owners, destinations, protocols and ports multiply.
#[derive(Debug, Default)]
pub(super) struct RequestedExclusions {
    pub exclusions: Vec<Exclusion>,
    pub containers: Vec<ContainerExclusion>,
    /// The number that counts toward [`MAX_EXCLUSIONS`].
    pub count: usize,
}

impl RequestedExclusions {
    /// Adds an exclusion for each owner, destination and protocol; `place` is for messages.
    ///
    /// # Errors
    /// There are too many for one pod.
    pub(super) fn add(
        &mut self,
        place: &str,
        owners: &[TrafficOwner],
        destinations: &[Option<IpNet>],
        protocols: &[Option<Protocol>],
        ports: &[PortRange],
    ) -> Result<(), Error> {
        let rules = ports.len().div_ceil(PORTS_PER_RULE).max(1);
        let factors = [owners.len(), destinations.len(), protocols.len(), rules];
        let count = factors.into_iter().fold(1, usize::saturating_mul);
        self.count = self.count.saturating_add(count);
        at_most(MAX_EXCLUSIONS, "exclusions", place, self.count)?;
        for &owner in owners {
            for &destination in destinations {
                let exclusion = |&protocol| Exclusion { owner, destination, protocol, ports: ports.to_vec() };
                self.exclusions.extend(protocols.iter().map(exclusion));
            }
        }
        Ok(())
    }
}

/// Checks that `pod` does not have too many containers for a list: each item is searched in all of them.
pub(super) fn check_containers(pod: &Pod, place: &dyn Fn(&str) -> String) -> Result<(), Error> {
    let count = pod.all_containers().count();
    if count > MAX_CONTAINERS {
        let place = place(&format!("pod {}", name_of(pod)));
        at_most(MAX_CONTAINERS, "containers", place, count)?;
    }
    Ok(())
}

/// Returns the pod's name as messages show it: `NAMESPACE/NAME`.
pub(super) fn name_of(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

impl ListAuthor {
    /// Returns the note that an item does not apply to a pod: a warning for the pod's author, information for an
    /// administrator of many pods.
    pub(super) fn note(self, text: String) -> Note {
        match self {
            Self::Administrator => Note::info(text),
            Self::Pod => Note::warning(text),
        }
    }
}

/// What a running pod has had since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StartedWith {
    /// Whether its traffic is redirected to the sidecar.
    pub redirection: bool,
    /// Whether it has a guard beside a redirection to the sidecar.
    pub guard: bool,
    /// Whether it has a guard of the ambient mesh.
    pub ambient_guard: bool,
}

/// The requests of one pod.
pub(super) enum Requests<'a> {
    /// Of a new pod: an invalid one is an error.
    Strict,
    /// Of a running pod: an invalid one counts as absent, and its error is added to this list.
    Lenient(&'a mut Vec<Error>),
    /// None counts.
    Ignored,
}

impl Requests<'_> {
    /// Returns what was requested; nothing if it is invalid and may be absent.
    pub(super) fn or_absent<T: Default>(&mut self, requested: Result<T, Error>) -> Result<T, Error> {
        match (self, requested) {
            (Self::Strict, requested) | (_, requested @ Ok(_)) => requested,
            (Self::Lenient(absent), Err(error)) => {
                absent.push(error);
                Ok(T::default())
            }
            (Self::Ignored, Err(_)) => Ok(T::default()),
        }
    }

    /// Returns whether requests count.
    pub(super) const fn count(&self) -> bool {
        !matches!(self, Self::Ignored)
    }
}
