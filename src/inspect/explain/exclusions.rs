//! The traffic that bypasses the sidecar, by exclusion and by container; and when each init container runs, and whether
//! it needs an exclusion: traffic that it sends before the proxy accepts connections is captured and lost. A native
//! sidecar starts before the init containers that follow it in the pod, and Istio injects it as the first one (the
//! default since Istio 1.27 with Kubernetes 1.33).

use crate::inspect::terminal::{self, Cell, Tone, joined};
use crate::pod::well_known::ISTIO_CONTAINERS;
use crate::pod::{Container, Pod};
use crate::policy::{
    ContainerExclusion, ContainerScope, DnsCapture, Exclusion, IdRange, Policy, Redirect, TrafficOwner,
};
use crate::sub_plugins::{Origins, SettingSource};
use serde::Serialize;
use std::collections::BTreeSet;

/// Traffic that bypasses the sidecar, and the sources of the exclusion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExcludedTraffic {
    /// `outbound`, `inbound` or `both`.
    pub direction: &'static str,
    /// The owner: `uid 1337`, `uid 1000-1999`, `gid 7`, or `every process`; the client of inbound traffic.
    pub who: String,
    /// `tcp`, `udp`, or `everything`.
    pub protocol: String,
    /// Destination ports; an empty list means every port.
    pub ports: Vec<String>,
    /// Destination: addresses, ranges, or `anywhere`.
    pub to: String,
    /// The sources of the exclusion: several sources can request the same one.
    pub sources: Vec<String>,
    /// A remark about the owner: no container has its ID.
    pub note: Option<String>,
    /// The owner; `Any` for traffic of several ones.
    #[serde(skip)]
    pub owner: TrafficOwner,
}

impl ExcludedTraffic {
    /// Returns the protocol and the ports.
    pub(super) fn traffic(&self) -> String {
        let protocol = &self.protocol;
        match self.ports.as_slice() {
            [] => protocol.clone(),
            [one] => format!("{protocol} port {one}"),
            several => format!("{protocol} ports {}", several.join(", ")),
        }
    }

    /// Returns the owner's excluded traffic in one line.
    pub(super) fn what(&self) -> String {
        format!("{} to {}", self.traffic(), self.to)
    }
}

/// A container whose traffic bypasses the sidecar, and the sources of its exclusion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExcludedContainer {
    /// The name of the container.
    pub name: String,
    /// The traffic that bypasses the sidecar: `all` or `dns`.
    pub scope: ContainerScope,
    /// The sources of the exclusion: several sources can request the same one.
    pub sources: Vec<String>,
}

/// Returns the sources of the items that are meant, each once.
pub(super) fn sources_of<T>(requested: &[(T, SettingSource)], is_meant: impl Fn(&T) -> bool) -> Vec<String> {
    let mut sources: Vec<String> = Vec::new();
    for source in requested.iter().filter(|(item, _)| is_meant(item)).map(|(_, source)| source.to_string()) {
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    sources
}

/// Returns the excluded containers, each with its sources.
pub(super) fn excluded_containers(policy: &Policy, origins: &Origins) -> Vec<ExcludedContainer> {
    let excluded = |one: &ContainerExclusion| ExcludedContainer {
        name: one.name.clone(),
        scope: one.scope,
        sources: sources_of(&origins.containers, |other| other == one),
    };
    policy.containers.iter().map(excluded).collect()
}

/// Returns the exclusions in effect, each with its sources.
pub(super) fn excluded_traffic(policy: &Policy, origins: &Origins) -> Vec<ExcludedTraffic> {
    let sources = |exclusion: &Exclusion| {
        // The policy merges adjacent ranges.
        let merged = |owner: TrafficOwner| exclusion.owner != TrafficOwner::Any && exclusion.owner.covers(owner);
        sources_of(&origins.exclusions, |other| {
            (other.owner == exclusion.owner || merged(other.owner))
                && Exclusion { owner: exclusion.owner, ..other.clone() } == *exclusion
        })
    };
    let traffic = |exclusion: &Exclusion| ExcludedTraffic {
        direction: "outbound",
        who: owner_text(exclusion.owner),
        protocol: exclusion.protocol.map_or_else(|| "everything".to_owned(), |protocol| protocol.to_string()),
        ports: exclusion.ports.iter().map(ToString::to_string).collect(),
        to: exclusion.destination.map_or_else(|| "anywhere".to_owned(), |net| net.to_string()),
        sources: sources(exclusion),
        note: None,
        owner: exclusion.owner,
    };
    policy.exclusions_in_effect().iter().map(traffic).collect()
}

/// From this number of exclusions on that differ only in their ID, [`grouped`] returns one for all of them.
const MAX_IDS: usize = 6;

/// Returns the exclusions; of many that differ only in their UID or GID, one with the first IDs and the number of all.
pub(super) fn grouped(all: &[ExcludedTraffic]) -> Vec<ExcludedTraffic> {
    let is_same = |a: &ExcludedTraffic, b: &ExcludedTraffic| {
        std::mem::discriminant(&a.owner) == std::mem::discriminant(&b.owner)
            && ExcludedTraffic { who: b.who.clone(), owner: b.owner, ..a.clone() } == *b
    };
    let merge = |group: &[ExcludedTraffic]| match group {
        [first, ..] if first.owner != TrafficOwner::Any && group.len() >= MAX_IDS => {
            let ranges = || group.iter().filter_map(|one| ids(one.owner));
            let count: u64 = ranges().map(|range| u64::from(range.last - range.first) + 1).sum();
            let kind = if matches!(first.owner, TrafficOwner::Gid(_)) { "GID" } else { "UID" };
            let who = format!("{} {kind}s: {}, … (--all)", terminal::grouped(count), joined(ranges().take(3)));
            vec![ExcludedTraffic { who, owner: TrafficOwner::Any, ..first.clone() }]
        }
        _ => group.to_vec(),
    };
    all.chunk_by(is_same).flat_map(merge).collect()
}

/// Returns the remark for an exclusion of IDs that no container has.
pub(super) fn unowned(owner: TrafficOwner, pod: &Pod) -> Option<String> {
    ids(owner).filter(|range| *range != IdRange { first: 0, last: u32::MAX })?;
    let mut all = pod.all_containers().map(|container| ContainerTraffic { pod, container, ends_before: false });
    let is_owned = all.any(|container| container.is_owned_by(owner));
    (!is_owned).then(|| "no container has this ID in the manifest".to_owned())
}

const fn ids(owner: TrafficOwner) -> Option<IdRange> {
    match owner {
        TrafficOwner::Any => None,
        TrafficOwner::Uid(range) | TrafficOwner::Gid(range) => Some(range),
    }
}

/// Returns an owner in words.
fn owner_text(owner: TrafficOwner) -> String {
    match owner {
        TrafficOwner::Any => "every process".to_owned(),
        TrafficOwner::Uid(range) => format!("uid {range}"),
        TrafficOwner::Gid(range) => format!("gid {range}"),
    }
}

/// A container of a pod, as the sender of traffic.
#[derive(Debug, Clone, Copy)]
pub(in crate::inspect) struct ContainerTraffic<'a> {
    pub pod: &'a Pod,
    pub container: &'a Container,
    /// Whether it is an init container that ends before the application starts.
    pub ends_before: bool,
}

/// How much of a container's traffic bypasses the sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExcludedPart {
    /// All of it.
    All,
    /// Some of it.
    Some,
    /// None of it.
    None,
}

/// Returns all containers except Istio's, in the order in which they start.
pub(in crate::inspect) fn application_containers(pod: &Pod) -> Vec<ContainerTraffic<'_>> {
    let init = pod.init_containers.iter().map(|c| (c, !c.restarts_always));
    let all = init.chain(pod.containers.iter().map(|c| (c, false)));
    let applications = all.filter(|(c, _)| !ISTIO_CONTAINERS.contains(&c.name.as_str()));
    applications.map(|(container, ends_before)| ContainerTraffic { pod, container, ends_before }).collect()
}

impl ContainerTraffic<'_> {
    pub(in crate::inspect) fn name(&self) -> &str {
        &self.container.name
    }

    pub(in crate::inspect) fn uid(&self) -> Option<u32> {
        u32::try_from(self.pod.user_of(self.container)?).ok()
    }

    pub(in crate::inspect) fn gid(&self) -> Option<u32> {
        u32::try_from(self.pod.group_of(self.container)?).ok()
    }

    /// Returns whether the container's traffic belongs to `owner`; unknown IDs never match.
    pub(in crate::inspect) fn is_owned_by(&self, owner: TrafficOwner) -> bool {
        let within = |range: IdRange, id: Option<u32>| id.is_some_and(|id| range.covers(IdRange::one(id)));
        match owner {
            TrafficOwner::Any => true,
            TrafficOwner::Uid(range) => within(range, self.uid()),
            TrafficOwner::Gid(range) => within(range, self.gid()),
        }
    }

    /// Returns whether it is an init container that runs after the proxy has started, and so needs no exclusion.
    pub(in crate::inspect) fn runs_after_proxy(&self) -> bool {
        self.ends_before && !self.pod.starts_before_proxy(self.name())
    }

    /// Returns the UID or GID of the proxy if the container runs with it: the redirection captures no traffic of these
    /// IDs.
    pub(super) fn proxys_id(&self, policy: &Policy) -> Option<String> {
        let redirect = policy.redirect()?;
        let ids = [("UID", self.uid(), &redirect.proxy_uid), ("GID", self.gid(), &redirect.proxy_gid)];
        ids.into_iter().find_map(|(kind, id, proxys)| Some(format!("{kind} {}", id.filter(|id| proxys.contains(id))?)))
    }

    /// Returns whether an exclusion of `policy` covers all traffic of the container's IDs.
    pub(super) fn is_excluded_by_id(&self, policy: &Policy) -> bool {
        policy.exclusions.iter().any(|exclusion| self.is_owned_by(exclusion.owner) && covers_everything(exclusion))
    }

    /// Returns how much of the container's traffic bypasses the sidecar: because of the exclusions of `policy`, or
    /// because the container runs with the proxy's UID or GID.
    pub(in crate::inspect) fn excluded_part(&self, policy: &Policy) -> ExcludedPart {
        let by_name = policy.container_scope(self.name());
        let is_everything = by_name == Some(ContainerScope::All) || self.is_excluded_by_id(policy);
        if is_everything || self.proxys_id(policy).is_some() {
            ExcludedPart::All
        } else if by_name.is_some() || policy.exclusions.iter().any(|exclusion| self.is_owned_by(exclusion.owner)) {
            ExcludedPart::Some
        } else {
            ExcludedPart::None
        }
    }
}

/// Returns whether an exclusion covers all traffic of its owner.
pub(in crate::inspect) const fn covers_everything(exclusion: &Exclusion) -> bool {
    exclusion.destination.is_none() && exclusion.protocol.is_none() && exclusion.ports.is_empty()
}

/// An init container of the pod, except Istio's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InitContainer {
    /// Its name.
    pub name: String,
    /// Whether it keeps running (`restartPolicy: Always`).
    pub sidecar: bool,
    /// Whether it starts before `istio-proxy` accepts connections.
    pub starts_before_proxy: bool,
    /// Whether its traffic must bypass the sidecar to reach its destination.
    pub needs_exclusion: bool,
    /// How much of its traffic bypasses the sidecar.
    pub excluded: ExcludedPart,
    /// The exclusions that it does not need, each with its source: those by its name, and those of all traffic of its ID.
    pub needless_exclusions: BTreeSet<String>,
}

/// Returns the exclusions that an init container does not need, each with its source: those by its name, and those of an ID
/// that no container among `all` needs.
fn needless(container: &ContainerTraffic<'_>, all: &[ContainerTraffic<'_>], origins: &Origins) -> BTreeSet<String> {
    if !container.runs_after_proxy() {
        return BTreeSet::new();
    }
    let is_needless = |exclusion: &Exclusion| {
        let covers = |one: &ContainerTraffic<'_>| one.is_owned_by(exclusion.owner);
        let is_needed = all.iter().any(|one| one.pod.starts_before_proxy(one.name()) && covers(one));
        covers_everything(exclusion) && exclusion.owner != TrafficOwner::Any && covers(container) && !is_needed
    };
    let of_ids = origins.exclusions.iter().filter(|(exclusion, _)| is_needless(exclusion));
    let of_ids = of_ids.map(|(exclusion, source)| format!("{} ({source})", owner_text(exclusion.owner)));
    let by_name = origins.containers.iter().filter(|(exclusion, _)| exclusion.name == container.name());
    let by_name = by_name.map(|(exclusion, source)| format!("container {} ({source})", exclusion.name));
    of_ids.chain(by_name).collect()
}

impl InitContainer {
    /// Returns whether it ends before the proxy listens, and sends traffic that is captured.
    pub(super) fn is_lost(&self) -> bool {
        self.needs_exclusion && !self.sidecar && self.excluded != ExcludedPart::All
    }

    /// Returns its line in the table.
    pub(super) fn row(&self) -> Vec<Cell> {
        let when = if self.starts_before_proxy { "starts before istio-proxy" } else { "starts after istio-proxy" };
        let (what, tone) = match (self.needs_exclusion, self.excluded) {
            (true, ExcludedPart::All) => ("needs an exclusion, and is excluded", Tone::Good),
            (true, ExcludedPart::Some) => ("needs an exclusion; only a part of its traffic is excluded", Tone::Notable),
            (true, ExcludedPart::None) if self.sidecar => {
                ("needs an exclusion for traffic before istio-proxy accepts connections", Tone::Notable)
            }
            (true, ExcludedPart::None) => ("needs an exclusion: its traffic is captured and lost", Tone::Bad),
            (false, ExcludedPart::All | ExcludedPart::Some) if !self.starts_before_proxy => {
                ("needs no exclusion, but is excluded: its traffic has no mTLS", Tone::Notable)
            }
            (false, _) => ("needs no exclusion", Tone::Good),
        };
        vec![Cell::of(&self.name).tone(Tone::Strong), Cell::of(when), Cell::of(what).tone(tone)]
    }
}

/// Returns the init containers among `containers`, in the order in which they start.
pub(super) fn init_containers(
    containers: &[ContainerTraffic<'_>],
    policy: &Policy,
    origins: &Origins,
) -> Vec<InitContainer> {
    let captures = |redirect: &Redirect| redirect.captures_outbound() || redirect.dns != DnsCapture::Off;
    let is_captured = policy.redirect().is_none_or(captures);
    let of = |container: &ContainerTraffic<'_>| {
        let starts_before_proxy = container.pod.starts_before_proxy(container.name());
        InitContainer {
            name: container.name().to_owned(),
            sidecar: !container.ends_before,
            starts_before_proxy,
            needs_exclusion: starts_before_proxy && is_captured && container.proxys_id(policy).is_none(),
            excluded: container.excluded_part(policy),
            needless_exclusions: needless(container, containers, origins),
        }
    };
    containers.iter().filter(|container| container.pod.is_init_container(container.name())).map(of).collect()
}
