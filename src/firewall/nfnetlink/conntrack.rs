//! The connections that the kernel tracks in a network namespace: listed and forgotten
//! (linux/netfilter/nfnetlink_conntrack.h).

use super::{NfError, NfSocket};
use crate::netlink::DumpLimit;
use crate::netlink::attributes::{Attributes, find, parse};
use nix::errno::Errno;
use std::net::{IpAddr, SocketAddr};

const NFNL_SUBSYS_CTNETLINK: u16 = 1;
const IPCTNL_MSG_CT_GET: u16 = 1;
const IPCTNL_MSG_CT_DELETE: u16 = 2;
/// `enum ctattr_type`.
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_ZONE: u16 = 18;
/// `enum ctattr_tuple`: addresses; protocol with ports; the zone, if only this direction has one.
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_TUPLE_ZONE: u16 = 3;
/// `IPS_SEEN_REPLY`.
const SEEN_REPLY: u32 = 1 << 1;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// A tracked connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// The IP protocol's number.
    pub protocol: u8,
    /// The source of the first packet.
    pub source: SocketAddr,
    /// The original destination of the first packet.
    pub destination: SocketAddr,
    /// The source of the replies: the destination after NAT.
    pub replies_from: SocketAddr,
    /// The zone of the original direction; 0 if none is set.
    pub zone: u16,
    /// Whether a reply was seen.
    pub replied: bool,
}

impl NfSocket {
    /// Lists the tracked connections that have ports and that `selected` accepts. The kernel limits their number by
    /// `net.netfilter.nf_conntrack_max`.
    ///
    /// # Errors
    /// The kernel has no connection tracking, or the socket fails.
    pub fn connections(&mut self, selected: impl Fn(&Connection) -> bool) -> Result<Vec<Connection>, NfError> {
        let kind = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET;
        self.allow(DumpLimit::UNLIMITED);
        let mut found = Vec::new();
        // If the table changes during the dump, only the added or removed connections may be missing.
        match self.dump_kind(kind, 0, &Attributes::new(), |_, body| found.extend(connection(body).filter(&selected))) {
            Ok(()) | Err(NfError::Changed) => Ok(found),
            Err(error) => Err(error),
        }
    }

    /// Removes a connection from connection tracking, so that its next packet starts a new one. A missing connection is
    /// no error.
    ///
    /// # Errors
    /// The kernel refuses the request, or the socket fails.
    pub fn forget(&mut self, connection: &Connection) -> Result<(), NfError> {
        let Connection { protocol, source, destination, zone, .. } = connection;
        let family = if source.is_ipv4() { AF_INET } else { AF_INET6 };
        let attributes = Attributes::of(|list| {
            list.nested(CTA_TUPLE_ORIG, |list| tuple(list, *protocol, *source, *destination))
                .bytes(CTA_ZONE, &zone.to_be_bytes())
        });
        match self.request(NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE, family, &attributes) {
            Err(NfError::Socket(Errno::ENOENT)) => Ok(()),
            other => other,
        }
    }
}

/// Appends the attributes of a tuple; the inverse of [`ends`].
fn tuple(list: &mut Attributes, protocol: u8, source: SocketAddr, destination: SocketAddr) -> &mut Attributes {
    list.nested(CTA_TUPLE_IP, |list| address(address(list, source, 1, 3), destination, 2, 4)).nested(
        CTA_TUPLE_PROTO,
        |list| {
            let list = list.bytes(1, &[protocol]).bytes(2, &source.port().to_be_bytes());
            list.bytes(3, &destination.port().to_be_bytes())
        },
    )
}

/// Appends the address of one end, whose attribute type depends on the family.
fn address(list: &mut Attributes, end: SocketAddr, v4: u16, v6: u16) -> &mut Attributes {
    match end.ip() {
        IpAddr::V4(address) => list.bytes(v4, &address.octets()),
        IpAddr::V6(address) => list.bytes(v6, &address.octets()),
    }
}

/// Parses a tracked connection; `None` if it has no ports.
fn connection(body: &[u8]) -> Option<Connection> {
    let (original, reply) = (find(body, CTA_TUPLE_ORIG)?, find(body, CTA_TUPLE_REPLY)?);
    let (source, destination, protocol) = ends(original)?;
    let (answers, ..) = ends(reply)?;
    let zone = find(original, CTA_TUPLE_ZONE).or_else(|| find(body, CTA_ZONE));
    let status = find(body, CTA_STATUS).and_then(|value| value.try_into().ok()).map_or(0, u32::from_be_bytes);
    let zone = zone.and_then(|value| value.try_into().ok()).map_or(0, u16::from_be_bytes);
    Some(Connection { protocol, source, destination, replies_from: answers, zone, replied: status & SEEN_REPLY != 0 })
}

/// Returns source, destination and protocol of a tuple.
fn ends(tuple: &[u8]) -> Option<(SocketAddr, SocketAddr, u8)> {
    let (addresses, protocol) = (find(tuple, CTA_TUPLE_IP)?, find(tuple, CTA_TUPLE_PROTO)?);
    // `CTA_IP_V4_SRC`, `…_DST`, `CTA_IP_V6_SRC`, `…_DST` are 1 to 4; only those of one family are present.
    let address = |v4: u16, v6: u16| -> Option<IpAddr> {
        parse(addresses).find_map(|(kind, value)| match kind {
            kind if kind == v4 => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
            kind if kind == v6 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
            _ => None,
        })
    };
    // `CTA_PROTO_NUM`, `…_SRC_PORT`, `…_DST_PORT`.
    let port = |kind| find(protocol, kind)?.try_into().ok().map(u16::from_be_bytes);
    let number = *find(protocol, 1)?.first()?;
    let source = SocketAddr::new(address(1, 3)?, port(2)?);
    Some((source, SocketAddr::new(address(2, 4)?, port(3)?), number))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the body of a message with the tuples of both directions; `zone` is that of the first one.
    fn body(v6: bool, ends: [(&[u8], u16); 4], zone: Option<u16>) -> Attributes {
        let (from, to) = if v6 { (3, 4) } else { (1, 2) };
        let tuple = |list: &mut Attributes, source: (&[u8], u16), destination: (&[u8], u16)| {
            list.nested(CTA_TUPLE_IP, |list| list.bytes(from, source.0).bytes(to, destination.0)).nested(
                CTA_TUPLE_PROTO,
                |list| {
                    let list = list.bytes(1, &[6]).bytes(2, &source.1.to_be_bytes());
                    list.bytes(3, &destination.1.to_be_bytes())
                },
            );
        };
        Attributes::of(|list| {
            list.nested(CTA_TUPLE_ORIG, |list| {
                tuple(list, ends[0], ends[1]);
                match zone {
                    Some(zone) => list.bytes(CTA_TUPLE_ZONE, &zone.to_be_bytes()),
                    None => list,
                }
            });
            list.nested(CTA_TUPLE_REPLY, |list| {
                tuple(list, ends[2], ends[3]);
                list
            })
        })
    }

    #[test]
    fn encoded_tuples_are_parsed_back() {
        for (source, destination) in [("10.0.0.2:4000", "192.0.2.1:53"), ("[fd00::2]:4000", "[2001:db8::1]:53")] {
            let ends_of = (source.parse().expect("an address"), destination.parse().expect("an address"));
            let written = Attributes::of(|list| tuple(list, 17, ends_of.0, ends_of.1));
            assert_eq!(ends(written.as_bytes()), Some((ends_of.0, ends_of.1, 17)));
        }
    }

    #[test]
    fn replies_of_a_redirected_connection_have_another_source() {
        let (pod, far, own) = ([10, 0, 0, 2], [192, 0, 2, 1], [127, 0, 0, 1]);
        let mut body = body(false, [(&pod, 4000), (&far, 80), (&own, 15001), (&pod, 4000)], Some(2));
        body.be32(CTA_STATUS, SEEN_REPLY);
        let expected = Connection {
            protocol: 6,
            source: "10.0.0.2:4000".parse().expect("an address"),
            destination: "192.0.2.1:80".parse().expect("an address"),
            replies_from: "127.0.0.1:15001".parse().expect("an address"),
            zone: 2,
            replied: true,
        };
        assert_eq!(connection(body.as_bytes()), Some(expected));
    }

    #[test]
    fn ipv6_connections_are_parsed_and_truncated_ones_are_ignored() {
        let (pod, far) = ([1; 16], [2; 16]);
        let mut body = body(true, [(&pod, 1), (&far, 2), (&far, 2), (&pod, 1)], None);
        body.bytes(CTA_ZONE, &1_u16.to_be_bytes());
        let read = connection(body.as_bytes()).expect("a connection");
        assert_eq!((read.destination.ip(), read.zone, read.replied), (IpAddr::from(far), 1, false));
        assert_eq!(read.replies_from, read.destination);
        assert_eq!(connection(&body.as_bytes()[..20]), None);
    }
}
