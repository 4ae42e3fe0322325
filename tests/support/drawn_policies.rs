//! Random policies from few ports, addresses and owners, so that their parts overlap.

use detour_cni::policy::{
    ContainerExclusion, ContainerScope, DnsCapture, Exclusion, Groups, IdRange, Interception, InterceptionMode, Policy,
    PortRange, Ports, Protocol, Ranges, Redirect, TrafficOwner,
};
use ipnet::IpNet;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn ports() -> impl Strategy<Value = PortRange> {
    let ranges = [(22, 22), (53, 53), (80, 80), (443, 443), (8000, 8010), (8005, 8005), (8011, 8011), (1, 65535)];
    prop::sample::select(ranges.to_vec()).prop_map(|(first, last)| PortRange { first, last })
}

fn port_list() -> impl Strategy<Value = Vec<PortRange>> {
    prop::collection::btree_set(ports(), 0..5).prop_map(|set| set.into_iter().collect())
}

fn some_ports() -> impl Strategy<Value = Ports> {
    prop_oneof![9 => port_list().prop_map(Ports::List), 1 => Just(Ports::All)]
}

fn net() -> impl Strategy<Value = IpNet> {
    let nets = [
        "10.0.0.0/8",
        "10.96.0.10/32",
        "10.1.2.0/23",
        "127.0.0.0/8",
        "0.0.0.0/0",
        "fd96::/64",
        "fd96::a/128",
        "fc00::/7",
        "::/0",
    ];
    prop::sample::select(nets.to_vec()).prop_map(|net| net.parse().expect("a CIDR"))
}

fn some_nets() -> impl Strategy<Value = Ranges> {
    let list = prop::collection::btree_set(net(), 0..5).prop_map(|set| Ranges::List(set.into_iter().collect()));
    prop_oneof![3 => list, 1 => Just(Ranges::All)]
}

fn ids() -> impl Strategy<Value = IdRange> {
    let ranges = [(5, 5), (7, 7), (1337, 1337), (1336, 1336), (2000, 2999), (0, 10), (1_000_000, u32::MAX - 1)];
    prop::sample::select(ranges.to_vec()).prop_map(|(first, last)| IdRange { first, last })
}

fn exclusion() -> impl Strategy<Value = Exclusion> {
    let owner = prop_oneof![1 => Just(TrafficOwner::Any), 3 => ids().prop_map(TrafficOwner::Uid), 1 => ids().prop_map(TrafficOwner::Gid)];
    let protocol = prop::option::of(prop::sample::select(vec![Protocol::Tcp, Protocol::Udp]));
    // Queries to given destinations have rules of their own.
    let traffic = prop_oneof![
        4 => (protocol, port_list()),
        1 => Just((None, vec![PortRange { first: 53, last: 53 }])),
    ];
    (owner, prop::option::weighted(0.4, net()), traffic).prop_map(|(owner, destination, (protocol, ports))| Exclusion {
        owner,
        destination,
        protocol,
        ports,
    })
}

fn names() -> impl Strategy<Value = Vec<String>> {
    prop::sample::subsequence(vec!["eth1", "net1", "veth+"], 0..=2)
        .prop_map(|names| names.into_iter().map(str::to_owned).collect())
}

fn redirect() -> impl Strategy<Value = Redirect> {
    let dns = prop_oneof![
        Just(DnsCapture::Off),
        Just(DnsCapture::All),
        Just(DnsCapture::Servers { v4: vec![[10, 96, 0, 10].into(), [10, 1, 2, 3].into()], v6: vec![] }),
        Just(DnsCapture::Servers { v4: vec![], v6: vec!["fd96::a".parse().expect("an address")] }),
    ];
    let owners = (
        prop::sample::select(vec![vec![1337], vec![1337, 2000], vec![]]),
        prop::sample::select(vec![vec![1337], vec![]]),
        prop::sample::select(vec![Groups::All, Groups::List(vec![5]), Groups::List(vec![5, 6, 2000])]),
        prop::sample::select(vec![vec![], vec![7], vec![5, 6]]),
    );
    let mode = prop::sample::select(vec![InterceptionMode::Redirect, InterceptionMode::Tproxy]);
    let interfaces = (names(), names());
    let inbound = (some_ports(), some_ports(), mode, prop::bool::ANY);
    let outbound = (some_ports(), some_ports(), some_nets(), some_nets());
    (dns, owners, interfaces, inbound, outbound).prop_map(|(dns, owners, interfaces, inbound, outbound)| Redirect {
        dns,
        proxy_uid: owners.0,
        proxy_gid: owners.1,
        owner_groups_include: owners.2,
        owner_groups_exclude: owners.3,
        reroute_virtual_interfaces: interfaces.0,
        exclude_interfaces: interfaces.1,
        inbound_ports_include: inbound.0,
        inbound_ports_exclude: inbound.1,
        inbound_interception_mode: inbound.2,
        drop_invalid: inbound.3,
        outbound_ports_include: outbound.0,
        outbound_ports_exclude: outbound.1,
        outbound_ip_ranges_include: outbound.2,
        outbound_ip_ranges_exclude: outbound.3,
        ..Redirect::default()
    })
}

fn containers() -> impl Strategy<Value = BTreeSet<ContainerExclusion>> {
    let container = |scope| ContainerExclusion { name: "vault".to_owned(), scope };
    let scopes = prop::sample::subsequence(vec![ContainerScope::Dns, ContainerScope::All], 0..=2);
    scopes.prop_map(move |scopes| scopes.into_iter().map(container).collect())
}

pub(crate) fn any() -> impl Strategy<Value = Policy> {
    let interception = prop_oneof![
        8 => redirect().prop_map(|redirect| Interception::On(Box::new(redirect))),
        1 => Just(Interception::Unset),
    ];
    let exclusions = prop::collection::btree_set(exclusion(), 0..6);
    let elsewhere = (prop::option::of(prop::bool::ANY), prop::bool::ANY);
    (interception, exclusions, containers(), elsewhere).prop_map(
        |(interception, exclusions, containers, (dns_captured_elsewhere, ambient)): (_, BTreeSet<Exclusion>, _, _)| {
            Policy { interception, exclusions, containers, dns_captured_elsewhere, ambient, guard: None }
        },
    )
}
