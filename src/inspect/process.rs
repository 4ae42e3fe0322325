//! The processes of a container as rules see them: by the UID and GID that the pod says they have.

use crate::pod::{Container, Pod};
use crate::policy::{Exclusion, IdRange, TrafficOwner, Policy};

/// Containers of Istio's own, whose traffic is its own affair.
const ISTIO_CONTAINERS: [&str; 3] = ["istio-init", "istio-validation", "istio-proxy"];

/// A container of a pod.
#[derive(Debug, Clone, Copy)]
pub(super) struct ContainerTraffic<'a> {
    pub pod: &'a Pod,
    pub container: &'a Container,
    /// Whether it has ended when the application starts.
    pub ends_before: bool,
}

/// How much of what a process sends is exempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exempt {
    All,
    Some,
    No,
}

/// Every container but Istio's own, those that start first first.
pub(super) fn processes(pod: &Pod) -> Vec<ContainerTraffic<'_>> {
    let init = pod.init_containers.iter().map(|c| (c, !c.restarts_always));
    let all = init.chain(pod.containers.iter().map(|c| (c, false)));
    let own = all.filter(|(c, _)| !ISTIO_CONTAINERS.contains(&c.name.as_str()));
    own.map(|(container, ends_before)| ContainerTraffic { pod, container, ends_before }).collect()
}

impl ContainerTraffic<'_> {
    pub(super) fn uid(&self) -> Option<u32> {
        u32::try_from(self.pod.user_of(self.container)?).ok()
    }

    pub(super) fn gid(&self) -> Option<u32> {
        u32::try_from(self.pod.group_of(self.container)?).ok()
    }

    /// Whether it is one of those; one whose IDs are not known is not.
    pub(super) fn is(&self, owner: TrafficOwner) -> bool {
        let within = |range: IdRange, id: Option<u32>| id.is_some_and(|id| range.covers(IdRange::one(id)));
        match owner {
            TrafficOwner::Any => true,
            TrafficOwner::Uid(range) => within(range, self.uid()),
            TrafficOwner::Gid(range) => within(range, self.gid()),
        }
    }

    /// How much of what it sends the exclusions of `policy` exempt.
    pub(super) fn exempt(&self, policy: &Policy) -> Exempt {
        let own = || policy.exclusions.iter().filter(|exclusion| self.is(exclusion.owner));
        match own().next() {
            None => Exempt::No,
            Some(_) if own().any(is_everything) => Exempt::All,
            Some(_) => Exempt::Some,
        }
    }
}

/// Whether all that an owner sends is exempt.
pub(super) const fn is_everything(exclusion: &Exclusion) -> bool {
    exclusion.destination.is_none() && exclusion.protocol.is_none() && exclusion.ports.is_empty()
}
