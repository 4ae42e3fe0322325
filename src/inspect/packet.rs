//! One packet: who sends it, where to, and by which interface it goes.
//!
//! The processes of a container as rules see them: by the UID and GID that the pod says they have.

use crate::cni::{Code, Error};
use crate::firewall::rule::Family;
use crate::pod::well_known::ISTIO_CONTAINERS;
use crate::pod::{Container, Pod};
use crate::policy::{Exclusion, IdRange, Policy, Protocol, TrafficOwner};
use serde::Serialize;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// Who sends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sender {
    /// A process of the pod: its effective UID and, where it is named, GID.
    Process {
        /// The UID.
        uid: u32,
        /// The GID.
        gid: Option<u32>,
    },
    /// Somebody outside, at this address where it is named.
    Inbound(Option<IpAddr>),
}

impl FromStr for Sender {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refused = || {
            let msg = format!(
                "from: invalid value {text:?}; expected uid=U, uid=U,gid=G, container=NAME, inbound, inbound:ADDRESS"
            );
            Error::new(Code::InvalidConfig, msg)
        };
        if text == "inbound" {
            return Ok(Self::Inbound(None));
        }
        if let Some(address) = text.strip_prefix("inbound:") {
            let address = address.trim_start_matches('[').trim_end_matches(']');
            return address.parse().map(|address| Self::Inbound(Some(address))).map_err(|_| refused());
        }
        let (mut uid, mut gid) = (None, None);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(refused)?;
            let id = value.trim().parse::<u32>().ok().filter(|id| *id != u32::MAX).ok_or_else(refused)?;
            match key.trim() {
                "uid" if uid.is_none() => uid = Some(id),
                "gid" if gid.is_none() => gid = Some(id),
                _ => return Err(refused()),
            }
        }
        uid.map(|uid| Self::Process { uid, gid }).ok_or_else(refused)
    }
}

/// As it is parsed.
impl fmt::Display for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { uid, gid: None } => write!(f, "uid={uid}"),
            Self::Process { uid, gid: Some(gid) } => write!(f, "uid={uid},gid={gid}"),
            Self::Inbound(None) => f.write_str("inbound"),
            Self::Inbound(Some(address)) => write!(f, "inbound:{address}"),
        }
    }
}

/// A sender as the user names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Named {
    /// The sender itself.
    Sender(Sender),
    /// The processes of a container.
    Container(String),
}

impl FromStr for Named {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.strip_prefix("container=").filter(|name| !name.is_empty()) {
            Some(name) => Ok(Self::Container(name.to_owned())),
            None => text.parse().map(Self::Sender),
        }
    }
}

impl Named {
    /// The sender; a container of `pod` has the IDs that its manifest sets.
    ///
    /// # Errors
    /// No pod is known, it has no such container, or its manifest sets no UID for it.
    pub fn of_pod(&self, pod: Option<&Pod>) -> Result<Sender, Error> {
        let name = match self {
            Self::Sender(sender) => return Ok(*sender),
            Self::Container(name) => name,
        };
        let refused = |why: String| Error::new(Code::InvalidConfig, format!("from: container {name:?}: {why}"));
        let pod = pod.ok_or_else(|| refused("the pod is not known; name it with -f FILE or -n NS POD".to_owned()))?;
        let known: Vec<&str> = pod.all_containers().map(|container| container.name.as_str()).collect();
        let container = pod.all_containers().find(|container| container.name == *name).ok_or_else(|| {
            refused(format!("pod {}/{}: expected one of {}", pod.namespace, pod.name, known.join(", ")))
        })?;
        let id = |id: i64| u32::try_from(id).ok();
        let uid = pod.user_of(container).and_then(id).ok_or_else(|| {
            let image = "its image decides the UID";
            refused(format!("pod {}/{} sets no runAsUser for it, so {image}; give uid=U", pod.namespace, pod.name))
        })?;
        Ok(Sender::Process { uid, gid: pod.group_of(container).and_then(id) })
    }
}

/// Where it is sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// The address and port.
    pub address: SocketAddr,
    /// Over what.
    pub protocol: Protocol,
}

impl FromStr for Destination {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parse = || {
            let (address, protocol) = text.rsplit_once('/').unwrap_or((text, "tcp"));
            let protocol = match protocol {
                "tcp" => Protocol::Tcp,
                "udp" => Protocol::Udp,
                _ => return None,
            };
            Some(Self { address: address.parse().ok()?, protocol })
        };
        parse().ok_or_else(|| {
            let msg =
                format!("to: invalid value {text:?}; expected ADDRESS:PORT/tcp, ADDRESS:PORT/udp, [IPV6]:PORT/tcp");
            Error::new(Code::InvalidConfig, msg)
        })
    }
}

/// Where a packet comes into being, as rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A process of the pod.
    Process {
        /// Its effective UID.
        uid: u32,
        /// Its effective GID.
        gid: u32,
    },
    /// Outside.
    Outside,
}

/// A packet on its way: what rules can ask of it, and what they change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Packet {
    pub origin: Origin,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub protocol: Protocol,
    /// By which interface it came in; none while it goes out.
    pub in_interface: Option<String>,
    /// By which it goes out; none once it comes in.
    pub out_interface: Option<String>,
    /// The mark that rules gave it.
    pub mark: u32,
    /// Connection tracking's zone; the first rule that names one counts.
    pub zone: Option<u16>,
}

/// From where connections are made: a port that no rule asks for.
const EPHEMERAL: u16 = 40000;

impl Packet {
    /// The first packet of a connection. `own` are the pod's addresses: what a process sends there
    /// or to loopback goes by lo, the rest by `interface`. A process without a GID has GID 0, as
    /// runtimes have it.
    pub(super) fn first(from: Sender, to: Destination, own: &[IpAddr], interface: &str) -> Self {
        let address = to.address.ip();
        let of_family = |ip: &&IpAddr| ip.is_ipv4() == address.is_ipv4();
        let unspecified: IpAddr =
            if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let named = own.iter().find(of_family).copied().unwrap_or(unspecified);
        let over_lo = address.is_loopback() || own.contains(&address);
        let link = if over_lo { "lo" } else { interface };
        let (origin, source, in_interface, out_interface) = match from {
            Sender::Process { uid, gid } => {
                let source = if over_lo { address } else { named };
                (Origin::Process { uid, gid: gid.unwrap_or_default() }, source, None, Some(link.to_owned()))
            }
            Sender::Inbound(source) => {
                (Origin::Outside, source.unwrap_or(unspecified), Some(interface.to_owned()), None)
            }
        };
        let source = SocketAddr::new(source, EPHEMERAL);
        let destination = to.address;
        Self { origin, source, destination, protocol: to.protocol, in_interface, out_interface, mark: 0, zone: None }
    }

    pub(super) const fn family(&self) -> Family {
        if self.destination.is_ipv4() { Family::Ip } else { Family::Ip6 }
    }

    /// After `REDIRECT` (xt_REDIRECT, nf_nat_redirect.c): to the port at loopback while it goes
    /// out, at the address that it came for while it comes in.
    pub(super) fn redirect(&mut self, port: u16) {
        let at = match (self.origin, self.destination) {
            (Origin::Outside, destination) => destination.ip(),
            (_, SocketAddr::V4(_)) => Ipv4Addr::LOCALHOST.into(),
            (_, SocketAddr::V6(_)) => Ipv6Addr::LOCALHOST.into(),
        };
        self.destination = SocketAddr::new(at, port);
        if self.out_interface.is_some() {
            self.out_interface = Some("lo".to_owned());
        }
    }

    /// Whether it stays in the pod.
    pub(super) fn is_over_lo(&self) -> bool {
        self.out_interface.as_deref() == Some("lo")
    }

    /// What was sent over lo comes in there.
    pub(super) fn comes_in(&mut self) {
        self.in_interface = self.out_interface.take();
    }
}

/// A container of a pod.
#[derive(Debug, Clone, Copy)]
pub(super) struct ContainerTraffic<'a> {
    pub pod: &'a Pod,
    pub container: &'a Container,
    /// Whether it has ended when the application starts.
    pub ends_before: bool,
}

/// How much of what a process sends is exempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exempt {
    All,
    Some,
    No,
}

/// Every container but Istio's own, those that start first first.
pub(super) fn processes(pod: &Pod) -> Vec<ContainerTraffic<'_>> {
    let init = pod.init_containers.iter().map(|c| (c, !c.restarts_always));
    let all = init.chain(pod.containers.iter().map(|c| (c, false)));
    let own = all.filter(|(c, _)| !ISTIO_CONTAINERS.contains(&c.name.as_str()));
    own.map(|(container, ends_before)| ContainerTraffic { pod, container, ends_before }).collect()
}

impl ContainerTraffic<'_> {
    pub(super) fn uid(&self) -> Option<u32> {
        u32::try_from(self.pod.user_of(self.container)?).ok()
    }

    pub(super) fn gid(&self) -> Option<u32> {
        u32::try_from(self.pod.group_of(self.container)?).ok()
    }

    /// Whether it is one of those; one whose IDs are not known is not.
    pub(super) fn is(&self, owner: TrafficOwner) -> bool {
        let within = |range: IdRange, id: Option<u32>| id.is_some_and(|id| range.covers(IdRange::one(id)));
        match owner {
            TrafficOwner::Any => true,
            TrafficOwner::Uid(range) => within(range, self.uid()),
            TrafficOwner::Gid(range) => within(range, self.gid()),
        }
    }

    /// How much of what it sends the exclusions of `policy` exempt.
    pub(super) fn exempt(&self, policy: &Policy) -> Exempt {
        let own = || policy.exclusions.iter().filter(|exclusion| self.is(exclusion.owner));
        match own().next() {
            None => Exempt::No,
            Some(_) if own().any(is_everything) => Exempt::All,
            Some(_) => Exempt::Some,
        }
    }
}

/// Whether all that an owner sends is exempt.
pub(super) const fn is_everything(exclusion: &Exclusion) -> bool {
    exclusion.destination.is_none() && exclusion.protocol.is_none() && exclusion.ports.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_as_they_are_written() {
        let from = |text: &str| text.parse::<Sender>().expect(text);
        assert_eq!(from("uid=1337"), Sender::Process { uid: 1337, gid: None });
        assert_eq!(from("gid=5,uid=0"), Sender::Process { uid: 0, gid: Some(5) });
        assert_eq!(from("inbound"), Sender::Inbound(None));
        assert_eq!(from("inbound:fd00::1"), Sender::Inbound(Some("fd00::1".parse().expect("v6"))));
        for text in ["uid=1337", "uid=0,gid=5", "inbound", "inbound:fd00::1"] {
            assert_eq!(from(text).to_string(), text);
        }
        for wrong in ["", "gid=1", "uid=", "uid=-1", "uid=4294967295", "uid=1,uid=2", "outbound", "inbound:x"] {
            let error = wrong.parse::<Sender>().expect_err(wrong);
            assert!(error.msg.starts_with(&format!("from: invalid value {wrong:?}; expected ")), "{error}");
        }
        let to = |text: &str| text.parse::<Destination>().expect(text);
        assert_eq!(to("10.0.0.10:53/udp").protocol, Protocol::Udp);
        assert_eq!(to("[fd00::1]:443").address, "[fd00::1]:443".parse().expect("an address"));
        for wrong in ["10.0.0.10", "10.0.0.10:53/sctp", "fd00::1:443/tcp", ":80/tcp"] {
            assert!(wrong.parse::<Destination>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_destination_decides_the_interface() {
        let own: [IpAddr; 1] = ["10.0.0.2".parse().expect("v4")];
        let from = Sender::Process { uid: 1, gid: None };
        let link = |to: &str| Packet::first(from, to.parse().expect(to), &own, "eth0").out_interface;
        assert_eq!(link("10.0.0.2:1").as_deref(), Some("lo"));
        assert_eq!(link("127.8.0.1:1").as_deref(), Some("lo"));
        assert_eq!(link("[::1]:1").as_deref(), Some("lo"));
        assert_eq!(link("10.0.0.3:1").as_deref(), Some("eth0"));
    }
}
