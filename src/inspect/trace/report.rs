//! `trace`: the way of a packet through the rules as a report.

use crate::firewall::{Arrival, Destination, Hop, Packet, RulePlace, RulesetView, Sender};
use crate::inspect::elements::ContainerSender;
use crate::inspect::explain::Explanation;
use crate::inspect::subject::{ConfigurationOrigin, ConfigurationSource, Subject};
use crate::inspect::terminal::{Cell, Screen, TextReport, Tone};
use serde::Serialize;
use std::net::{IpAddr, SocketAddr};

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

/// Traces the first packet of a connection through the rules.
///
/// A process's traffic to loopback and to the addresses in `pod_addresses` uses lo, all other traffic `interface`. A
/// process without a GID has GID 0, as in container runtimes.
#[must_use]
pub fn trace(view: &RulesetView, from: Sender, to: Destination, pod_addresses: &[IpAddr], interface: &str) -> Trace {
    let (origin, from) = match from {
        Sender::Process { uid, gid, set } => {
            let gid = gid.unwrap_or_default();
            (Origin::Process { uid, gid }, Sender::Process { uid, gid: Some(gid), set })
        }
        inbound @ Sender::Inbound(_) => (Origin::Outside, inbound),
    };
    let packet = Packet::first(from, to, pod_addresses, interface);
    let interface = packet.interface().to_owned();
    let mut evaluation = view.evaluate(packet);
    if let Some(place) = &evaluation.decided_by
        && let Some(index) = evaluation.hops.iter().rposition(|hop| is_at(hop, place))
    {
        evaluation.hops.truncate(index + 1);
    }
    Trace {
        from: origin,
        container: None,
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

fn is_at(hop: &Hop, place: &RulePlace) -> bool {
    (&place.table, &place.chain, &place.rule) == (&hop.table, &hop.chain, &hop.rule)
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
        if let Some(cause) = &self.add_fails {
            screen.line(&[Cell::of("an ADD fails:").tone(Tone::Bad), Cell::of(cause)]);
        }
        let is = |arrival: Arrival| self.arrives_at == arrival.to_string();
        let via = if self.interface.is_empty() { String::new() } else { format!(" via {}", self.interface) };
        let tone = if [Arrival::Dropped, Arrival::Rejected, Arrival::Unknown].into_iter().any(is) {
            Tone::Bad
        } else {
            Tone::Good
        };
        screen.line(&[
            Cell::of(format!("{}/{} from {sender}{via} →", self.to, self.protocol)),
            Cell::of(&self.arrives_at).tone(tone),
        ]);
        if let Some(reason) = &self.reason {
            screen.line(&[Cell::of("Reason:"), Cell::of(reason)]);
        }
        if let Some(origin) = self.configuration.as_ref().filter(|origin| origin.source != ConfigurationSource::File) {
            screen.line(&[Cell::of("Configuration:"), Cell::of(origin.text()).tone(Tone::Faint)]);
        }
        if let Some(container) = &self.container {
            let tone = if container.bypasses.is_some() { Tone::Notable } else { Tone::Faint };
            screen.line(&[Cell::of(format!("Container {}:", container.name)), Cell::of(container.text()).tone(tone)]);
        }
        let mut rows: Vec<Vec<Cell>> = Vec::new();
        let decides = |hop: &Hop| self.decided_by.as_ref().is_some_and(|place| is_at(hop, place));
        for (index, hop) in self.hops.iter().enumerate() {
            let is_first =
                index == 0 || (hop.table, hop.hook) != (self.hops[index - 1].table, self.hops[index - 1].hook);
            let table = if is_first { format!("{} {}", hop.table, hop.hook) } else { String::new() };
            let tone = if decides(hop) { Tone::Strong } else { Tone::Plain };
            rows.push(vec![
                Cell::of(table).tone(Tone::Faint),
                Cell::of(if decides(hop) { "»" } else { " " }).tone(Tone::Good),
                Cell::of(&hop.chain),
                Cell::of(&hop.rule).tone(tone),
                Cell::of(&hop.then).tone(Tone::Faint),
            ]);
        }
        if rows.is_empty() {
            screen.text("  no rule matches", Tone::Faint);
        }
        screen.table(&rows);
        if self.zone != 0 {
            screen.text(format!("  connection tracking zone {}", self.zone), Tone::Faint);
        }
        for caveat in &self.caveats {
            screen.text(format!("  ! {caveat}"), Tone::Notable);
        }
    }
}
