//! Rules of nobody that is known: before, between and behind ours, in other chains and tables.

use crate::pod::Pod;

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

/// Puts foreign rules of both families into a pod.
pub(crate) fn load(pod: &Pod) {
    for restore in ["iptables-restore", "ip6tables-restore"] {
        pod.tool(restore, &["--noflush"], RULES);
    }
}
