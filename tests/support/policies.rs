//! Policies that together cover every element of rules.

use detour_cni::policy::{
    ContainerExclusion, ContainerScope, DnsCapture, Exclusion, Groups, IdRange, Interception, InterceptionMode, Policy,
    PortRange, Ports, Protocol, Ranges, Redirect, TrafficOwner,
};

pub(crate) fn on(redirect: Redirect) -> Policy {
    Policy { interception: Interception::On(Box::new(redirect)), ..Policy::default() }
}

fn nets(list: &[&str]) -> Ranges {
    Ranges::List(list.iter().map(|n| n.parse().expect("a CIDR")).collect())
}

pub(crate) fn range(first: u16, last: u16) -> PortRange {
    PortRange { first, last }
}

fn excluding(policy: Policy) -> Policy {
    let any = Exclusion { owner: TrafficOwner::Any, destination: None, protocol: None, ports: Vec::new() };
    let uid = |first, last| TrafficOwner::Uid(IdRange { first, last });
    let exclusions = [
        Exclusion { owner: uid(1337, 1337), ..any.clone() },
        Exclusion {
            owner: uid(1_000_650_000, 4_000_000_000),
            protocol: Some(Protocol::Tcp),
            ports: vec![range(443, 443)],
            ..any.clone()
        },
        Exclusion {
            owner: TrafficOwner::Gid(IdRange::one(7)),
            ports: (1..20).map(|p| range(p * 100, p * 100 + p % 2)).collect(),
            ..any.clone()
        },
        Exclusion {
            destination: Some("10.96.0.0/12".parse().expect("a CIDR")),
            ports: vec![range(53, 53)],
            ..any.clone()
        },
        Exclusion { destination: Some("fd96::a/128".parse().expect("a CIDR")), ports: vec![range(53, 53)], ..any },
    ];
    Policy { exclusions: exclusions.into(), ..policy }
}

/// Returns the policy with excluded containers, one of each scope.
pub(crate) fn excluding_containers(scopes: &[ContainerScope], policy: Policy) -> Policy {
    let container = |scope: &ContainerScope| ContainerExclusion { name: format!("excluded-{scope}"), scope: *scope };
    Policy { containers: scopes.iter().map(container).collect(), ..policy }
}

/// Returns the policies with a name for each.
pub(crate) fn policies() -> Vec<(&'static str, Policy)> {
    use ContainerScope::{All, Dns};
    let default = Redirect::default;
    let dns = || Redirect { dns: DnsCapture::All, ..default() };
    vec![
        ("default", on(default())),
        ("dns", on(dns())),
        (
            "dns to servers",
            on(Redirect { dns: DnsCapture::Servers { v4: vec![[10, 96, 0, 10].into()], v6: vec![] }, ..default() }),
        ),
        (
            "lists",
            on(Redirect {
                inbound_ports_include: Ports::List(vec![range(80, 80), range(8000, 8010)]),
                outbound_ports_include: Ports::List(vec![range(9000, 9000)]),
                outbound_ports_exclude: Ports::List(vec![range(22, 22), range(6000, 6010)]),
                outbound_ip_ranges_include: nets(&[
                    "10.0.0.0/8",
                    "10.64.0.0/10",
                    "fc00::/7",
                    "0.0.0.0/0",
                    "1.2.3.4/32",
                ]),
                outbound_ip_ranges_exclude: nets(&["10.1.2.0/23", "fd96::/64", "fd97::/63"]),
                reroute_virtual_interfaces: vec!["net1".into(), "net2".into()],
                exclude_interfaces: vec!["eth1".into(), "veth+".into()],
                drop_invalid: true,
                ..dns()
            }),
        ),
        (
            "all excluded",
            on(Redirect {
                inbound_ports_exclude: Ports::All,
                outbound_ports_exclude: Ports::All,
                outbound_ip_ranges_exclude: Ranges::All,
                outbound_ip_ranges_include: nets(&["127.0.0.0/8"]),
                ..default()
            }),
        ),
        (
            "owners",
            on(Redirect {
                proxy_uid: vec![1337, 1_000_659_999],
                owner_groups_include: Groups::List(vec![1, 2, 3]),
                ..dns()
            }),
        ),
        (
            "tproxy",
            on(Redirect {
                inbound_interception_mode: InterceptionMode::Tproxy,
                exclude_interfaces: vec!["eth1".into()],
                drop_invalid: true,
                owner_groups_exclude: vec![5],
                ..default()
            }),
        ),
        (
            "tproxy of ports",
            on(Redirect {
                inbound_interception_mode: InterceptionMode::Tproxy,
                inbound_ports_include: Ports::List(vec![range(80, 80)]),
                ..default()
            }),
        ),
        ("exclusions alone", excluding(Policy { dns_captured_elsewhere: Some(true), ..Policy::default() })),
        ("exclusions", excluding(on(dns()))),
        ("exclusions without dns", excluding(on(default()))),
        ("containers", excluding_containers(&[All], on(dns()))),
        ("containers and exclusions", excluding_containers(&[Dns, All], excluding(on(dns())))),
        ("containers without dns", excluding_containers(&[Dns, All], on(default()))),
        ("containers alone", excluding_containers(&[Dns], Policy::default())),
        (
            "containers and some servers",
            excluding_containers(
                &[Dns, All],
                on(Redirect {
                    dns: DnsCapture::Servers {
                        v4: vec![[10, 96, 0, 10].into(), [10, 96, 0, 11].into()],
                        v6: vec!["fd96::a".parse().expect("an address")],
                    },
                    ..default()
                }),
            ),
        ),
    ]
}
