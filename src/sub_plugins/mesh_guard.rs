//! The block of the sub-plugin `mesh-guard`.

use super::grants::selector;
use crate::cni::{BlockReader, Error};
use kube::core::Selector;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The addresses to which istio-cni translates those of the kubelet's probes (istio/istio, `cni/pkg/config`).
const PROBES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 7, 127)),
    IpAddr::V6(Ipv6Addr::new(0xfd16, 0x9254, 0x7127, 0x1337, 0xffff, 0xffff, 0xffff, 0xffff)),
];

/// The block of the sub-plugin.
#[derive(Debug)]
pub(super) struct MeshGuard {
    /// The namespaces whose pods get no guard.
    pub(super) exempt: Option<Selector>,
    /// Whether ambient captures DNS: Istio's setting is global, and not visible here.
    pub(super) dns: bool,
    /// The addresses of the kubelet's probes in the ambient mesh.
    pub(super) probes: BTreeSet<IpAddr>,
}

impl MeshGuard {
    /// Parses the keys of a block.
    ///
    /// # Errors
    /// A value is invalid ([`Code::InvalidConfig`]).
    pub(super) fn parse(r: &BlockReader<'_>) -> Result<Self, Error> {
        let probes = r.list("probe_addresses")?.map(|list| list.distinct("IP addresses", |item| item.parse().ok()));
        let probes: Option<Vec<IpAddr>> = probes.transpose()?;
        Ok(Self {
            exempt: selector(r, "exclude_namespace_selector")?,
            dns: r.boolean("dns")?.unwrap_or_default(),
            probes: probes.map_or_else(|| PROBES.into(), |list| list.into_iter().collect()),
        })
    }
}
