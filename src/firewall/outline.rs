//! Rules of any tool without their conditions: what they do with a packet, and in which chain it continues.

use super::expression::{Ct, DATA, DESTINATION_NAT, LIST_ELEMENT, NAME, NftVerdict, VERDICT, VERDICT_REGISTER};
use super::target::Target;
use crate::netlink::attributes::{self, find, find_be32, find_text};

/// What a rule does with a packet that meets its conditions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Effect {
    /// Something else.
    #[default]
    Other,
    /// It sends the packet to a local port.
    ToPort,
    /// It changes the destination to another address.
    ToAddress,
    /// It sets the zone of connection tracking.
    Zone,
}

/// A rule of any tool without its conditions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outline {
    /// What it does.
    pub(super) effect: Effect,
    /// The chain in which the packet continues.
    pub(super) chain: Option<String>,
    /// Whether a map decides in which chain the packet continues.
    pub(super) uses_map: bool,
}

impl Outline {
    /// Returns the outline of a rule of detour.
    pub(super) fn of(target: &Target) -> Self {
        let effect = match target {
            Target::Redirect(_) | Target::Tproxy { .. } => Effect::ToPort,
            Target::Zone(_) => Effect::Zone,
            _ => Effect::Other,
        };
        let chain = match target {
            Target::Jump(chain) | Target::Goto(chain) => Some(chain.to_string()),
            _ => None,
        };
        Self { effect, chain, uses_map: false }
    }

    /// Reads the expressions of a rule as the kernel lists them. Unlike [`Expression`](super::expression::Expression), it accepts every expression.
    pub(super) fn read(list: &[u8]) -> Self {
        let mut outline = Self::default();
        for (_, element) in attributes::parse(list).filter(|(kind, _)| *kind == LIST_ELEMENT) {
            let data = find(element, DATA).unwrap_or_default();
            match find_text(element, NAME).unwrap_or_default() {
                "redir" | "tproxy" => outline.effect = Effect::ToPort,
                "nat" if find_be32(data, 1) == Some(DESTINATION_NAT) => outline.effect = Effect::ToAddress,
                "ct" if find(data, 4).is_some() && find_be32(data, 2) == Some(Ct::Zone as u32) => {
                    outline.effect = Effect::Zone;
                }
                "target" => match find_text(data, 1).unwrap_or_default() {
                    "REDIRECT" | "TPROXY" => outline.effect = Effect::ToPort,
                    "DNAT" | "NETMAP" => outline.effect = Effect::ToAddress,
                    // struct xt_ct_target_info_v1 { flags, zone, … }
                    "CT" if find(data, 3).and_then(|info| info.get(2..4)).is_some_and(|zone| zone != [0, 0]) => {
                        outline.effect = Effect::Zone;
                    }
                    _ => {}
                },
                "immediate" => {
                    let verdict = find(data, 2).and_then(|value| NftVerdict::read(find(value, VERDICT)?));
                    outline.chain = verdict.and_then(|verdict| Some(verdict.chain?.to_owned())).or(outline.chain);
                }
                "lookup" => outline.uses_map |= find_be32(data, 3) == Some(VERDICT_REGISTER),
                _ => {}
            }
        }
        outline
    }
}
