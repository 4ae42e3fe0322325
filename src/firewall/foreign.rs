//! The live tables of other tools with chains that can divert traffic, and rules of any tool in outline: what they do with a
//! packet, in which chain it continues, and whether they apply to TCP in general or to some packets only.

use super::expression::{
    Counter, DATA, DESTINATION_NAT, LIST_ELEMENT, NAME, NF_DROP, NftVerdict, VERDICT, VERDICT_REGISTER, base, ct, meta,
};
use super::native::rule::TableId;
use super::nfnetlink::{NfError, NfSocket, Verb, nfta};
use super::rule::{Condition, Hook, Rule, Target, protocol_number};
use super::ruleset::TableRules;
use crate::netlink::DumpLimit;
use crate::netlink::attributes::{self, Attributes, find, find_be32, find_be64, find_text};
use crate::policy::Protocol;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// How much is read of the tables of other tools, all together.
const MAX_READ: DumpLimit = DumpLimit { objects: 5000, bytes: 4 << 20 };
/// A priority below this one is before connection tracking, where a rule can set the zone or end the tracking
/// (`NF_IP_PRI_CONNTRACK`).
pub(super) const CONNTRACK_PRIORITY: i32 = -200;

/// Where a chain of another tool is attached, if packets that a redirection captures pass it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachedAt {
    /// The hook.
    pub hook: Hook,
    /// Whether it is of type `nat`.
    pub is_nat: bool,
    /// The priority.
    pub priority: i32,
    /// Whether it drops the packets that no rule accepts.
    pub drops: bool,
}

impl AttachedAt {
    /// Reads the place of a chain as the kernel lists it.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let attached = find(body, nfta::CHAIN_HOOK)?;
        let number = find_be32(attached, nfta::HOOK_NUMBER)?;
        let hook = [Hook::Prerouting, Hook::Input, Hook::Output].into_iter().find(|hook| hook.number() == number)?;
        let priority = i32::from_be_bytes(find(attached, nfta::HOOK_PRIORITY)?.try_into().ok()?);
        let is_nat = find_text(body, nfta::CHAIN_TYPE) == Some("nat");
        let drops = find_be32(body, nfta::CHAIN_POLICY) == Some(NF_DROP);
        Some(Self { hook, is_nat, priority, drops })
    }
}

/// A table of another tool that is none of iptables'.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ForeignTable {
    pub(super) chains: BTreeMap<String, ForeignChain>,
    /// Whether it has more rules than are read.
    pub(super) is_partial: bool,
}

/// A chain of such a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ForeignChain {
    pub(super) at: Option<AttachedAt>,
    pub(super) rules: Vec<Outline>,
}

/// The tables of other tools by family (`NFPROTO_…`) and name.
pub(super) type ForeignTables = BTreeMap<(u8, String), ForeignTable>;

/// Adds a chain as the kernel lists it.
pub(super) fn add_chain(table: &mut ForeignTable, name: &str, at: Option<AttachedAt>) {
    table.chains.entry(name.to_owned()).or_default().at = at;
}

/// Reads the rules of the tables with a chain that can divert traffic.
pub(super) fn read_rules(socket: &mut NfSocket, tables: &mut ForeignTables) -> Result<(), NfError> {
    tables.retain(|_, table| table.chains.values().any(|chain| chain.at.is_some()));
    socket.allow(MAX_READ);
    for ((family, name), table) in tables {
        let which = Attributes::of(|list| list.text(nfta::TABLE, name));
        let read = socket.dump_of(Verb::GetRule, *family, which, |number, body| {
            let of_table = number == *family && find_text(body, nfta::TABLE) == Some(name);
            let chain = find_text(body, nfta::RULE_CHAIN).filter(|_| of_table);
            if let Some(chain) = chain.and_then(|chain| table.chains.get_mut(chain)) {
                chain.rules.push(Outline::read(find(body, nfta::RULE_EXPRESSIONS).unwrap_or_default()));
            }
        });
        match read {
            Err(NfError::TooMany(_)) => table.is_partial = true,
            other => other?,
        }
    }
    Ok(())
}

/// `NFT_CMP_EQ`, `NFT_CMP_NEQ`; `NFT_RANGE_…` has the same values.
const NOT_EQUAL: u32 = 1;
/// `NFT_LOOKUP_F_INV`.
const LOOKUP_INVERTED: u32 = 1;
/// `XT_CT_NOTRACK`.
const XT_NOTRACK: u16 = 1;
/// `NFTA_DATA_VALUE`.
const VALUE: u16 = 1;

/// What a rule does with a packet that meets its conditions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Effect {
    /// Something else.
    #[default]
    Other,
    /// It sends the packet to a local port; 0 if the rule does not name a single one.
    ToPort(u16),
    /// It changes the destination to another address.
    ToAddress,
    /// It sets the zone of connection tracking.
    Zone,
    /// It ends connection tracking of the packet, so that no nat chain sees it.
    NoTrack,
    /// It drops or rejects the packet, or lets a program decide.
    Drop,
}

impl Effect {
    /// Reports whether the packet arrives elsewhere.
    pub(super) const fn translates(self) -> bool {
        matches!(self, Self::ToPort(_) | Self::ToAddress)
    }
}

/// A rule of any tool in outline.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outline {
    /// What it does.
    pub(super) effect: Effect,
    /// The chain in which the packet continues.
    pub(super) chain: Option<String>,
    /// Whether a map decides in which chain the packet continues.
    pub(super) uses_map: bool,
    /// Whether a condition selects packets: by address, port, sender, interface, mark, or a protocol other than TCP. A
    /// negated condition (everything but one address) selects none.
    pub(super) is_narrow: bool,
}

impl Outline {
    /// Returns the outline of a rule that detour could write.
    pub(super) fn of(rule: &Rule) -> Self {
        let effect = match rule.target {
            Target::Redirect(port) | Target::Tproxy { port, .. } => Effect::ToPort(port),
            Target::Zone(_) => Effect::Zone,
            Target::Drop => Effect::Drop,
            _ => Effect::Other,
        };
        let chain = match &rule.target {
            Target::Jump(chain) | Target::Goto(chain) => Some(chain.to_string()),
            _ => None,
        };
        let tcp = Condition::protocols(&[Protocol::Tcp]);
        let selects = |condition: &Condition| !condition.not && *condition != tcp;
        Self { effect, chain, uses_map: false, is_narrow: rule.conditions.iter().any(selects) }
    }

    /// Reads the expressions of a rule as the kernel lists them. Unlike [`Expression`](super::expression::Expression), it accepts every expression.
    pub(super) fn read(list: &[u8]) -> Self {
        let mut outline = Self::default();
        // The ports that the rule has loaded, by register, and whether a protocol was loaded.
        let (mut ports, mut is_protocol): (Vec<(u32, u16)>, bool) = (Vec::new(), false);
        for (_, element) in attributes::parse(list).filter(|(kind, _)| *kind == LIST_ELEMENT) {
            let data = find(element, DATA).unwrap_or_default();
            let value = |kind| find(find(data, kind)?, VALUE);
            let port = |register| {
                let register = find_be32(data, register)?;
                ports.iter().rfind(|(loaded, _)| *loaded == register).map(|(_, port)| *port)
            };
            match find_text(element, NAME).unwrap_or_default() {
                "counter" => continue,
                "immediate" => {
                    let register = find_be32(data, 1).unwrap_or(VERDICT_REGISTER);
                    let port = value(2).and_then(|bytes| Some(u16::from_be_bytes(bytes.get(..2)?.try_into().ok()?)));
                    ports.extend(port.map(|port| (register, port)));
                    match find(data, 2).and_then(|value| NftVerdict::read(find(value, VERDICT)?)) {
                        Some(NftVerdict { chain: Some(chain), .. }) => outline.chain = Some(chain.to_owned()),
                        Some(NftVerdict { code: NF_DROP, .. }) => outline.effect = Effect::Drop,
                        _ => {}
                    }
                    continue;
                }
                "redir" => {
                    let (first, last) = (port(1).unwrap_or_default(), port(2));
                    outline.effect = Effect::ToPort(if last.is_none_or(|last| last == first) { first } else { 0 });
                }
                "tproxy" => outline.effect = Effect::ToPort(port(3).unwrap_or_default()),
                "nat" if find_be32(data, 1) == Some(DESTINATION_NAT) => outline.effect = Effect::ToAddress,
                "ct" if find(data, 4).is_some() && find_be32(data, 2) == Some(ct::ZONE) => {
                    outline.effect = Effect::Zone;
                }
                "notrack" => outline.effect = Effect::NoTrack,
                "reject" | "queue" => outline.effect = Effect::Drop,
                "target" => outline.effect = extension_effect(data).unwrap_or(outline.effect),
                "match" => outline.is_narrow |= extension_is_narrow(data),
                "meta" | "payload" if loads_protocol(data, find_text(element, NAME)) => {
                    is_protocol = true;
                    ports.clear();
                    continue;
                }
                "cmp" => {
                    let is_tcp = is_protocol && value(3) != Some(&[protocol_number(Protocol::Udp)][..]);
                    outline.is_narrow |= find_be32(data, 2) != Some(NOT_EQUAL) && !is_tcp;
                }
                "range" => outline.is_narrow |= find_be32(data, 2) != Some(NOT_EQUAL),
                "lookup" if find_be32(data, 3) == Some(VERDICT_REGISTER) => outline.uses_map = true,
                "lookup" => outline.is_narrow |= find_be32(data, 5) != Some(LOOKUP_INVERTED) && !is_protocol,
                _ => {}
            }
            is_protocol = false;
            ports.clear();
        }
        outline
    }
}

/// A live rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveRule {
    /// The kernel's handle, used to delete the rule or to insert others before it.
    pub handle: u64,
    /// The rule, or the outline of one that detour would not write.
    pub rule: Result<Rule, Outline>,
    /// The packets and bytes that matched it.
    pub counter: Counter,
}

impl LiveRule {
    /// Reads a rule as the kernel lists it; `decode` returns `None` for expressions that detour would not write.
    pub(super) fn read(body: &[u8], decode: impl Fn(&[u8]) -> Option<Rule>) -> Option<Self> {
        let (handle, expressions) =
            (find_be64(body, nfta::RULE_HANDLE)?, find(body, nfta::RULE_EXPRESSIONS).unwrap_or_default());
        let rule = decode(expressions).ok_or_else(|| Outline::read(expressions));
        Some(Self { handle, rule, counter: Counter::read(expressions) })
    }

    /// Returns what the rule does, without its conditions.
    pub(super) fn outline(&self) -> Cow<'_, Outline> {
        match &self.rule {
            Ok(rule) => Cow::Owned(Outline::of(rule)),
            Err(outline) => Cow::Borrowed(outline),
        }
    }

    /// Reports whether the rule is one of `own` in the built-in chain of `hook`, or enters a chain of `own`.
    pub(super) fn is_of(&self, own: &TableRules, hook: Option<Hook>) -> bool {
        let rules = hook.and_then(|hook| own.hooks.get(&hook));
        self.jump_target().is_some_and(|chain| own.has_chain(chain))
            || rules.is_some_and(|rules| self.rule.as_ref().is_ok_and(|rule| rules.contains(rule)))
    }

    /// Returns the chain that the rule jumps to.
    #[must_use]
    pub fn jump_target(&self) -> Option<&str> {
        match &self.rule {
            Ok(rule) => rule.jump_target(),
            Err(outline) => outline.chain.as_deref(),
        }
    }

    /// Returns a rule of `table` as `iptables-save` or `nft` prints it, without the chain.
    #[must_use]
    pub fn text(&self, table: TableId) -> String {
        match &self.rule {
            Ok(rule) => table.text_of(rule),
            Err(_) if matches!(table, TableId::Native(_)) => "(a foreign rule)".to_owned(),
            Err(Outline { chain: Some(chain), .. }) => format!("(a foreign rule, handle {}) -j {chain}", self.handle),
            Err(_) => format!("(a foreign rule, handle {})", self.handle),
        }
    }
}

/// Reports whether an expression loads the family or the transport protocol of the packet: as metadata, or from the header
/// of IPv4 or IPv6 (base 1).
fn loads_protocol(data: &[u8], name: Option<&str>) -> bool {
    let [first, second, third, fourth] = [1, 2, 3, 4].map(|kind| find_be32(data, kind));
    if name == Some("meta") {
        first.is_some() && [meta::FAMILY, meta::PROTOCOL].map(Some).contains(&second)
    } else {
        (second, fourth) == (Some(base::NETWORK), Some(1)) && [Some(9), Some(6)].contains(&third)
    }
}

/// Returns the effect of an xtables target; `None` if it has no effect of its own.
fn extension_effect(data: &[u8]) -> Option<Effect> {
    let info = find(data, 3).unwrap_or_default();
    let be16 = |at: usize| info.get(at..at + 2)?.try_into().ok().map(u16::from_be_bytes);
    let ne16 = |at: usize| info.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes);
    match find_text(data, 1)? {
        // struct nf_nat_ipv4_multi_range_compat, or the longer struct nf_nat_range of IPv6: first and last port
        "REDIRECT" => {
            let at = if info.len() <= 24 { 16 } else { 36 };
            Some(Effect::ToPort(be16(at).filter(|first| be16(at + 2) == Some(*first)).unwrap_or_default()))
        }
        // struct xt_tproxy_target_info_v1 { mark_mask, mark_value, laddr, lport }
        "TPROXY" => Some(Effect::ToPort(be16(24).unwrap_or_default())),
        "DNAT" | "NETMAP" => Some(Effect::ToAddress),
        // struct xt_ct_target_info_v1 { flags, zone, … }
        "CT" if ne16(0).is_some_and(|flags| flags & XT_NOTRACK != 0) => Some(Effect::NoTrack),
        "CT" if ne16(2).is_some_and(|zone| zone != 0) => Some(Effect::Zone),
        "NOTRACK" => Some(Effect::NoTrack),
        "REJECT" | "NFQUEUE" => Some(Effect::Drop),
        _ => None,
    }
}

/// Reports whether an xtables match selects packets.
fn extension_is_narrow(data: &[u8]) -> bool {
    let info = find(data, 3).unwrap_or_default();
    match find_text(data, 1).unwrap_or_default() {
        "comment" => false,
        // struct xt_mark_mtinfo1 { mark, mask, invert }
        "mark" => info.get(8) != Some(&1),
        _ => true,
    }
}
