//! `dns-exclude`: DNS of a process, or to a resolver, leaves untouched.

use super::annotation::Annotation;
use super::destinations::Destinations;
use super::ids::{Ids, Kind};
use super::scene::{Author, Scene};
use super::{Note, ports, protocols};
use crate::cni::{Error, Reader};
use crate::pod::Facts;
use crate::policy::{Exclusion, Owner, PortRange, Ports, Protocol};

const RESOLVERS: &str = "detour.io/exclude-dns";

/// Every annotation that counts here.
pub(super) const ANNOTATIONS: [&str; 1] = [RESOLVERS];

/// What one place asks for: a block, or the annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DnsExclude {
    uids: Option<Ids>,
    gids: Option<Ids>,
    resolvers: Option<Destinations>,
    ports: Ports,
    protocols: Vec<Option<Protocol>>,
}

impl DnsExclude {
    /// A block's keys.
    pub(super) fn parse(r: &Reader<'_>, author: Author) -> Result<Self, Error> {
        let ids = |key| r.list(key)?.map(|list| Ids::parse(&list, author)).transpose();
        let resolvers = r.list("resolvers")?.map(|list| Destinations::parse(&list)).transpose()?;
        let ports = r.list("ports")?.map(|list| ports::parse(&list)).transpose()?;
        let protocols = r.list("protocols")?.map(|list| protocols::parse(&list)).transpose()?;
        Ok(Self {
            uids: ids("uids")?,
            gids: ids("gids")?,
            resolvers,
            ports: ports.unwrap_or_else(|| Ports::List(vec![PortRange::one(53)])),
            protocols: protocols.unwrap_or_else(|| vec![Some(Protocol::Udp), Some(Protocol::Tcp)]),
        })
    }

    /// The annotation of the pod or its namespace: for every process, on this block's ports.
    pub(super) fn annotated(&self, facts: &Facts) -> Result<Option<Self>, Error> {
        let Some(annotation) = Annotation::of_pod_or_namespace(facts, RESOLVERS) else { return Ok(None) };
        let resolvers = Some(Destinations::parse(&annotation.list())?);
        Ok(Some(Self { uids: None, gids: None, resolvers, ..self.clone() }))
    }

    /// What that exempts in one pod.
    pub(super) fn exclusions(&self, scene: &Scene<'_>, notes: &mut Vec<Note>) -> Result<Vec<Exclusion>, Error> {
        let Some(ports) = self.ports() else { return Ok(Vec::new()) };
        let destinations = match (&self.resolvers, &self.uids, &self.gids) {
            (Some(resolvers), _, _) => resolvers.resolve(scene)?,
            (None, None, None) => return Ok(Vec::new()),
            (None, _, _) => vec![None],
        };
        let mut exclusions = Vec::new();
        for owner in self.owners(scene, notes)? {
            for &destination in &destinations {
                for &protocol in &self.protocols {
                    exclusions.push(Exclusion { owner, destination, protocol, ports: ports.clone() });
                }
            }
        }
        Ok(exclusions)
    }

    fn owners(&self, scene: &Scene<'_>, notes: &mut Vec<Note>) -> Result<Vec<Owner>, Error> {
        if self.uids.is_none() && self.gids.is_none() {
            return Ok(vec![Owner::Any]);
        }
        let mut owners = Vec::new();
        for (ids, kind) in [(&self.uids, Kind::User), (&self.gids, Kind::Group)] {
            if let Some(ids) = ids {
                owners.extend(ids.owners(kind, scene, notes)?);
            }
        }
        Ok(owners)
    }

    /// As in [`Exclusion::ports`], where none is every port; `None` where the list is empty.
    fn ports(&self) -> Option<Vec<PortRange>> {
        match &self.ports {
            Ports::All => Some(Vec::new()),
            Ports::List(ranges) => (!ranges.is_empty()).then(|| ports::sorted(ranges.clone())),
        }
    }
}
