//! `istio-redirect` with every key, annotation and layer.

use super::super::sub_plugin::Severity;
use super::super::tests::scenario::{Scenario, chain};
use super::*;
use crate::policy::{InterceptionMode, PortRange, Ports, Ranges};
use serde_json::{Value, json};

fn block(keys: Value) -> Scenario {
    let mut block = keys;
    block["type"] = "istio-redirect".into();
    chain(json!([block]))
}

fn ports(list: &[u16]) -> Ports {
    Ports::List(list.iter().map(|&port| PortRange::one(port)).collect())
}

fn ranges(list: &[&str]) -> Ranges {
    Ranges::List(list.iter().map(|net| net.parse().expect(net)).collect())
}

/// The effect of a key on Istio's defaults.
type Effect = fn(&mut Redirect);

#[test]
fn every_key_of_a_block_takes_effect() {
    let rows: Vec<(Value, Effect)> = vec![
        (json!({}), |_| ()),
        (json!({"proxy_port": 1, "inbound_capture_port": "2", "inbound_tunnel_port": 3}), |r| {
            (r.proxy_port, r.inbound_capture_port, r.inbound_tunnel_port) = (1, 2, 3);
        }),
        (json!({"inbound_interception_mode": "TPROXY"}), |r| r.inbound_interception_mode = InterceptionMode::Tproxy),
        (json!({"inbound_interception_mode": "REDIRECT"}), |_| ()),
        (json!({"inbound_tproxy_mark": 4294967295u32, "inbound_tproxy_route_table": 252}), |r| {
            (r.inbound_tproxy_mark, r.inbound_tproxy_route_table) = (u32::MAX, 252);
        }),
        (json!({"inbound_ports_include": "80,8000-8010"}), |r| {
            r.inbound_ports_include = Ports::List(vec![PortRange::one(80), PortRange { first: 8000, last: 8010 }]);
        }),
        (json!({"inbound_ports_include": ""}), |r| r.inbound_ports_include = ports(&[])),
        (json!({"inbound_ports_exclude": "15021,22"}), |r| {
            r.inbound_ports_exclude = ports(&[15021, 22, 15020, 15090]);
        }),
        (json!({"inbound_ports_exclude": []}), |r| r.inbound_ports_exclude = ports(&[15020, 15021, 15090])),
        (json!({"inbound_ports_exclude": "*"}), |r| r.inbound_ports_exclude = Ports::All),
        (json!({"outbound_ports_include": [443]}), |r| r.outbound_ports_include = ports(&[443])),
        (json!({"outbound_ports_exclude": [22]}), |r| r.outbound_ports_exclude = ports(&[22])),
        (json!({"outbound_ports_exclude": []}), |r| r.outbound_ports_exclude = ports(&[])),
        (json!({"outbound_ip_ranges_include": "10.0.0.1/8, fd00::1"}), |r| {
            r.outbound_ip_ranges_include = ranges(&["10.0.0.0/8", "fd00::1/128"]);
        }),
        (json!({"outbound_ip_ranges_exclude": "*"}), |r| r.outbound_ip_ranges_exclude = Ranges::All),
        (json!({"owner_groups_include": "javausers,7"}), |r| r.owner_groups_include = Groups::List(vec![202, 7])),
        (json!({"owner_groups_exclude": [7]}), |r| r.owner_groups_exclude = vec![7]),
        (json!({"owner_groups_exclude": "*"}), |r| r.owner_groups_include = Groups::List(vec![])),
        (json!({"owner_groups_include": [1], "owner_groups_exclude": "*"}), |r| {
            r.owner_groups_include = Groups::List(vec![1]);
        }),
        (json!({"reroute_virtual_interfaces": "net1", "exclude_interfaces": ["net2", "net3"]}), |r| {
            r.reroute_virtual_interfaces = vec!["net1".into()];
            r.exclude_interfaces = vec!["net2".into(), "net3".into()];
        }),
        (json!({"drop_invalid": true}), |r| r.drop_invalid = true),
        (json!({"dual_stack": true}), |_| ()),
        (json!({"enable_ipv6": true}), |r| r.ipv6 = Ipv6::On),
        (json!({"enable_ipv6": false}), |r| r.ipv6 = Ipv6::Off),
        (json!({"host_ipv4_loopback_cidr": "127.0.0.1/8"}), |r| {
            r.host_ipv4_loopback_cidr = "127.0.0.0/8".parse().expect("a CIDR");
        }),
    ];
    for (keys, effect) in rows {
        let mut expected = Redirect::default();
        effect(&mut expected);
        assert_eq!(block(keys.clone()).redirect(), expected, "{keys}");
    }
}

#[test]
fn an_invalid_value_is_rejected_with_its_path() {
    for (key, value) in [
        ("inbound_interception_mode", json!("redirect")),
        ("proxy_uid", json!("4294967295")),
        ("proxy_gid", json!(["staff"])),
        ("proxy_port", json!(0)),
        ("inbound_capture_port", json!(65536)),
        ("inbound_tunnel_port", json!("x")),
        ("inbound_tproxy_mark", json!(0)),
        ("inbound_tproxy_route_table", json!(254)),
        ("inbound_ports_include", json!([0])),
        ("inbound_ports_exclude", json!("http")),
        ("outbound_ports_include", json!("9-8")),
        ("outbound_ports_exclude", json!({})),
        ("outbound_ip_ranges_include", json!("10.0.0.0/33")),
        ("outbound_ip_ranges_exclude", json!(true)),
        ("owner_groups_include", json!("no-such-group")),
        ("owner_groups_exclude", json!(["no-such-group"])),
        ("reroute_virtual_interfaces", json!("a/b")),
        ("exclude_interfaces", json!("1234567890123456")),
        ("redirect_dns", json!("true")),
        ("capture_all_dns", json!(1)),
        ("dns_servers_v4", json!("fd00::1")),
        ("dns_servers_v6", json!("10.0.0.1")),
        ("drop_invalid", json!("yes")),
        ("dual_stack", json!("yes")),
        ("enable_ipv6", json!(0)),
        ("host_ipv4_loopback_cidr", json!("::1/128")),
        ("host_ipv4_loopback_cidr", json!("0.0.0.0/0")),
    ] {
        let msg = block(json!({ key: value })).error();
        assert!(msg.starts_with(&format!("chain[0].{key}: ")), "{msg}");
    }
}

#[test]
fn more_groups_than_fit_into_a_rule_are_rejected() {
    let groups = |n: u32| block(json!({"owner_groups_include": (0..n).collect::<Vec<_>>()}));
    assert_eq!(groups(64).redirect().owner_groups_include, Groups::List((0..64).collect()));
    assert_eq!(groups(65).error(), "chain[0].owner_groups_include: expected at most 64 groups, got 65");
}

#[test]
fn the_proxy_needs_a_uid_or_gid() {
    let by_nothing = block(json!({"proxy_uid": [], "proxy_gid": []})).proxy(|c| {
        (c.run_as_user, c.run_as_group) = (None, None);
    });
    assert!(by_nothing.error().starts_with("chain[0]: proxy_uid and proxy_gid are both empty"));
    let by_gid = block(json!({"proxy_uid": []})).proxy(|c| (c.run_as_user, c.run_as_group) = (None, None));
    assert_eq!((by_gid.redirect().proxy_uid, by_gid.redirect().proxy_gid), (vec![], vec![1337]));
}

#[test]
fn the_proxys_ids_are_those_of_its_container() {
    let of = |block_uid: Option<u32>, container: Option<i64>, pod: Option<i64>| {
        let keys = block_uid.map_or(json!({}), |uid| json!({"proxy_uid": uid, "proxy_gid": uid}));
        let scenario = block(keys).pod(|p| (p.run_as_user, p.run_as_group) = (pod, pod));
        let redirect = scenario.proxy(|c| (c.run_as_user, c.run_as_group) = (container, container)).redirect();
        assert_eq!(redirect.proxy_uid, redirect.proxy_gid);
        redirect.proxy_uid
    };
    assert_eq!(of(None, None, None), [1337]);
    assert_eq!(of(None, Some(1000659999), None), [1000659999]);
    assert_eq!(of(None, None, Some(8)), [8]);
    assert_eq!(of(None, Some(7), Some(8)), [7]);
    assert_eq!(of(None, Some(0), None), [1337]);
    assert_eq!(of(None, Some(0), Some(8)), [1337]);
    assert_eq!(of(Some(9), None, None), [9]);
    assert_eq!(of(Some(9), Some(7), None), [7]);
    assert_eq!(of(Some(9), Some(0), None), [9]);
    let msg = block(json!({})).proxy(|c| c.run_as_group = Some(-7)).error();
    assert!(msg.starts_with("runAsGroup of container istio-proxy of pod shop/cart-1: invalid value -7; "), "{msg}");
}

#[test]
fn the_proxys_variables_take_effect() {
    let plain = block(json!({}));
    assert_eq!(plain.clone().env("ISTIO_META_DNS_CAPTURE", "true").redirect().dns, DnsCapture::All);
    assert!(plain.clone().env("INVALID_DROP", "1").redirect().drop_invalid);
    assert_eq!(plain.clone().env("ISTIO_DUAL_STACK", "true").redirect(), Redirect::default());
    let set = block(json!({"redirect_dns": true, "drop_invalid": true}));
    let unset = set.env("ISTIO_META_DNS_CAPTURE", "false").env("INVALID_DROP", "nonsense").output();
    let redirect = unset.policy.redirect().expect("a redirection");
    assert_eq!((&redirect.dns, redirect.drop_invalid), (&DnsCapture::Off, false));
    assert_eq!(unset.notes.len(), 1);
    assert_eq!(unset.notes[0].severity, Severity::Warning);
    assert!(unset.notes[0].text.starts_with("INVALID_DROP of container istio-proxy: invalid boolean \"nonsense\""));
}

#[test]
fn dns_capture_depends_on_four_keys() {
    let servers = |v4: &[&str], v6: &[&str]| DnsCapture::Servers {
        v4: v4.iter().map(|ip| ip.parse().expect(ip)).collect(),
        v6: v6.iter().map(|ip| ip.parse().expect(ip)).collect(),
    };
    for (keys, dns, notes) in [
        (json!({}), DnsCapture::Off, 0),
        (json!({"redirect_dns": false, "capture_all_dns": true}), DnsCapture::Off, 0),
        (json!({"dns_servers_v4": "10.0.0.1"}), DnsCapture::Off, 0),
        (json!({"redirect_dns": true}), DnsCapture::All, 0),
        (json!({"redirect_dns": true, "capture_all_dns": true}), DnsCapture::All, 0),
        (json!({"redirect_dns": true, "dns_servers_v4": "10.0.0.1"}), servers(&["10.0.0.1"], &[]), 0),
        (json!({"redirect_dns": true, "dns_servers_v6": ["fd00::1"]}), servers(&[], &["fd00::1"]), 0),
        (
            json!({"redirect_dns": true, "capture_all_dns": false, "dns_servers_v4": "10.0.0.2,10.0.0.1,10.0.0.2"}),
            servers(&["10.0.0.2", "10.0.0.1"], &[]),
            0,
        ),
        (json!({"redirect_dns": true, "capture_all_dns": true, "dns_servers_v4": "10.0.0.1"}), DnsCapture::All, 0),
        (json!({"redirect_dns": true, "capture_all_dns": false}), DnsCapture::Off, 1),
        (json!({"redirect_dns": true, "dns_servers_v4": []}), DnsCapture::Off, 1),
    ] {
        let output = block(keys.clone()).output();
        assert_eq!(output.policy.redirect().expect("a redirection").dns, dns, "{keys}");
        assert_eq!(output.notes.len(), notes, "{keys}: {:?}", output.notes);
        assert!(output.notes.iter().all(|note| note.severity == Severity::Warning));
    }
}

#[test]
fn every_annotation_takes_effect() {
    const TRAFFIC: &str = "traffic.sidecar.istio.io";
    let rows: Vec<(String, &str, Effect)> = vec![
        ("sidecar.istio.io/interceptionMode".into(), "TPROXY", |r| {
            r.inbound_interception_mode = InterceptionMode::Tproxy
        }),
        ("sidecar.istio.io/interceptionMode".into(), "REDIRECT", |_| ()),
        (format!("{TRAFFIC}/includeOutboundIPRanges"), "", |r| r.outbound_ip_ranges_include = ranges(&[])),
        (format!("{TRAFFIC}/includeOutboundIPRanges"), "*", |_| ()),
        (format!("{TRAFFIC}/includeOutboundIPRanges"), "10.0.0.0/8", |r| {
            r.outbound_ip_ranges_include = ranges(&["10.0.0.0/8"])
        }),
        (format!("{TRAFFIC}/excludeOutboundIPRanges"), "10.0.0.1/8, 1.2.3.4", |r| {
            r.outbound_ip_ranges_exclude = ranges(&["10.0.0.0/8", "1.2.3.4/32"]);
        }),
        (format!("{TRAFFIC}/includeInboundPorts"), "", |r| r.inbound_ports_include = ports(&[])),
        (format!("{TRAFFIC}/includeInboundPorts"), "80, 443,", |r| r.inbound_ports_include = ports(&[80, 443])),
        (format!("{TRAFFIC}/excludeInboundPorts"), "", |_| ()),
        (format!("{TRAFFIC}/excludeInboundPorts"), "15090,80", |r| {
            r.inbound_ports_exclude = ports(&[15090, 80, 15020, 15021])
        }),
        (format!("{TRAFFIC}/excludeInboundPorts"), "*", |r| r.inbound_ports_exclude = Ports::All),
        (format!("{TRAFFIC}/includeOutboundPorts"), "*", |r| r.outbound_ports_include = Ports::All),
        (format!("{TRAFFIC}/excludeOutboundPorts"), "", |r| r.outbound_ports_exclude = ports(&[])),
        (format!("{TRAFFIC}/excludeOutboundPorts"), "53", |r| r.outbound_ports_exclude = ports(&[53])),
        (format!("{TRAFFIC}/excludeInterfaces"), "net1, net2", |r| {
            r.exclude_interfaces = vec!["net1".into(), "net2".into()]
        }),
        ("istio.io/reroute-virtual-interfaces".into(), "k6t-eth0", |r| {
            r.reroute_virtual_interfaces = vec!["k6t-eth0".into()]
        }),
        (format!("{TRAFFIC}/kubevirtInterfaces"), "k6t-eth0", |r| {
            r.reroute_virtual_interfaces = vec!["k6t-eth0".into()]
        }),
        ("status.sidecar.istio.io/port".into(), "nonsense", |_| ()),
    ];
    for (key, value, effect) in rows {
        let mut expected = Redirect::default();
        effect(&mut expected);
        assert_eq!(block(json!({})).annotated(&key, value).redirect(), expected, "{key}: {value:?}");
    }
}

#[test]
fn the_former_name_of_an_annotation_applies_only_alone() {
    let both = block(json!({})).annotated("traffic.sidecar.istio.io/kubevirtInterfaces", "not/read");
    let both = both.annotated("istio.io/reroute-virtual-interfaces", "");
    assert!(both.redirect().reroute_virtual_interfaces.is_empty());
}

#[test]
fn an_error_names_the_invalid_annotation_and_its_pod() {
    for key in Settings::ANNOTATIONS {
        for wrong in ["no such/thing", "80,no such/thing"] {
            let msg = block(json!({})).annotated(key, wrong).error();
            assert!(msg.starts_with(&format!("annotation {key:?} of pod shop/cart-1: ")), "{msg}");
        }
    }
    for mode in ["", "none", "redirect", "TPROXY,NONE"] {
        let msg = block(json!({})).annotated("sidecar.istio.io/interceptionMode", mode).error();
        assert!(msg.contains(&format!("{mode:?}")) && msg.contains("REDIRECT, TPROXY, NONE"), "{msg}");
    }
}

#[test]
fn each_layer_overrides_the_lower_ones_key_by_key() {
    let by_block = block(json!({
        "proxy_uid": [1, 2],
        "redirect_dns": false,
        "outbound_ports_exclude": [1],
        "exclude_interfaces": "a",
        "proxy_port": 1,
    }));
    assert_eq!(by_block.redirect().proxy_uid, [1337]);
    let by_proxy = by_block.env("ISTIO_META_DNS_CAPTURE", "true").proxy(|c| c.run_as_user = Some(3));
    let redirect = by_proxy.redirect();
    assert_eq!((redirect.proxy_uid, redirect.dns, redirect.proxy_port), (vec![3], DnsCapture::All, 1));
    let by_args = by_proxy.args(json!({"istio-redirect": {
        "proxy_uid": 4, "redirect_dns": false, "outbound_ports_exclude": "2", "exclude_interfaces": ["b"],
    }}));
    let redirect = by_args.redirect();
    assert_eq!((redirect.proxy_uid, redirect.dns), (vec![4], DnsCapture::Off));
    assert_eq!((redirect.outbound_ports_exclude, redirect.exclude_interfaces), (ports(&[2]), vec!["b".to_owned()]));
    let by_annotation = by_args.annotated("traffic.sidecar.istio.io/excludeOutboundPorts", "3").redirect();
    assert_eq!((by_annotation.outbound_ports_exclude, by_annotation.proxy_uid), (ports(&[3]), vec![4]));
    assert_eq!((by_annotation.exclude_interfaces, by_annotation.proxy_port), (vec!["b".to_owned()], 1));
}

#[test]
fn the_pods_argument_accepts_no_administrators_keys() {
    let with = |args| block(json!({})).args(json!({ "istio-redirect": args }));
    let msg = with(json!({"pod_overrides": true})).error();
    assert!(msg.starts_with("args.cni.istio-redirect.pod_overrides: unknown key"), "{msg}");
    let msg = with(json!({"proxy_port": 0})).error();
    assert!(msg.starts_with("args.cni.istio-redirect.proxy_port: "), "{msg}");
}

/// The pod's author writes the container istio-proxy, too.
#[test]
fn a_pinned_block_ignores_what_the_proxys_container_sets() {
    let container = |scenario: Scenario| {
        let scenario = scenario.env("ISTIO_META_DNS_CAPTURE", "true").env("INVALID_DROP", "true");
        scenario.proxy(|proxy| proxy.run_as_user = Some(1000))
    };
    let unpinned = container(block(json!({}))).redirect();
    assert_eq!((unpinned.proxy_uid, unpinned.dns, unpinned.drop_invalid), (vec![1000], DnsCapture::All, true));
    let pinned = container(block(json!({"pod_overrides": false})));
    assert_eq!(pinned.redirect(), Redirect::default());
    assert!(pinned.output().origins.settings.iter().all(|(_, source)| *source == SettingSource::Default));
    let both =
        json!([{"type": "istio-redirect", "pod_overrides": false}, {"type": "istio-redirect", "drop_invalid": true}]);
    let both = container(chain(both)).redirect();
    assert_eq!((both.proxy_uid, both.drop_invalid), (vec![1337], true));
}

#[test]
fn pinned_ids_that_are_not_the_proxys_are_a_warning() {
    let notes = |uid, gid| {
        let scenario = block(json!({"pod_overrides": false, "proxy_uid": "7,8"}));
        let scenario = scenario.proxy(|proxy| (proxy.run_as_user, proxy.run_as_group) = (uid, gid));
        assert_eq!(scenario.redirect().proxy_uid, [7, 8]);
        scenario.notes()
    };
    for (uid, gid) in [(Some(7), Some(9)), (Some(0), Some(1337)), (None, Some(9)), (Some(9), None), (None, None)] {
        assert_eq!(notes(uid, gid), Vec::<String>::new(), "{uid:?} {gid:?}");
    }
    let wanted = "Warning: chain[0]: pod_overrides is false, so runAsUser 9 and runAsGroup 10 of container istio-proxy \
                  of pod shop/cart-1 do not count as the proxy's: its own traffic returns to it; add one of \
                  them to proxy_uid or proxy_gid";
    assert_eq!(notes(Some(9), Some(10)), [wanted]);
}
