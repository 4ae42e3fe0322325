//! Messages and connections: where they arrive, and what the kernel tracks of them.

use super::SIDECAR;
use crate::support::background::Running;
use crate::support::new_netns::in_netns;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use serde::Deserialize;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;
use std::process::{Child, ChildStdout};
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// At the sidecar. UDP has no original destination.
    Sidecar { port: u16, original_destination: Option<SocketAddr> },
    /// At its destination, or at least not at the sidecar.
    Direct { at: SocketAddr, from: IpAddr },
    /// Nowhere: `timeout`, `refused`, …
    Lost(String),
}

/// The lines that `probe` prints.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Answer {
        label: String,
        listener: u16,
        local: SocketAddr,
        peer: SocketAddr,
        original_destination: Option<SocketAddr>,
    },
    Lost {
        error: String,
    },
}

impl Arrival {
    /// Returns the arrival of a TCP connection at the sidecar's `port`, with the original destination `to`.
    pub(crate) fn captured(port: u16, to: SocketAddr) -> Self {
        Self::Sidecar { port, original_destination: Some(to) }
    }

    /// Returns the arrival of a datagram at the sidecar's `port`.
    pub(crate) fn captured_datagram(port: u16) -> Self {
        Self::Sidecar { port, original_destination: None }
    }

    /// Returns the arrival at the destination `at`, from the address of `from`.
    pub(crate) fn direct(at: SocketAddr, from: IpAddr) -> Self {
        Self::Direct { at, from }
    }

    pub(crate) fn parse(answer: &[u8]) -> serde_json::Result<Self> {
        Ok(match serde_json::from_slice(answer)? {
            Line::Answer { label, listener, original_destination, .. }
                if label == "pod" && SIDECAR.contains(&listener) =>
            {
                Self::Sidecar { port: listener, original_destination }
            }
            Line::Answer { local, peer, .. } => Self::Direct { at: local, from: peer.ip() },
            Line::Lost { error } => Self::Lost(error),
        })
    }
}

/// Closed when it is dropped.
pub(crate) struct Connection {
    process: Running,
    answers: BufReader<ChildStdout>,
}

impl Connection {
    /// Takes over a `probe hold` whose stdin and stdout are pipes.
    pub(super) fn new(mut process: Child) -> Self {
        let answers = BufReader::new(process.stdout.take().expect("it is piped"));
        Self { process: Running(process), answers }
    }

    /// Sends a message, and returns where it arrived.
    ///
    /// # Panics
    /// The connection is closed.
    #[track_caller]
    pub(crate) fn send(&mut self) -> Arrival {
        self.process.0.stdin.as_mut().expect("it is piped").write_all(b"\n").expect("probe is there");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("read from probe");
        Arrival::parse(answer.as_bytes()).unwrap_or_else(|error| panic!("the connection is gone: {error}: {answer:?}"))
    }
}

/// A tracked connection, described by its first packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// `tcp`, `udp`, …
    pub(crate) protocol: String,
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
    pub(crate) source_port: u16,
    pub(crate) destination_port: u16,
    /// The zone of the original direction.
    pub(crate) zone: u16,
    /// The zone of the reply direction.
    pub(crate) reply_zone: u16,
    /// Whether a packet of the reply direction was seen.
    pub(crate) replied: bool,
}

/// Reads the table of the network namespace of process `pid`.
pub(super) fn conntrack(pid: u32) -> Vec<Entry> {
    let path = format!("/proc/{pid}/net/nf_conntrack");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {path}: {e}"));
    text.lines().filter_map(parse).collect()
}

/// Parses a line of `nf_conntrack`: `ipv4 2 udp 17 29 src=… dst=… sport=… dport=… [UNREPLIED] src=… … zone=1 use=2`.
/// Returns `None` for protocols without ports.
fn parse(line: &str) -> Option<Entry> {
    let first = |key: &str| line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
    let zone = |key: &str| first(key).or_else(|| first("zone")).map_or(0, |z| z.parse().expect("a zone"));
    Some(Entry {
        protocol: line.split_whitespace().nth(2)?.to_owned(),
        source: first("src")?.parse().expect("an address"),
        destination: first("dst")?.parse().expect("an address"),
        source_port: first("sport")?.parse().expect("a port"),
        destination_port: first("dport")?.parse().expect("a port"),
        zone: zone("zone-orig"),
        reply_zone: zone("zone-reply"),
        replied: !line.contains("[UNREPLIED]"),
    })
}

#[test]
fn both_forms_of_a_zone_are_parsed() {
    let line = "ipv4     2 udp      17 29 src=10.88.0.2 dst=10.96.0.10 sport=40000 dport=53 [UNREPLIED] \
                src=10.96.0.10 dst=10.88.0.2 sport=53 dport=40000 mark=0 zone-orig=2 use=2";
    let entry = parse(line).unwrap();
    assert_eq!((entry.zone, entry.reply_zone, entry.replied), (2, 0, false));
    assert_eq!((entry.source_port, entry.destination_port), (40000, 53));
    let entry = parse(&line.replace("[UNREPLIED]", "").replace("zone-orig=2", "zone=1")).unwrap();
    assert_eq!((entry.zone, entry.reply_zone, entry.replied), (1, 1, true));
}

/// Returns whether `to` answers an echo request from a network namespace.
pub(super) fn is_answered(netns: &Path, to: IpAddr) -> bool {
    let (family, protocol, kind) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp, 8),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6, 128),
    };
    in_netns(netns, || {
        // For both families (icmp(7)). The kernel fills in the identifier and the checksum.
        std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0").expect("writable");
        let socket = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, protocol).expect("a socket for ICMP");
        let socket = UdpSocket::from(socket);
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        let sent = socket.send_to(&[kind, 0, 0, 0, 0, 0, 0, 1], (to, 0));
        sent.is_ok() && socket.recv(&mut [0; 64]).is_ok()
    })
}
