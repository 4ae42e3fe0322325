//! The sender and the destination of a packet as users describe them.

use crate::cni::{Code, Error};
use crate::firewall::{Destination, Sender};
use crate::pod::Pod;
use crate::policy::Protocol;
use std::fmt;
use std::str::FromStr;

/// The inverse of parsing.
impl fmt::Display for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { uid, gid: None, .. } => write!(f, "uid={uid}"),
            Self::Process { uid, gid: Some(gid), .. } => write!(f, "uid={uid},gid={gid}"),
            Self::Inbound(None) => f.write_str("inbound"),
            Self::Inbound(Some(address)) => write!(f, "inbound:{address}"),
        }
    }
}

/// A sender as the user gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SenderArgument {
    /// A sender by its IDs or address.
    Sender(Sender),
    /// The processes of a container.
    Container {
        /// The name of the container.
        name: String,
        /// The UID that the user gave; `None` to use the UID of the pod's manifest.
        uid: Option<u32>,
        /// The GID that the user gave.
        gid: Option<u32>,
    },
}

impl FromStr for SenderArgument {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = || {
            let expected = "expected uid=UID, uid=UID,gid=GID, container=NAME, container=NAME,uid=UID, inbound or \
                            inbound:ADDRESS";
            Error::new(Code::InvalidConfig, format!("from: invalid value {text:?}; {expected}"))
        };
        if text == "inbound" {
            return Ok(Self::Sender(Sender::Inbound(None)));
        }
        if let Some(address) = text.strip_prefix("inbound:") {
            let address = address.trim_start_matches('[').trim_end_matches(']');
            let address = address.parse().map_err(|_| invalid())?;
            return Ok(Self::Sender(Sender::Inbound(Some(address))));
        }
        let (mut name, mut uid, mut gid) = (None, None, None);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(invalid)?;
            let id = || value.trim().parse::<u32>().ok().filter(|id| *id != u32::MAX).ok_or_else(invalid);
            match key.trim() {
                "container" if name.is_none() && !value.is_empty() => name = Some(value.to_owned()),
                "uid" if uid.is_none() => uid = Some(id()?),
                "gid" if gid.is_none() => gid = Some(id()?),
                _ => return Err(invalid()),
            }
        }
        match (name, uid) {
            (_, None) if gid.is_some() => Err(invalid()),
            (Some(name), uid) => Ok(Self::Container { name, uid, gid }),
            (None, Some(uid)) => Ok(Self::Sender(Sender::Process { uid, gid, set: None })),
            (None, None) => Err(invalid()),
        }
    }
}

impl SenderArgument {
    /// Returns the name of the container, if the sender is one.
    #[must_use]
    pub fn container(&self) -> Option<&str> {
        match self {
            Self::Sender(_) => None,
            Self::Container { name, .. } => Some(name),
        }
    }

    /// Returns the sender. A container's IDs are those of the argument or, as fallback, of the manifest of `pod`. Without
    /// a pod, the name of the container is not checked.
    ///
    /// # Errors
    /// The pod does not have the container, or its UID is unknown.
    pub fn resolve(&self, pod: Option<&Pod>) -> Result<Sender, Error> {
        let (name, uid, gid) = match self {
            Self::Sender(sender) => return Ok(*sender),
            Self::Container { name, uid, gid } => (name, *uid, *gid),
        };
        let failed = |why: String| Error::new(Code::InvalidConfig, format!("from: container {name:?}: {why}"));
        let Some(pod) = pod else {
            let msg = || {
                failed(format!("unknown pod; use container={name},uid=UID, or select the pod: --live -n NAMESPACE POD"))
            };
            return Ok(Sender::Process { uid: uid.ok_or_else(msg)?, gid, set: None });
        };
        let mut containers = pod.all_containers().chain(&pod.ephemeral_containers);
        let container = containers.clone().find(|container| container.name == *name).ok_or_else(|| {
            let names: Vec<&str> = containers.by_ref().map(|container| container.name.as_str()).collect();
            failed(format!("pod {}/{}: expected one of {}", pod.namespace, pod.name, names.join(", ")))
        })?;
        if let Some(uid) = uid {
            return Ok(Sender::Process { uid, gid, set: None });
        }
        let id = |id: i64| u32::try_from(id).ok();
        let uid = pod.user_of(container).and_then(id).ok_or_else(|| {
            let why = "unknown UID: runAsUser is not set, and the image decides";
            failed(format!("pod {}/{}: {why}; use container={name},uid=UID", pod.namespace, pod.name))
        })?;
        Ok(Sender::Process { uid, gid: pod.group_of(container).and_then(id), set: None })
    }
}

impl FromStr for Destination {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parse = || {
            let (address, protocol) = text.rsplit_once('/')?;
            let protocol = match protocol {
                "tcp" => Protocol::Tcp,
                "udp" => Protocol::Udp,
                _ => return None,
            };
            Some(Self { address: address.parse().ok()?, protocol })
        };
        parse().ok_or_else(|| {
            let expected = "expected ADDRESS:PORT/tcp or ADDRESS:PORT/udp, with an IPv6 address in brackets";
            Error::new(Code::InvalidConfig, format!("to: invalid value {text:?}; {expected}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_and_destinations_are_parsed_and_printed() {
        let process = |uid, gid| Sender::Process { uid, gid, set: None };
        let from = |text: &str| match text.parse::<SenderArgument>().expect(text) {
            SenderArgument::Sender(sender) => sender,
            container @ SenderArgument::Container { .. } => panic!("{container:?}"),
        };
        assert_eq!(from("uid=1337"), process(1337, None));
        assert_eq!(from("gid=5,uid=0"), process(0, Some(5)));
        assert_eq!(from("inbound"), Sender::Inbound(None));
        assert_eq!(from("inbound:fd00::1"), Sender::Inbound(Some("fd00::1".parse().expect("v6"))));
        for text in ["uid=1337", "uid=0,gid=5", "inbound", "inbound:fd00::1"] {
            assert_eq!(from(text).to_string(), text);
        }
        let container = |uid, gid| SenderArgument::Container { name: "web".to_owned(), uid, gid };
        assert_eq!("container=web".parse(), Ok(container(None, None)));
        assert_eq!("container=web,uid=7,gid=8".parse(), Ok(container(Some(7), Some(8))));
        for wrong in [
            "",
            "gid=1",
            "uid=",
            "uid=-1",
            "uid=4294967295",
            "uid=1,uid=2",
            "outbound",
            "inbound:x",
            "container=",
            "container=a,container=b",
            "container=a,gid=1",
        ] {
            let error = wrong.parse::<SenderArgument>().expect_err(wrong);
            assert!(error.msg.starts_with(&format!("from: invalid value {wrong:?}; expected uid=UID, ")), "{error}");
        }
        let to = |text: &str| text.parse::<Destination>().expect(text);
        assert_eq!(to("10.0.0.10:53/udp").protocol, Protocol::Udp);
        assert_eq!(to("[fd00::1]:443/tcp").address, "[fd00::1]:443".parse().expect("an address"));
        for wrong in ["10.0.0.10", "10.0.0.10:53", "10.0.0.10:53/sctp", "fd00::1:443/tcp", ":80/tcp"] {
            assert!(wrong.parse::<Destination>().is_err(), "{wrong}");
        }
    }
}
