//! Foreign rules before, between and after detour's rules, and in other netfilter chains and tables.

use crate::attachment::{Facts, Slot};
use crate::kernel::Kernel;
use crate::node::on_a_node;
use crate::pod::Pod;
use std::collections::BTreeMap;

const RULES: &str = "*filter
:OTHERS - [0:0]
-A OUTPUT -j OTHERS
-A OTHERS -p tcp -m tcp --dport 25 -j DROP
COMMIT
*nat
:MINE - [0:0]
-A PREROUTING -p tcp -m tcp --dport 7 -j RETURN
-A OUTPUT -m owner --uid-owner 2000 -j RETURN
-A OUTPUT -p tcp -m comment --comment \"not ours\" -j MINE
-A MINE -p tcp -m tcp --dport 9 -j ACCEPT
COMMIT
*raw
-A OUTPUT -p udp -m udp --dport 9 -j NOTRACK
COMMIT
*mangle
-A POSTROUTING -m mark --mark 0x7 -j ACCEPT
COMMIT
";

/// Adds foreign rules of both families to a pod.
pub(crate) fn load(pod: &Pod) {
    for restore in ["iptables-restore", "ip6tables-restore"] {
        pod.tool(restore, &["--noflush"], RULES);
    }
}

/// Redirects a pod like istio-init and istio-cni.
pub(crate) fn redirect(pod: &Pod) {
    pod.tool("iptables-restore", &["--noflush"], include_str!("../golden/istio-dns.v4.rules"));
    pod.tool("ip6tables-restore", &["--noflush"], include_str!("../golden/istio-dns.v6.rules"));
}

/// Rules that administrators insert before, after and between detour's jumps.
const LATER: [&str; 6] = [
    "-t nat -I OUTPUT 1 -m owner --uid-owner 3000 -j RETURN",
    "-t nat -A OUTPUT -p tcp -m tcp --dport 11 -j ACCEPT",
    "-t nat -I OUTPUT 3 -p tcp -m tcp --dport 12 -j MINE",
    "-t nat -I PREROUTING 1 -p tcp -m tcp --dport 13 -j ACCEPT",
    "-t raw -I OUTPUT 2 -p udp -m udp --dport 14 -j NOTRACK",
    "-t filter -A OTHERS -p tcp -m tcp --dport 15 -j DROP",
];

fn insert_later(pod: &Pod) {
    for program in ["iptables", "ip6tables"] {
        for arguments in LATER {
            pod.tool(program, &arguments.split(' ').collect::<Vec<_>>(), "");
        }
    }
}

/// Returns the foreign rules of each netfilter chain, in their order.
fn foreign(kernel: &Kernel, before: &Kernel) -> BTreeMap<String, Vec<String>> {
    let ours = |rule: &String| rule.contains("-j ISTIO_");
    let chains = kernel.rules.iter().filter(|(chain, _)| before.rules.contains_key(*chain));
    chains.map(|(chain, rules)| (chain.clone(), rules.iter().filter(|r| !ours(r)).cloned().collect())).collect()
}

#[test]
fn foreign_rules_do_not_fail_check_and_keep_their_order() {
    let story = Slot::Detour.with(Facts::DnsCaptured);
    on_a_node(|| {
        let pod = Pod::new();
        load(&pod);
        pod.add(story).done();
        insert_later(&pod);
        let inserted = Kernel::of(&pod);
        pod.check(story).done();
        Kernel::of(&pod).assert_is(&inserted, "CHECK changes nothing");
        let expected = foreign(&inserted, &inserted);
        let theirs = [
            "OUTPUT -m owner --uid-owner 3000 -j RETURN",
            "OUTPUT -m owner --uid-owner 2000 -j RETURN",
            "OUTPUT -p tcp -m tcp --dport 12 -j MINE",
            "OUTPUT -p tcp -m comment --comment \"not ours\" -j MINE",
            "OUTPUT -p tcp -m tcp --dport 11 -j ACCEPT",
        ];
        assert_eq!(expected["ip nat OUTPUT"], theirs);
        pod.add(story).done();
        assert_eq!(foreign(&Kernel::of(&pod), &inserted), expected);
        pod.check(story).done();
        pod.add(Slot::Detour.with(Facts::Annotated)).done();
        pod.del(story).done();
        let left = Kernel::of(&pod);
        let ours = |(chain, _): &(String, Vec<String>)| chain.contains("ISTIO_");
        assert_eq!(left.rules, expected.into_iter().filter(|entry| !ours(entry)).collect());
    });
}
