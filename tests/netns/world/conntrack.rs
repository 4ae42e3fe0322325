//! A network namespace's connection tracking table.

use std::net::IpAddr;

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
pub(super) fn read(pid: u32) -> Vec<Entry> {
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
