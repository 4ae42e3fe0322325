//! Policies drawn from the bytes of an input: mostly from few ports, addresses and owners, so that their parts overlap.

use super::Choices;
use crate::firewall::{Destination, Sender};
use crate::policy::{
    ContainerExclusion, ContainerScope, DnsCapture, Exclusion, Groups, IdRange, Interception, InterceptionMode, Ipv6,
    Policy, PortRange, Ports, Protocol, Ranges, Redirect, TrafficOwner,
};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::net::SocketAddr;

/// The maximum length of a drawn list.
const MAX: usize = 5;

/// Draws a policy.
pub(crate) fn policy(from: &mut Choices<'_>) -> Policy {
    let interception = match from.below(8) {
        0 => Interception::Unset,
        1 => Interception::Off,
        _ => Interception::On(Box::new(redirect(from))),
    };
    Policy {
        interception,
        exclusions: from.many(6, exclusion).into_iter().collect(),
        containers: from.many(3, container).into_iter().collect(),
        dns_captured_elsewhere: from.one(&[None, Some(false), Some(true)]),
        ambient: from.one(&[false, true]),
        guard: None,
    }
}

/// Draws the first packet of a connection.
pub(crate) fn packet(from: &mut Choices<'_>) -> (Sender, Destination) {
    let places = [
        "192.0.2.1:80",
        "10.96.0.10:53",
        "10.1.2.3:8005",
        "127.0.0.1:22",
        "127.0.0.6:80",
        "[fd96::a]:53",
        "[fd96::b]:443",
        "[::1]:80",
    ];
    let to = match from.below(places.len() + 1) {
        index @ 0..8 => places[index].parse().expect("an address"),
        _ => SocketAddr::new(net(from).addr(), ports(from).first),
    };
    let scope = from.one(&[None, Some(ContainerScope::Dns), Some(ContainerScope::All)]);
    let sender = match from.below(6) {
        0 => Sender::Inbound(None),
        _ => Sender::Process { uid: ids(from).first, gid: Some(ids(from).first), set: scope },
    };
    (sender, Destination { address: to, protocol: from.one(&[Protocol::Tcp, Protocol::Udp]) })
}

fn sorted<T: Ord>(mut list: Vec<T>) -> Vec<T> {
    list.sort_unstable();
    list.dedup();
    list
}

/// Draws a range without port 0, which no configuration can name.
fn ports(from: &mut Choices<'_>) -> PortRange {
    let usual = [(22, 22), (53, 53), (80, 80), (8000, 8010), (8005, 8005), (8011, 8011), (1, 65535)];
    let (first, last) = match from.below(9) {
        index @ 0..7 => usual[index],
        _ => {
            let number = from.number().to_be_bytes();
            (u16::from_be_bytes([number[0], number[1]]).max(1), u16::from_be_bytes([number[2], number[3]]).max(1))
        }
    };
    PortRange { first: first.min(last), last: first.max(last) }
}

fn port_list(from: &mut Choices<'_>) -> Ports {
    if from.below(8) == 7 { Ports::All } else { Ports::List(sorted(from.many(MAX, ports))) }
}

fn net(from: &mut Choices<'_>) -> IpNet {
    let usual = ["10.0.0.0/8", "10.96.0.10/32", "127.0.0.0/8", "0.0.0.0/0", "fd96::/64", "fd96::a/128", "::/0"];
    match from.below(9) {
        index @ 0..7 => usual[index].parse().expect("a CIDR"),
        7 => Ipv4Net::new(from.number().into(), from.byte() % 33).expect("a prefix").trunc().into(),
        _ => {
            let octets: [u8; 16] = std::array::from_fn(|_| from.byte());
            Ipv6Net::new(octets.into(), from.byte() % 129).expect("a prefix").trunc().into()
        }
    }
}

fn nets(from: &mut Choices<'_>) -> Ranges {
    if from.below(6) == 5 { Ranges::All } else { Ranges::List(sorted(from.many(MAX, net))) }
}

fn ids(from: &mut Choices<'_>) -> IdRange {
    let usual = [(5, 5), (7, 7), (1337, 1337), (1336, 1336), (2000, 2999), (0, 10), (1_000_000, u32::MAX - 1)];
    let (first, last) = match from.below(9) {
        index @ 0..7 => usual[index],
        _ => (from.number().min(u32::MAX - 1), from.number().min(u32::MAX - 1)),
    };
    IdRange { first: first.min(last), last: first.max(last) }
}

fn id_list(from: &mut Choices<'_>) -> Vec<u32> {
    sorted(from.many(3, |from| ids(from).first))
}

fn exclusion(from: &mut Choices<'_>) -> Exclusion {
    let owner = match from.below(4) {
        0 => TrafficOwner::Any,
        1 => TrafficOwner::Gid(ids(from)),
        _ => TrafficOwner::Uid(ids(from)),
    };
    let destination = if from.flag() { Some(net(from)) } else { None };
    let protocol = from.one(&[None, Some(Protocol::Tcp), Some(Protocol::Udp)]);
    // The ranges of an exclusion do not touch.
    let mut merged: Vec<PortRange> = Vec::new();
    for ports in sorted(from.many(MAX, ports)) {
        match merged.last_mut().filter(|last| ports.first <= last.last.saturating_add(1)) {
            Some(last) => last.last = last.last.max(ports.last),
            None => merged.push(ports),
        }
    }
    Exclusion { owner, destination, protocol, ports: merged }
}

fn container(from: &mut Choices<'_>) -> ContainerExclusion {
    ContainerExclusion {
        name: from.one(&["vault", "vault-agent-init", "web"]).to_owned(),
        scope: from.one(&[ContainerScope::Dns, ContainerScope::All]),
    }
}

fn interfaces(from: &mut Choices<'_>) -> Vec<String> {
    sorted(from.many(2, |from| from.one(&["eth1", "net1", "veth+", "a", "abcdefghijklmno"]).to_owned()))
}

fn dns(from: &mut Choices<'_>) -> DnsCapture {
    match from.below(3) {
        0 => DnsCapture::Off,
        1 => DnsCapture::All,
        _ => DnsCapture::Servers {
            v4: sorted(from.many(2, |from| from.one(&[[10, 96, 0, 10], [10, 1, 2, 3]]).into())),
            v6: sorted(from.many(1, |_| "fd96::a".parse().expect("an address"))),
        },
    }
}

/// Draws a redirection. Most settings with a single value have their default, so that unions rarely contradict.
fn redirect(from: &mut Choices<'_>) -> Redirect {
    let usual = Redirect::default();
    let unusual = from.byte();
    let port = |bit: u8, usual: u16, other: u16| if unusual & bit == 0 { usual } else { other };
    Redirect {
        inbound_interception_mode: from.one(&[InterceptionMode::Redirect, InterceptionMode::Tproxy]),
        proxy_uid: id_list(from),
        proxy_gid: id_list(from),
        proxy_port: port(1, usual.proxy_port, 15101),
        inbound_capture_port: port(2, usual.inbound_capture_port, 15106),
        inbound_tunnel_port: port(4, usual.inbound_tunnel_port, 15108),
        inbound_tproxy_mark: if unusual & 8 == 0 { usual.inbound_tproxy_mark } else { from.number() },
        inbound_tproxy_route_table: usual.inbound_tproxy_route_table,
        inbound_ports_include: port_list(from),
        inbound_ports_exclude: port_list(from),
        outbound_ports_include: port_list(from),
        outbound_ports_exclude: port_list(from),
        outbound_ip_ranges_include: nets(from),
        outbound_ip_ranges_exclude: nets(from),
        owner_groups_include: if from.flag() { Groups::List(id_list(from)) } else { Groups::All },
        owner_groups_exclude: id_list(from),
        reroute_virtual_interfaces: interfaces(from),
        exclude_interfaces: interfaces(from),
        capture_secondary_networks: unusual & 16 == 0,
        secondary_interfaces: Vec::new(),
        default_interfaces: Vec::new(),
        dns: dns(from),
        drop_invalid: from.flag(),
        ipv6: if unusual & 32 == 0 { Ipv6::Auto } else { from.one(&[Ipv6::On, Ipv6::Off]) },
        host_ipv4_loopback_cidr: usual.host_ipv4_loopback_cidr,
    }
}
