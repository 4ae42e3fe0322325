//! What each configuration makes of the pod that asks for something: the one that there is or, of a
//! primary plugin, those of the pod's attachments.
//!
//! Whether a packet meets what a rule asks, in either vocabulary.
//!
//! What leaves untouched although the pod is redirected, in words, and at whose word.

use super::packet::{Origin, Packet};
use super::subject::Subject;
use crate::cluster;
use crate::cni::{Block, Error, NetConf};
use crate::firewall::native::rule as native;
use crate::firewall::native::rule::{Condition, Key};
use crate::firewall::native::set::Spans;
use crate::firewall::rule::{CtState, Family, Is, Match, Rule};
use crate::networks::{default_network, networks};
use crate::plugin::desired_policy;
use crate::plugin::primary::about;
use crate::pod::PodRef;
use crate::pod::well_known::NETWORKS;
use crate::policy::{Exclusion, IdRange, Policy, PortRange, Protocol, TrafficOwner};
use crate::sub_plugins::{ChainOutput, SettingSource, Severity, SubPlugin, skip_reason};
use ipnet::IpNet;
use serde::Serialize;
use std::net::IpAddr;

const NO_SOURCE: &str = "the configuration names no source of facts, without which an ADD fails: set kubernetes.kubeconfig, \
    kubernetes.agent_socket or kubernetes.manifests_dir";
const CONFIGURATION_ALONE: &str = "the configuration names no source of facts: what the pod is does not count";

/// A configuration, and what it makes of the pod.
pub(super) struct Evaluation<'a> {
    /// The attachment's name, where the configuration is one's.
    pub(super) attachment: Option<&'a str>,
    pub(super) conf: &'a NetConf,
    /// What it makes of the pod, or why it is not for it.
    pub(super) answer: Result<ChainOutput, String>,
    notes: Vec<String>,
}

/// All that are heard for the pod.
///
/// # Errors
/// Those with which an ADD would fail.
pub(super) fn hear(subject: &Subject) -> Result<Vec<Evaluation<'_>>, Error> {
    let Some(networks) = &subject.networks else {
        let unselected =
            |why| Evaluation { attachment: None, conf: &subject.conf, answer: Err(why), notes: Vec::new() };
        return Ok(vec![match unselected_network(subject)? {
            Some(why) => unselected(why),
            None => Evaluation::of(subject, None, &subject.conf)?,
        }]);
    };
    let own = |name: &str| networks.networks.iter().any(|network| network.name == name);
    let asking = networks.evaluated.iter();
    asking.map(|one| Evaluation::of(subject, own(&one.name).then_some(one.name.as_str()), &one.conf)).collect()
}

/// Why Multus does not run the configuration for the pod.
///
/// # Errors
/// An annotation that selects networks is wrong.
pub(super) fn unselected_network(subject: &Subject) -> Result<Option<String>, Error> {
    let (name, pod) = (&subject.conf.name, &subject.facts.pod);
    if !subject.as_attachment {
        return Ok(None);
    }
    let selected = networks(pod)?.elements;
    let default = default_network(pod, &pod.namespace)?.elements;
    if selected.iter().chain(&default).any(|one| one.name == *name) {
        return Ok(None);
    }
    let names: Vec<&str> = selected.iter().map(|one| one.name.as_str()).collect();
    let found = match (pod.annotations.contains_key(NETWORKS), names.is_empty()) {
        (false, _) => "which is not set".to_owned(),
        (true, true) => "which selects none".to_owned(),
        (true, false) => format!("which selects {}", names.join(", ")),
    };
    Ok(Some(format!("network {name} is not selected by annotation {NETWORKS}, {found}")))
}

/// Whether the chain has a redirection.
pub(super) fn redirects(chain: &[Block]) -> bool {
    chain.iter().any(|block| SubPlugin::of(block) == Some(SubPlugin::IstioRedirect))
}

impl<'a> Evaluation<'a> {
    fn of(subject: &Subject, attachment: Option<&'a str>, conf: &'a NetConf) -> Result<Self, Error> {
        let pod = &subject.facts.pod;
        let wanted = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: None };
        if let Some(reason) = skip_reason(conf, &wanted) {
            return Ok(Self { attachment, conf, answer: Err(reason.to_string()), notes: Vec::new() });
        }
        let (in_chain, is_primary) = (redirects(&conf.chain), conf.primary.is_some());
        let has_facts = cluster::source(&conf.kubernetes).is_some();
        // An attachment without a source of facts goes by its configuration alone, where that can be.
        let facts = (has_facts || in_chain || is_primary).then_some(&subject.facts);
        let named = |error| match attachment {
            Some(name) => about(name, error),
            None => error,
        };
        let mut output = desired_policy::output(&conf.chain, conf, facts).map_err(named)?;
        let mut notes = Vec::new();
        // A primary plugin may have the environment of a pod of the cluster for a source.
        if !has_facts && !is_primary {
            notes.push(if in_chain { NO_SOURCE } else { CONFIGURATION_ALONE }.to_owned());
        }
        notes.extend(std::mem::take(&mut output.notes).into_iter().map(|note| match note.severity {
            Severity::Info => note.text,
            Severity::Warning => format!("warning: {}", note.text),
        }));
        Ok(Self { attachment, conf, answer: Ok(output), notes })
    }

    /// What it asks for.
    pub(super) fn policy(&self) -> Policy {
        self.answer.as_ref().map(|output| output.policy.clone()).unwrap_or_default()
    }

    /// Why, or why not, in one line.
    pub(super) fn decision(&self) -> String {
        match &self.answer {
            Ok(output) => output.decision.to_string(),
            Err(why) => format!("not redirected: {why}"),
        }
    }

    /// Whose word each setting of the redirection is.
    pub(super) fn settings(&self) -> impl Iterator<Item = (&'static str, String)> {
        let settings = self.answer.iter().flat_map(|output| &output.origins.settings);
        settings.map(|(key, source)| (*key, word(source)))
    }

    /// Whose word each exclusion is.
    pub(super) fn exclusions(&self) -> impl Iterator<Item = (&Exclusion, String)> {
        let exclusions = self.answer.iter().flat_map(|output| &output.origins.exclusions);
        exclusions.map(|(exclusion, source)| (exclusion, word(source)))
    }

    /// What the log of an ADD would say.
    pub(super) fn notes(&self) -> impl Iterator<Item = String> {
        self.notes.iter().map(|note| match self.attachment {
            Some(name) => format!("network {name}: {note}"),
            None => note.clone(),
        })
    }
}

/// A source; the path of an attachment's block names the attachment.
fn word(source: &SettingSource) -> String {
    match source {
        SettingSource::Configuration(path) if path.starts_with("network ") => path.clone(),
        other => other.to_string(),
    }
}

/// `NF_CT_STATE_BIT` of a new connection (linux/netfilter/nf_conntrack_common.h).
const NEW: u32 = 8;

/// Whether the packet meets all conditions of a rule of iptables'.
pub(super) fn meets(packet: &Packet, rule: &Rule) -> bool {
    let net =
        |net: &Option<Is<IpNet>>, address: IpAddr| net.as_ref().is_none_or(|is| is.value.contains(&address) != is.not);
    net(&rule.source, packet.source.ip())
        && net(&rule.destination, packet.destination.ip())
        && interface(rule.in_interface.as_ref(), packet.in_interface.as_deref())
        && interface(rule.out_interface.as_ref(), packet.out_interface.as_deref())
        && rule.protocol.is_none_or(|protocol| protocol == packet.protocol)
        && rule.matches.iter().all(|condition| holds(packet, condition))
}

/// A `+` at the end stands for whatever follows.
fn interface(wanted: Option<&Is<String>>, name: Option<&str>) -> bool {
    wanted.is_none_or(|Is { not, value }| {
        let name = name.unwrap_or_default();
        let same = match value.strip_suffix('+') {
            Some(prefix) => name.starts_with(prefix),
            None => name == value,
        };
        same != *not
    })
}

/// The UID and GID of the socket that a packet leaves by; what comes in has none.
fn owner_condition(packet: &Packet) -> Option<(u32, u32)> {
    match packet.origin {
        Origin::Process { uid, gid } if packet.out_interface.is_some() => Some((uid, gid)),
        Origin::Process { .. } | Origin::Outside => None,
    }
}

/// A first packet is of a new connection: neither known nor out of place, its connection without a mark.
fn holds(packet: &Packet, condition: &Match) -> bool {
    let within = |range: PortRange, port: u16| (range.first..=range.last).contains(&port);
    let id = |is: &Is<IdRange>, id: Option<u32>| {
        // Without a socket neither the condition nor its opposite holds (xt_owner.c).
        id.is_some_and(|id| (is.value.first..=is.value.last).contains(&id) != is.not)
    };
    match condition {
        Match::DestinationPort(is) => within(is.value, packet.destination.port()) != is.not,
        Match::SourcePort(is) => within(is.value, packet.source.port()) != is.not,
        Match::DestinationPorts(is) => is.value.iter().any(|range| within(*range, packet.destination.port())) != is.not,
        Match::Uid(is) => id(is, owner_condition(packet).map(|(uid, _)| uid)),
        Match::Gid(is) => id(is, owner_condition(packet).map(|(_, gid)| gid)),
        Match::CtState(CtState::Invalid | CtState::RelatedOrEstablished) => false,
        Match::Mark(is) => (packet.mark == is.value) != is.not,
        Match::Connmark(mark) => *mark == 0,
    }
}

/// Whether the packet meets all conditions of a native rule.
pub(super) fn meets_native(packet: &Packet, rule: &native::NativeRule) -> bool {
    rule.family.is_none_or(|family| family == packet.family())
        && rule.conditions.iter().all(|condition| holds_native(packet, condition))
}

/// What can't be loaded ends the rule, whichever way round the condition is (`NFT_BREAK`).
fn holds_native(packet: &Packet, condition: &Condition) -> bool {
    if condition.key == Key::CtState {
        let asked = condition.values.as_slice().iter().any(|span| span.first & u128::from(NEW) != 0);
        return asked != condition.not;
    }
    loaded(packet, condition.key).is_some_and(|value| among(value, &condition.values) != condition.not)
}

fn among(value: u128, spans: &Spans) -> bool {
    spans.as_slice().iter().any(|span| (span.first..=span.last).contains(&value))
}

fn loaded(packet: &Packet, key: Key) -> Option<u128> {
    let address = |family: Family, address: IpAddr| match (family, address) {
        (Family::Ip, IpAddr::V4(address)) => Some(u32::from(address).into()),
        (Family::Ip6, IpAddr::V6(address)) => Some(address.into()),
        _ => None,
    };
    match key {
        // Where there is none, the name is empty (nft_meta.c, `nft_meta_store_ifname`).
        Key::InInterface => Some(filled(packet.in_interface.as_deref().unwrap_or_default())),
        Key::OutInterface => Some(filled(packet.out_interface.as_deref().unwrap_or_default())),
        Key::Source(family) => address(family, packet.source.ip()),
        Key::Destination(family) => address(family, packet.destination.ip()),
        // IPPROTO_TCP, IPPROTO_UDP.
        Key::Protocol => Some(match packet.protocol {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
        }),
        Key::SourcePort => Some(packet.source.port().into()),
        Key::DestinationPort => Some(packet.destination.port().into()),
        Key::Uid => owner_condition(packet).map(|(uid, _)| uid.into()),
        Key::Gid => owner_condition(packet).map(|(_, gid)| gid.into()),
        Key::Mark => Some(packet.mark.into()),
        Key::CtMark => Some(0),
        Key::CtState => None,
    }
}

/// A name as native rules compare it: sixteen bytes, filled with zeros, as a number.
fn filled(name: &str) -> u128 {
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
    u128::from_be_bytes(bytes)
}

/// One exclusion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exemption {
    /// Whose: `uid 1337`, `uid 1000-1999`, `gid 7`, `every process`.
    pub who: String,
    /// `tcp`, `udp`, or `everything`.
    pub protocol: String,
    /// Destination ports; none is every port.
    pub ports: Vec<String>,
    /// Where to: an address, a range, or `anywhere`.
    pub to: String,
    /// At whose word; several may have asked for the same.
    pub sources: Vec<String>,
}

impl Exemption {
    /// What of that owner's traffic it is, in one line.
    #[must_use]
    pub fn what(&self) -> String {
        let mut words = vec![self.protocol.clone()];
        match self.ports.as_slice() {
            [] => {}
            [one] => words.push(format!("port {one}")),
            several => words.push(format!("ports {}", several.join(", "))),
        }
        words.push(format!("to {}", self.to));
        words.join(" ")
    }
}

/// The exclusions that hold, each with whoever asked for it.
pub(super) fn exemptions<'a>(
    held: impl IntoIterator<Item = &'a Exclusion>,
    asked: impl Iterator<Item = (&'a Exclusion, String)>,
) -> Vec<Exemption> {
    let asked: Vec<_> = asked.collect();
    let sources = |exclusion: &Exclusion| {
        let mut sources: Vec<String> = Vec::new();
        // Ranges that touch are one by now.
        let merged = |owner: TrafficOwner| exclusion.owner != TrafficOwner::Any && exclusion.owner.covers(owner);
        let part_of = |other: &Exclusion| {
            (other.owner == exclusion.owner || merged(other.owner))
                && Exclusion { owner: exclusion.owner, ..other.clone() } == *exclusion
        };
        for (_, source) in asked.iter().filter(|(other, _)| part_of(other)) {
            if !sources.contains(source) {
                sources.push(source.clone());
            }
        }
        sources
    };
    let exemption = |exclusion: &Exclusion| Exemption {
        who: owner(exclusion.owner),
        protocol: exclusion.protocol.map_or_else(|| "everything".to_owned(), |protocol| protocol.to_string()),
        ports: exclusion.ports.iter().map(ToString::to_string).collect(),
        to: exclusion.destination.map_or_else(|| "anywhere".to_owned(), |net| net.to_string()),
        sources: sources(exclusion),
    };
    held.into_iter().map(exemption).collect()
}

/// Whose, in words.
pub(super) fn owner(owner: TrafficOwner) -> String {
    match owner {
        TrafficOwner::Any => "every process".to_owned(),
        TrafficOwner::Uid(range) => format!("uid {range}"),
        TrafficOwner::Gid(range) => format!("gid {range}"),
    }
}
