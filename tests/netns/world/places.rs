//! The addresses and ports of every world, and its listeners.

use super::place::Place;
use super::{Families, Family};
use crate::support::directory;
use std::cell::Cell;
use std::fs;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// An IPv4 and an IPv6 address of the same host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Host {
    pub(super) v4: &'static str,
    pub(super) v6: &'static str,
}

impl Host {
    pub(crate) fn ip(self, family: Family) -> IpAddr {
        let text = match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        };
        text.parse().expect("the addresses below are well-formed")
    }

    pub(crate) fn at(self, family: Family, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip(family), port)
    }
}

pub(crate) const POD: Host = Host { v4: "10.88.0.2", v6: "fd88::2" };
/// The outside end of the pod's link.
pub(crate) const GATEWAY: Host = Host { v4: "10.88.0.1", v6: "fd88::1" };
/// The cluster's resolver.
pub(crate) const RESOLVER: Host = Host { v4: "10.96.0.10", v6: "fd96::a" };
/// Another resolver.
pub(crate) const OTHER_RESOLVER: Host = Host { v4: "10.96.0.11", v6: "fd96::b" };
pub(crate) const SERVER: Host = Host { v4: "198.51.100.20", v6: "2001:db8:20::1" };
/// A host in [`EXCLUDED_RANGES`]; it serves DNS too.
pub(crate) const VAULT: Host = Host { v4: "203.0.113.30", v6: "2001:db8:30::1" };
/// The ranges that tests exclude.
pub(crate) const EXCLUDED_RANGES: &str = "203.0.113.0/24,2001:db8:30::/64";

pub(crate) const OUTBOUND: u16 = 15001;
pub(crate) const INBOUND: u16 = 15006;
pub(crate) const DNS_PROXY: u16 = 15053;
/// The ports on which the sidecar receives redirected traffic.
pub(crate) const SIDECAR: [u16; 3] = [OUTBOUND, INBOUND, DNS_PROXY];

pub(crate) const DNS: u16 = 53;
pub(crate) const HTTPS: u16 = 443;
/// The port of the application in the pod.
pub(crate) const APP: u16 = 8080;
/// HBONE: never captured.
pub(crate) const TUNNEL: u16 = 15008;
/// The sidecar's own ports, which Istio never captures inbound (the first is not captured outbound either).
pub(crate) const STATUS: [u16; 3] = [15020, 15021, 15090];
/// A UDP service that is not DNS.
pub(crate) const SYSLOG: u16 = 514;

/// Outside addresses besides the gateway's.
pub(super) const OUTSIDE: [Host; 4] = [RESOLVER, OTHER_RESOLVER, SERVER, VAULT];

/// The listeners in the pod. The sidecar's resolver listens on loopback only, as Istio's does.
pub(super) fn pod_endpoints(families: Families) -> Vec<String> {
    let mut endpoints = Vec::new();
    for family in families.each() {
        let (any, loopback) = match family {
            Family::V4 => ("0.0.0.0", "127.0.0.1"),
            Family::V6 => ("[::]", "[::1]"),
        };
        let everywhere = [OUTBOUND, INBOUND, APP, TUNNEL].into_iter().chain(STATUS);
        endpoints.extend(everywhere.map(|port| format!("tcp:{any}:{port}")));
        endpoints.push(format!("tcp:{loopback}:{DNS_PROXY}"));
        endpoints.push(format!("udp:{loopback}:{DNS_PROXY}"));
    }
    endpoints
}

/// The listeners outside: the same TCP ports on all hosts, and DNS on the resolvers.
pub(super) fn outside_endpoints(families: Families) -> Vec<String> {
    let mut endpoints = Vec::new();
    for &family in families.each() {
        let any = if family == Family::V4 { "0.0.0.0" } else { "[::]" };
        endpoints.extend([DNS, HTTPS, STATUS[0]].map(|port| format!("tcp:{any}:{port}")));
        endpoints.extend([RESOLVER, OTHER_RESOLVER, VAULT].map(|host| format!("udp:{}", host.at(family, DNS))));
        endpoints.push(format!("udp:{}", SERVER.at(family, SYSLOG)));
    }
    endpoints
}

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

pub(super) struct Directory {
    path: directory::Directory,
    written: Cell<usize>,
}

impl Directory {
    pub(super) fn new(name: &str) -> Self {
        Self { path: directory::Directory::new(name), written: Cell::new(0) }
    }

    /// Writes each text to its own file in a new subdirectory.
    pub(super) fn write(&self, texts: &[&str]) -> PathBuf {
        let number = self.written.replace(self.written.get() + 1);
        let below = self.path.join(number.to_string());
        fs::create_dir(&below).expect("make a directory");
        for (number, text) in texts.iter().enumerate() {
            fs::write(below.join(format!("{number}.yaml")), text).expect("write a file");
        }
        below
    }
}
