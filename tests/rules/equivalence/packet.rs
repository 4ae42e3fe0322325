//! A packet with its sender, and the outcome of the rules for it.

use detour_cni::firewall::rule::{Family, Hook};
use proptest::prelude::*;
use std::net::IpAddr;

#[derive(Debug, Clone)]
pub(crate) struct Packet {
    pub(crate) family: Family,
    pub(crate) hook: Hook,
    pub(crate) interface: &'static str,
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    /// 6 (TCP) and 17 (UDP) have ports.
    pub(crate) protocol: u8,
    pub(crate) source_port: u16,
    pub(crate) destination_port: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// One bit of `NF_CT_STATE_…`.
    pub(crate) state: u32,
    pub(crate) mark: u32,
    pub(crate) connection_mark: u32,
    /// Whether a process listens on the port of TPROXY.
    pub(crate) has_listener: bool,
}

/// The outcome of the rules for a packet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) dropped: bool,
    pub(crate) redirected_to: Option<u16>,
    pub(crate) assigned_to: Option<u16>,
    /// Whether an exclusion fixed the destination: no later rule translates it.
    pub(crate) fixed: bool,
    /// The first zone that was set; 0 is the default zone.
    pub(crate) zone: Option<u16>,
    pub(crate) mark: u32,
    pub(crate) connection_mark: u32,
}

impl Outcome {
    pub(crate) fn of(packet: &Packet) -> Self {
        Self { mark: packet.mark, connection_mark: packet.connection_mark, ..Self::default() }
    }

    /// Normalizes: zone 0 equals no zone, a fixed destination is an unchanged one, and a dropped packet has no other
    /// outcome.
    pub(crate) fn normalized(mut self) -> Self {
        if self.fixed {
            (self.redirected_to, self.fixed) = (None, false);
        }
        self.zone = self.zone.filter(|zone| *zone != 0);
        if self.dropped { Self { dropped: true, ..Self::default() } } else { self }
    }

    pub(crate) fn names(&self) -> [(&'static str, bool); 7] {
        [
            ("dropped", self.dropped),
            ("redirected outbound", self.redirected_to == Some(15001)),
            ("redirected inbound", self.redirected_to == Some(15006)),
            ("redirected DNS", self.redirected_to == Some(15053)),
            ("assigned to a listener", self.assigned_to.is_some()),
            ("in a zone", self.zone.is_some()),
            ("unchanged", *self == Self { mark: self.mark, connection_mark: self.connection_mark, ..Self::default() }),
        ]
    }
}

/// Addresses inside, at the edges of, and outside the ranges of the random policies.
fn address(family: Family) -> BoxedStrategy<IpAddr> {
    let of = |list: &'static [&'static str]| prop::sample::select(list).prop_map(|a| a.parse().expect("an address"));
    match family {
        Family::Ip => {
            of(&["127.0.0.1", "127.0.0.6", "10.0.0.0", "10.1.2.3", "10.96.0.10", "10.255.255.255", "11.0.0.1"]).boxed()
        }
        Family::Ip6 => of(&["::1", "::6", "fd96::a", "fd96::b", "fdff::1", "2001:db8::1"]).boxed(),
    }
}

fn port() -> impl Strategy<Value = u16> {
    prop::sample::select(vec![22_u16, 53, 80, 443, 8000, 8005, 8010, 8011, 15001, 15006, 15008, 15020, 15053, 65535])
}

pub(crate) fn any() -> impl Strategy<Value = Packet> {
    let family = prop::sample::select(&Family::ALL[..]);
    let origin = (
        prop::sample::select(&Hook::ALL[..]),
        prop::sample::select(vec!["lo", "eth0", "eth1", "net1", "veth5"]),
        prop::sample::select(vec![0_u32, 5, 1336, 1337, 1338, 2000, 4_000_000_000]),
        prop::sample::select(vec![0_u32, 5, 7, 1337, 2000]),
    );
    let flow = (prop::sample::select(vec![1_u8, 6, 6, 17, 17]), port(), port());
    let tracked = (
        prop::sample::select(vec![1_u32, 2, 4, 8]),
        prop::sample::select(vec![0_u32, 1337, 1338]),
        prop::sample::select(vec![0_u32, 1337]),
        prop::bool::ANY,
    );
    let ends = family.prop_flat_map(|family| (Just(family), address(family), address(family)));
    (ends, origin, flow, tracked).prop_map(|((family, source, destination), origin, flow, tracked)| Packet {
        family,
        hook: origin.0,
        interface: origin.1,
        source,
        destination,
        protocol: flow.0,
        source_port: flow.1,
        destination_port: flow.2,
        // An incoming packet has no local sender.
        uid: if origin.0 == Hook::Output { origin.2 } else { u32::MAX },
        gid: if origin.0 == Hook::Output { origin.3 } else { u32::MAX },
        state: tracked.0,
        // Only over lo, an incoming packet can have a mark: marks do not leave a network namespace.
        mark: if origin.0 == Hook::Prerouting && origin.1 != "lo" { 0 } else { tracked.1 },
        connection_mark: tracked.2,
        has_listener: tracked.3,
    })
}
