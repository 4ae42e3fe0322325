//! Changes to detour's rules by other programs: CHECK names each, and ADD repairs it. `src/fuzzing` has every kind of
//! change to any rules of any policy.

use crate::attachment::{Attachment, Facts, Slot};
use crate::kernel::Kernel;
use crate::node::on_a_node;
use crate::pod::Pod;

/// A change as a command of a shell, and texts with which CHECK reports it.
type Damage = (&'static str, &'static [&'static str]);

/// Makes one change after another in a pod; checks each time that CHECK detects it and ADD repairs it.
fn are_repaired(dialect: &str, attachments: &[Attachment], damages: &[Damage]) {
    on_a_node(|| {
        let pod = Pod::new();
        let before = Kernel::of(&pod);
        let call = |verb, attachment: &Attachment| pod.call_in(dialect, verb, *attachment);
        attachments.iter().for_each(|attachment| call("ADD", attachment).done());
        let (right, last) = (Kernel::of(&pod), attachments.last().expect("one"));
        for (damage, reports) in damages {
            pod.tool("sh", &["-ec", damage], "");
            let text = call("CHECK", last).refused(103);
            for report in *reports {
                assert!(text.contains(report), "{damage}: {report:?} is not in {text:?}");
            }
            call("ADD", last).done();
            Kernel::of(&pod).assert_is(&right, damage);
            call("CHECK", last).done();
        }
        attachments.iter().for_each(|attachment| call("DEL", attachment).done());
        Kernel::of(&pod).assert_is(&before, "after DEL");
    });
}

#[test]
fn changes_to_two_attachments_in_format_iptables_are_repaired() {
    let attachments = [Slot::IstioCni.with(Facts::Annotated), Slot::ExcludeDns.with(Facts::Annotated)];
    let damages: [Damage; 11] = [
        ("iptables -t nat -D OUTPUT -j ISTIO_OUTPUT", &["missing: ip nat -A OUTPUT -j ISTIO_OUTPUT"]),
        ("ip6tables -t raw -A PREROUTING -j ISTIO_INBOUND", &["extra: ip6 raw -A PREROUTING -j ISTIO_INBOUND"]),
        (
            "iptables -t nat -D OUTPUT -j ISTIO_OUTPUT; iptables -t nat -I OUTPUT -p tcp --dport 1 -j ISTIO_OUTPUT",
            &[
                "missing: ip nat -A OUTPUT -j ISTIO_OUTPUT",
                "extra: ip nat -A OUTPUT -p tcp -m tcp --dport 1 -j ISTIO_OUTPUT",
            ],
        ),
        (
            "ip6tables -t nat -D ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001",
            &["missing: ip6 nat -A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001"],
        ),
        (
            "iptables -t nat -A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001",
            &["extra: ip nat -A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001"],
        ),
        (
            "ip6tables -t nat -R ISTIO_OUTPUT 3 -s 2001:db8::1/128 -j RETURN",
            &["missing: ip6 nat -A ISTIO_OUTPUT ", "extra: ip6 nat -A ISTIO_OUTPUT -s 2001:db8::1/128 -j RETURN"],
        ),
        (
            "iptables -t raw -I ISTIO_OUTPUT_DNS 2 -s 192.0.2.1/32 -j RETURN",
            &["extra: ip raw -A ISTIO_OUTPUT_DNS -s 192.0.2.1/32 -j RETURN"],
        ),
        (
            "iptables -t nat -I ISTIO_INBOUND -p tcp --tcp-flags SYN SYN -m comment --comment strange -j ACCEPT",
            &["extra: ip nat -A ISTIO_INBOUND (a foreign rule"],
        ),
        (
            "iptables -t nat -F ISTIO_OUTPUT_DNS",
            &[
                "missing: ip nat -A ISTIO_OUTPUT_DNS -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053",
                "missing: ip nat -A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -j REDIRECT --to-ports 15053",
            ],
        ),
        (
            "rule='ISTIO_OUTPUT_DNS -p tcp -m tcp --dport 53 -j REDIRECT --to-ports 15053'
            ip6tables -t nat -D $rule; ip6tables -t nat -A $rule",
            &["moved: ip6 nat -A ISTIO_OUTPUT_DNS "],
        ),
        (
            "nft flush chain inet detour-exclusions DETOUR_OUTPUT",
            &["missing: inet detour-exclusions DETOUR_OUTPUT meta skuid 1337 counter goto DETOUR_DIRECT"],
        ),
    ];
    are_repaired("iptables", &attachments, &damages);
}

#[test]
fn changes_in_format_nftables_are_repaired() {
    let damages: [Damage; 4] = [
        (
            "nft flush chain inet detour-nat ISTIO_REDIRECT",
            &["missing: inet detour-nat ISTIO_REDIRECT meta l4proto tcp counter redirect to :15001"],
        ),
        (
            "nft insert rule inet detour-raw ISTIO_INBOUND meta l4proto icmp counter drop",
            &["extra: inet detour-raw ISTIO_INBOUND "],
        ),
        ("nft add rule inet detour-nat OUTPUT counter accept", &["extra: inet detour-nat OUTPUT counter accept"]),
        ("nft delete table inet detour-raw", &["missing: inet detour-raw "]),
    ];
    are_repaired("nftables", &[Slot::Detour.with(Facts::DnsCaptured)], &damages);
}

/// Policy rules and routes of both families, in both dialects.
#[test]
fn changes_to_the_routing_of_tproxy_are_repaired() {
    const ROUTE: &[&str] = &["missing: IPv4 route local default dev lo table 133"];
    const ROUTE6: &[&str] = &["missing: IPv6 route local default dev lo table 133"];
    let damages: [Damage; 10] = [
        ("ip route flush table 133", ROUTE),
        ("ip -6 route flush table 133", ROUTE6),
        ("ip route replace unreachable default table 133", ROUTE),
        ("ip route replace default dev eth0 table 133", ROUTE),
        ("ip -6 route replace unreachable default table 133", ROUTE6),
        ("ip -6 route replace default dev eth0 table 133", ROUTE6),
        ("ip -6 route add unreachable default table 133 metric 10", ROUTE6),
        ("ip route add unreachable default table 133 tos 0x10", ROUTE),
        ("ip rule del table 133", &["missing: IPv4 policy rule fwmark 0x539 lookup 133"]),
        ("ip -6 rule del table 133", &["missing: IPv6 policy rule fwmark 0x539 lookup 133"]),
    ];
    for dialect in ["iptables", "nftables"] {
        are_repaired(dialect, &[Slot::Detour.with(Facts::Tproxy)], &damages);
    }
}

/// DEL removes the route that ADD added, and no other route of the table.
#[test]
fn del_leaves_a_foreign_route_in_the_table_of_tproxy() {
    let attachment = Slot::Detour.with(Facts::Tproxy);
    on_a_node(|| {
        let pod = Pod::new();
        pod.add(attachment).done();
        let foreign = ["-6", "route", "add", "unreachable", "default", "table", "133", "metric", "10"];
        pod.tool("ip", &foreign, "");
        pod.del(attachment).done();
        let left = pod.tool("ip", &["-6", "route", "show", "table", "133"], "");
        assert!(left.starts_with("unreachable default dev lo metric 10 ") && left.lines().count() == 1, "{left}");
    });
}

/// A pod can disable IPv6 after ADD. Its IPv4 traffic still needs the IPv4 routing.
#[test]
fn disabling_ipv6_leaves_the_ipv4_routing_of_tproxy() {
    let attachment = Slot::Detour.with(Facts::Tproxy);
    on_a_node(|| {
        for dialect in ["iptables", "nftables"] {
            let pod = Pod::new();
            let call = |verb| pod.call_in(dialect, verb, attachment);
            call("ADD").done();
            pod.tool("sysctl", &["-qw", "net.ipv6.conf.all.disable_ipv6=1"], "");
            let before = Kernel::of(&pod);
            for verb in ["CHECK", "ADD", "CHECK"] {
                call(verb).done();
                Kernel::of(&pod).assert_is(&before, &format!("{dialect}: {verb}"));
            }
            call("DEL").done();
            assert!(!Kernel::of(&pod).has_rules());
        }
    });
}

/// Undoing a failed ADD removes only what that ADD added.
#[test]
fn a_failed_add_keeps_the_routing_of_an_earlier_one() {
    let attachment = Slot::Detour.with(Facts::Tproxy);
    let damages = [
        ("sysctl", "-qw net.ipv6.conf.lo.disable_ipv6=1", "sysctl", "-qw net.ipv6.conf.lo.disable_ipv6=0"),
        ("ip", "link set lo down", "ip", "link set lo up"),
    ];
    let words = |text: &'static str| text.split(' ').collect::<Vec<_>>();
    on_a_node(|| {
        for (program, damage, repair_program, repair) in damages {
            let pod = Pod::new();
            pod.add(attachment).done();
            let right = Kernel::of(&pod);
            pod.tool(program, &words(damage), "");
            let before = Kernel::of(&pod);
            pod.check(attachment).refused(103);
            let error = pod.add(attachment).refused(102);
            assert!(error.contains("disable IPv6 on lo") || error.contains("check that lo is up"), "{error}");
            Kernel::of(&pod).assert_is(&before, damage);
            pod.tool(repair_program, &words(repair), "");
            pod.add(attachment).done();
            pod.check(attachment).done();
            assert!(Kernel::of(&pod).has_same_rules(&right), "{damage}");
            pod.del(attachment).done();
            assert!(!Kernel::of(&pod).has_rules());
        }
    });
}
