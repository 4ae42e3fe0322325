//! The connections that the kernel tracks in a network namespace (linux/netfilter/nfnetlink_conntrack.h).

use super::socket::{NfError, NfSocket};
use crate::netlink::DumpLimit;
use crate::netlink::attributes::{Attributes, find, parse};
use std::net::{IpAddr, SocketAddr};

const NFNL_SUBSYS_CTNETLINK: u16 = 1;
const IPCTNL_MSG_CT_GET: u16 = 1;
/// `enum ctattr_type`.
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
/// `enum ctattr_tuple`: addresses; protocol with ports.
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;

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
}

/// Parses a tracked connection; `None` if it has no ports.
fn connection(body: &[u8]) -> Option<Connection> {
    let (original, reply) = (find(body, CTA_TUPLE_ORIG)?, find(body, CTA_TUPLE_REPLY)?);
    let (source, destination, protocol) = ends(original)?;
    let (replies_from, ..) = ends(reply)?;
    Some(Connection { protocol, source, destination, replies_from })
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

    /// Returns the body of a message with the tuples of both directions.
    fn body(v6: bool, ends: [(&[u8], u16); 4]) -> Attributes {
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
                list
            });
            list.nested(CTA_TUPLE_REPLY, |list| {
                tuple(list, ends[2], ends[3]);
                list
            })
        })
    }

    #[test]
    fn replies_of_a_redirected_connection_have_another_source() {
        let (pod, far, own) = ([10, 0, 0, 2], [192, 0, 2, 1], [127, 0, 0, 1]);
        let body = body(false, [(&pod, 4000), (&far, 80), (&own, 15001), (&pod, 4000)]);
        let expected = Connection {
            protocol: 6,
            source: "10.0.0.2:4000".parse().expect("an address"),
            destination: "192.0.2.1:80".parse().expect("an address"),
            replies_from: "127.0.0.1:15001".parse().expect("an address"),
        };
        assert_eq!(connection(body.as_bytes()), Some(expected));
    }

    #[test]
    fn ipv6_connections_are_parsed_and_truncated_ones_are_ignored() {
        let (pod, far) = ([1; 16], [2; 16]);
        let body = body(true, [(&pod, 1), (&far, 2), (&far, 2), (&pod, 1)]);
        let read = connection(body.as_bytes()).expect("a connection");
        assert_eq!(read.destination.ip(), IpAddr::from(far));
        assert_eq!(read.replies_from, read.destination);
        assert_eq!(connection(&body.as_bytes()[..20]), None);
    }
}
