//! `trace`: the way of a packet through rules, live ones or those of a policy.

use super::elements::ContainerSender;
use super::explain::Explanation;
use super::rules::LiveRules;
use super::subject::{ConfigurationOrigin, ConfigurationSource, Subject};
use super::terminal::{Cell, Screen, TextReport, Tone, joined};
use crate::cni::{Code, Error};
use crate::firewall::{ContainerElement, Destination, Hop, Packet, RulePlace, RulesetView, Sender};
use crate::pod::Pod;
use crate::policy::{Policy, Protocol};
use serde::Serialize;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// The origin of a packet as rules see it.
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
    /// A client outside of the pod.
    Outside,
}

/// The report about a packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Trace {
    /// The sender.
    pub from: Origin,
    /// The container of the sender, if the user named one.
    pub container: Option<ContainerSender>,
    /// The destination.
    pub to: SocketAddr,
    /// `tcp` or `udp`.
    pub protocol: String,
    /// The interface that the packet leaves or enters.
    pub interface: String,
    /// The rules that the packet matches, in order.
    pub hops: Vec<Hop>,
    /// The rule that decides where the packet arrives; `None` if no rule decides.
    pub decided_by: Option<RulePlace>,
    /// `sidecar:PORT`, `ztunnel:PORT`, `redirected:PORT` (by a rule outside of Istio's chains), `direct`, `dropped`, `rejected` or
    /// `unknown`.
    pub arrives_at: String,
    /// Why nothing redirects the pod's traffic, as `explain` says it; `None` if it is redirected, and for live rules.
    pub reason: Option<String>,
    /// The connection tracking zone; 0 if no rule sets one.
    pub zone: u16,
    /// Rules that were not evaluated; because of them, the packet may arrive elsewhere.
    pub caveats: Vec<String>,
    /// Where the configuration of the rules comes from; `None` for live rules.
    pub configuration: Option<ConfigurationOrigin>,
    /// Why an ADD of the pod fails; `None` if it succeeds, and for live rules.
    pub add_fails: Option<String>,
}

/// Traces the first packet of a connection through the rules; `container` is the sender's, if it is known.
///
/// A process's traffic to loopback and to the addresses in `pod_addresses` uses lo, all other traffic `interface`. A
/// process without a GID has GID 0, as in container runtimes.
#[must_use]
pub fn trace(
    view: &RulesetView,
    (from, container): (Sender, Option<ContainerSender>),
    to: Destination,
    pod_addresses: &[IpAddr],
    interface: &str,
) -> Trace {
    let (origin, from) = match from {
        Sender::Process { uid, gid, .. } => {
            let (gid, set) = (gid.unwrap_or_default(), container.as_ref().and_then(|container| container.bypasses));
            (Origin::Process { uid, gid }, Sender::Process { uid, gid: Some(gid), set })
        }
        inbound @ Sender::Inbound(_) => (Origin::Outside, inbound),
    };
    let packet = Packet::first(from, to, pod_addresses, interface);
    let interface = packet.interface().to_owned();
    let evaluation = view.evaluate(packet);
    Trace {
        from: origin,
        container,
        to: to.address,
        protocol: to.protocol.to_string(),
        interface,
        hops: evaluation.hops,
        decided_by: evaluation.decided_by,
        arrives_at: evaluation.arrival.to_string(),
        reason: None,
        zone: evaluation.zone,
        caveats: evaluation.caveats,
        configuration: None,
        add_fails: None,
    }
}

impl Trace {
    /// Adds what is known about the pod whose planned rules were followed.
    #[must_use]
    pub fn planned(self, subject: &Subject, explanation: &Explanation) -> Self {
        let has_own_network = !subject.facts.pod.host_network;
        Self {
            interface: if has_own_network { self.interface } else { String::new() },
            configuration: Some(subject.origin.clone()),
            add_fails: explanation.add_fails.clone(),
            reason: (!explanation.redirected).then(|| explanation.decision.clone()),
            ..self
        }
    }
}

impl TextReport for Trace {
    fn write(&self, screen: &mut Screen) {
        let sender = match self.from {
            Origin::Process { uid, gid } => format!("uid {uid}, gid {gid}"),
            Origin::Outside => "outside".to_owned(),
        };
        let sender = match &self.container {
            Some(container) => format!("container {} ({sender})", container.name),
            None => sender,
        };
        screen.failure(self.add_fails.as_deref());
        let via = if self.interface.is_empty() { String::new() } else { format!(" via {}", self.interface) };
        let is_bad = ["dropped", "rejected", "unknown"].contains(&&*self.arrives_at);
        let tone = if is_bad { Tone::Bad } else { Tone::Good };
        screen.labeled(format!("{}/{} from {sender}{via} →", self.to, self.protocol), &self.arrives_at, tone);
        if let Some(reason) = &self.reason {
            screen.labeled("Reason:", reason, Tone::Plain);
        }
        if let Some(origin) = self.configuration.as_ref().filter(|origin| origin.source != ConfigurationSource::File) {
            screen.labeled("Configuration:", origin.text(), Tone::Faint);
        }
        if let Some(container) = &self.container {
            let tone = if container.bypasses.is_some() { Tone::Notable } else { Tone::Faint };
            screen.labeled(format!("Container {}:", container.name), container.text(), tone);
        }
        let mut table = String::new();
        let row = |(index, hop): (usize, &Hop)| {
            let before = std::mem::replace(&mut table, format!("{} {}", hop.table, hop.hook));
            let decides = self.decided_by.is_some() && index + 1 == self.hops.len();
            let (mark, tone) = if decides { ("»", Tone::Strong) } else { (" ", Tone::Plain) };
            vec![
                Cell::of(if table == before { "" } else { &table }).tone(Tone::Faint),
                Cell::of(mark).tone(Tone::Good),
                Cell::of(&hop.chain),
                Cell::of(&hop.rule).tone(tone),
                Cell::of(&hop.then).tone(Tone::Faint),
            ]
        };
        if self.hops.is_empty() {
            screen.text("  no rule matches", Tone::Faint);
        }
        screen.table(&self.hops.iter().enumerate().map(row).collect::<Vec<_>>());
        if self.zone != 0 {
            screen.text(format!("  connection tracking zone {}", self.zone), Tone::Faint);
        }
        for caveat in &self.caveats {
            screen.text(format!("  ! {caveat}"), Tone::Notable);
        }
    }
}

impl ContainerSender {
    /// Returns the container called `name` while it runs in a pod with this policy.
    #[must_use]
    pub fn planned(name: &str, policy: &Policy) -> Self {
        let bypasses = policy.container_scope(name);
        Self { name: name.to_owned(), excluded: bypasses.is_some(), bypasses }
    }

    /// Returns the container called `name`, which bypasses the sidecar if it has an element.
    #[must_use]
    pub fn live(name: &str, rules: &LiveRules) -> Self {
        let is_its = |one: &&ContainerElement| one.container.as_ref().is_some_and(|label| label.name == name);
        let excluded = rules.desired.as_ref().is_some_and(|desired| desired.policy.container_scope(name).is_some());
        let bypasses = rules.live.containers.iter().filter(is_its).map(|one| one.scope).max();
        Self { name: name.to_owned(), excluded, bypasses }
    }
}

/// A sender as the user gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SenderArgument {
    /// The argument.
    pub text: String,
    /// The name of the container.
    pub container: Option<String>,
    /// The sender; `None` for a container with the IDs in the pod's manifest.
    pub sender: Option<Sender>,
}

impl FromStr for SenderArgument {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "expected uid=UID, uid=UID,gid=GID, container=NAME, container=NAME,uid=UID, inbound or \
                                inbound:ADDRESS";
        if let Some(address) = text.strip_prefix("inbound") {
            let address = address.strip_prefix(':').map(|address| address.trim_matches(['[', ']']).parse());
            let address = address.transpose().map_err(|_| EXPECTED)?;
            return Ok(Self { text: text.to_owned(), container: None, sender: Some(Sender::Inbound(address)) });
        }
        let (mut container, mut uid, mut gid) = (None, None, None);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or(EXPECTED)?;
            let id = || value.trim().parse::<u32>().ok().filter(|id| *id != u32::MAX).ok_or(EXPECTED);
            match key.trim() {
                "container" if container.is_none() && !value.is_empty() => container = Some(value.to_owned()),
                "uid" if uid.is_none() => uid = Some(id()?),
                "gid" if gid.is_none() => gid = Some(id()?),
                _ => return Err(EXPECTED),
            }
        }
        let sender = uid.map(|uid| Sender::Process { uid, gid, set: None });
        let is_complete = sender.is_some() || (container.is_some() && gid.is_none());
        is_complete.then(|| Self { text: text.to_owned(), container, sender }).ok_or(EXPECTED)
    }
}

impl SenderArgument {
    /// Returns the sender. A container's IDs are those of the argument or, as fallback, of the manifest of `pod`. Without
    /// a pod, the name of the container is not checked.
    ///
    /// # Errors
    /// The pod does not have the container, or its UID is unknown.
    pub fn resolve(&self, pod: Option<&Pod>) -> Result<Sender, Error> {
        let name = self.container.as_deref().unwrap_or_default();
        let failed = |why: String| Error::new(Code::InvalidConfig, format!("--from: container {name:?}: {why}"));
        let (Some(pod), true) = (pod, self.container.is_some()) else {
            let next = format!("use container={name},uid=UID, or select the pod: --live -n NAMESPACE POD");
            return self.sender.ok_or_else(|| failed(format!("unknown pod; {next}")));
        };
        let place = format!("pod {}/{}", pod.namespace, pod.name);
        let containers = || pod.all_containers().chain(&pod.ephemeral_containers);
        let Some(container) = containers().find(|container| container.name == name) else {
            let names = joined(containers().map(|container| &container.name));
            return Err(failed(format!("{place}: expected one of {names}")));
        };
        let id = |id: i64| u32::try_from(id).ok();
        let process = |uid| Sender::Process { uid, gid: pod.group_of(container).and_then(id), set: None };
        self.sender.or_else(|| pod.user_of(container).and_then(id).map(process)).ok_or_else(|| {
            let why = "unknown UID: runAsUser is not set, and the image decides";
            failed(format!("{place}: {why}; use container={name},uid=UID"))
        })
    }
}

impl FromStr for Destination {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let with = |suffix, protocol| Some(Self { address: text.strip_suffix(suffix)?.parse().ok()?, protocol });
        let found = with("/tcp", Protocol::Tcp).or_else(|| with("/udp", Protocol::Udp));
        found.ok_or("expected ADDRESS:PORT/tcp or ADDRESS:PORT/udp, with an IPv6 address in brackets")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn senders_and_destinations_are_parsed() {
        let process = |uid, gid| Sender::Process { uid, gid, set: None };
        let from = |text: &str| text.parse::<SenderArgument>().expect(text).sender.expect(text);
        assert_eq!(from("uid=1337"), process(1337, None));
        assert_eq!(from("gid=5,uid=0"), process(0, Some(5)));
        assert_eq!(from("inbound"), Sender::Inbound(None));
        assert_eq!(from("inbound:fd00::1"), Sender::Inbound(Some("fd00::1".parse().expect("v6"))));
        for (text, sender) in [("container=web", None), ("container=web,uid=7,gid=8", Some(process(7, Some(8))))] {
            let container = Some("web".to_owned());
            assert_eq!(text.parse(), Ok(SenderArgument { text: text.to_owned(), container, sender }));
        }
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
            assert!(error.starts_with("expected uid=UID, "), "{wrong}: {error}");
        }
        let to = |text: &str| text.parse::<Destination>().expect(text);
        assert_eq!(to("10.0.0.10:53/udp").protocol, Protocol::Udp);
        assert_eq!(to("[fd00::1]:443/tcp").address, "[fd00::1]:443".parse().expect("an address"));
        for wrong in ["10.0.0.10", "10.0.0.10:53", "10.0.0.10:53/sctp", "fd00::1:443/tcp", ":80/tcp"] {
            assert!(wrong.parse::<Destination>().is_err(), "{wrong}");
        }
    }
}
