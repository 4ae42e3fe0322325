//! What leaves untouched although the pod is redirected, in words, and at whose word.

use crate::policy::{Exclusion, TrafficOwner};
use serde::Serialize;

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
