//! The veth pair between the two network namespaces, their addresses and routes.

use super::places::OUTSIDE;
use super::{Families, Family, GATEWAY, POD, place::Place};
use std::io::Write;
use std::process::{Command, Stdio};

pub(super) fn join(pod: &Place, outside: &Place, families: Families) {
    let veth = format!("link add name eth0 netns {} type veth peer name eth0 netns {}", pod.name(), outside.name());
    ip(&[], &[veth]);
    let up = ["link set lo up".to_owned(), "link set eth0 up".to_owned()];
    let mut in_pod = up.to_vec();
    let mut in_outside = up.to_vec();
    for &family in families.each() {
        // Without duplicate address detection, an IPv6 address is usable immediately.
        let (near, alone, dad) = match family {
            Family::V4 => (24, 32, ""),
            Family::V6 => (64, 128, "nodad"),
        };
        in_pod.push(format!("addr add {}/{near} dev eth0 {dad}", POD.ip(family)));
        in_pod.push(format!("route add default via {}", GATEWAY.ip(family)));
        in_outside.push(format!("addr add {}/{near} dev eth0 {dad}", GATEWAY.ip(family)));
        in_outside.extend(OUTSIDE.map(|host| format!("addr add {}/{alone} dev lo {dad}", host.ip(family))));
    }
    ip(&["-n", outside.name()], &in_outside);
    ip(&["-n", pod.name()], &in_pod);
}

/// Runs `ip` with these commands, which must succeed.
pub(super) fn ip(options: &[&str], commands: &[String]) {
    let mut child = Command::new("ip")
        .args(options)
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .expect("run ip (package iproute2)");
    let mut stdin = child.stdin.take().expect("it is piped");
    stdin.write_all(commands.join("\n").as_bytes()).expect("write to ip");
    drop(stdin);
    assert!(child.wait().expect("wait for ip").success(), "ip {options:?}: {commands:#?}");
}
