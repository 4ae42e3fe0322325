//! The C structures of xtables matches and targets as bytes: each has a name, a revision and an info block
//! (linux/netfilter/xt_*.h), padded to eight bytes as by `XT_ALIGN`.

use crate::firewall::expression::Extension;
use crate::firewall::rule::{CtState, Family, Is, MULTIPORT_SLOTS, Match};
use crate::firewall::target::Target;
use crate::policy::{IdRange, PortRange};

/// The length of the longest structure, `struct xt_conntrack_mtinfo3`, with its padding.
const LONGEST: usize = 168;

/// A C structure being written, field by field in the order of its declaration.
pub(super) struct Info {
    bytes: [u8; LONGEST],
    length: usize,
}

impl Info {
    pub(super) const fn new() -> Self {
        Self { bytes: [0; LONGEST], length: 0 }
    }

    fn field<const N: usize>(&mut self, value: [u8; N]) -> &mut Self {
        if let Some(field) = self.bytes.get_mut(self.length..).and_then(<[u8]>::first_chunk_mut) {
            *field = value;
        }
        self.zeros(N)
    }
    fn u8(&mut self, value: u8) -> &mut Self {
        self.field([value])
    }
    fn u16(&mut self, value: u16) -> &mut Self {
        self.field(value.to_ne_bytes())
    }
    fn be16(&mut self, value: u16) -> &mut Self {
        self.field(value.to_be_bytes())
    }
    fn u32(&mut self, value: u32) -> &mut Self {
        self.field(value.to_ne_bytes())
    }
    const fn zeros(&mut self, count: usize) -> &mut Self {
        self.length += count;
        self
    }
    fn named(&self, name: &'static str, revision: u32) -> Extension<'_> {
        Extension { name, revision, info: &self.bytes[..self.length.next_multiple_of(8)] }
    }
}

/// `XT_OWNER_UID`, `XT_OWNER_GID`.
const OWNER_UID: u8 = 1;
const OWNER_GID: u8 = 2;
/// `XT_MULTIPORT_DESTINATION`.
const MULTIPORT_DESTINATION: u8 = 1;
/// `XT_CONNTRACK_STATE`, and the bits of `XT_CONNTRACK_STATE_BIT` and `XT_CONNTRACK_STATE_INVALID`.
const CONNTRACK_STATE: u16 = 1;
const STATE_INVALID: u16 = 1;
const STATE_RELATED_OR_ESTABLISHED: u16 = 2 | 4;
/// `NF_NAT_RANGE_PROTO_SPECIFIED`.
const PORT_GIVEN: u32 = 2;
/// `XT_CONNMARK_SAVE`, `XT_CONNMARK_RESTORE`.
const CONNMARK_SAVE: u8 = 1;
const CONNMARK_RESTORE: u8 = 2;
const ALL_BITS: u32 = u32::MAX;

/// Encodes a condition in the empty `info`; `None` if nf_tables has an expression for it.
pub(super) fn of_match<'a>(condition: &Match, info: &'a mut Info) -> Option<Extension<'a>> {
    match condition {
        Match::Uid(ids) => Some(owner(info, OWNER_UID, ids)),
        Match::Gid(ids) => Some(owner(info, OWNER_GID, ids)),
        Match::DestinationPorts(ports) => Some(multiport(info, ports)),
        Match::CtState(state) => Some(conntrack(info, *state)),
        // struct xt_connmark_mtinfo1 { mark, mask, invert }
        Match::Connmark(mark) => Some(info.u32(*mark).u32(ALL_BITS).u8(0).named("connmark", 1)),
        Match::DestinationPort(_) | Match::SourcePort(_) | Match::Mark(_) => None,
    }
}

/// Encodes a target in the empty `info`; `None` for a verdict or a native target.
pub(super) fn of_target<'a>(target: &Target, family: Family, info: &'a mut Info) -> Option<Extension<'a>> {
    match target {
        Target::Redirect(port) => Some(redirect(info, *port, family)),
        // struct xt_ct_target_info_v1 { flags, zone, ct_events, exp_events, helper[16], timeout[32], *ct }
        Target::Zone(zone) => Some(info.u16(0).u16(*zone).zeros(4 + 4 + 16 + 32 + 4 + 8).named("CT", 2)),
        // struct xt_tproxy_target_info_v1 { mark_mask, mark_value, laddr, lport }
        Target::Tproxy { port, mark } => Some(info.u32(ALL_BITS).u32(*mark).zeros(16).be16(*port).named("TPROXY", 1)),
        // struct xt_mark_tginfo2 { mark, mask }
        Target::SetMark(mark) => Some(info.u32(*mark).u32(ALL_BITS).named("MARK", 2)),
        Target::SaveMark => Some(connmark(info, CONNMARK_SAVE)),
        Target::RestoreMark => Some(connmark(info, CONNMARK_RESTORE)),
        _ => None,
    }
}

/// `struct xt_owner_match_info { uid_min, uid_max, gid_min, gid_max, match, invert }`.
fn owner<'a>(info: &'a mut Info, which: u8, ids: &Is<IdRange>) -> Extension<'a> {
    let IdRange { first, last } = ids.value;
    let [uid, gid] = if which == OWNER_UID { [(first, last), (0, 0)] } else { [(0, 0), (first, last)] };
    info.u32(uid.0).u32(uid.1).u32(gid.0).u32(gid.1);
    info.u8(which).u8(if ids.not { which } else { 0 }).named("owner", 1)
}

/// `struct xt_multiport_v1 { flags, count, ports[15], pflags[15], invert }`; a flag marks the first of two slots that
/// form a range.
fn multiport<'a>(info: &'a mut Info, ports: &Is<Vec<PortRange>>) -> Extension<'a> {
    let mut slots: Vec<(u16, u8)> = Vec::new();
    for range in &ports.value {
        slots.push((range.first, u8::from(range.first != range.last)));
        if range.first != range.last {
            slots.push((range.last, 0));
        }
    }
    slots.truncate(MULTIPORT_SLOTS);
    let count = u8::try_from(slots.len()).unwrap_or_default();
    slots.resize(MULTIPORT_SLOTS, (0, 0));
    info.u8(MULTIPORT_DESTINATION).u8(count);
    let info = slots.iter().fold(info, |info, (port, _)| info.u16(*port));
    let info = slots.iter().fold(info, |info, (_, flag)| info.u8(*flag));
    info.u8(u8::from(ports.not)).named("multiport", 1)
}

/// `struct xt_conntrack_mtinfo3`: eight addresses, expiry, protocol and ports, then the flags.
fn conntrack(info: &mut Info, state: CtState) -> Extension<'_> {
    let mask = match state {
        CtState::Invalid => STATE_INVALID,
        CtState::RelatedOrEstablished => STATE_RELATED_OR_ESTABLISHED,
    };
    info.zeros(8 * 16 + 2 * 4 + 5 * 2).u16(CONNTRACK_STATE).u16(0).u16(mask).u16(0);
    info.zeros(4 * 2).named("conntrack", 3)
}

/// `struct nf_nat_ipv4_multi_range_compat { rangesize, range[1] }` of `struct nf_nat_ipv4_range
/// { flags, min_ip, max_ip, min, max }`; IPv6 uses `struct nf_nat_range` with longer addresses.
fn redirect(info: &mut Info, port: u16, family: Family) -> Extension<'_> {
    let info = match family {
        Family::Ip => info.u32(1).u32(PORT_GIVEN).zeros(2 * 4),
        Family::Ip6 => info.u32(PORT_GIVEN).zeros(2 * 16),
    };
    info.be16(port).be16(port).named("REDIRECT", 0)
}

/// `struct xt_connmark_tginfo2 { ctmark, ctmask, nfmask, shift_dir, shift_bits, mode }`.
fn connmark(info: &mut Info, mode: u8) -> Extension<'_> {
    info.u32(0).u32(ALL_BITS).u32(ALL_BITS).u8(0).u8(0).u8(mode).named("CONNMARK", 2)
}

/// Decodes a match; `None` if detour would not write it.
pub(super) fn to_match(extension: Extension<'_>) -> Option<Match> {
    let found = match (extension.name, extension.revision) {
        ("owner", 1) => to_owner(extension.info)?,
        ("multiport", 1) => to_multiport(extension.info)?,
        ("conntrack", 3) => {
            let candidates = [CtState::Invalid, CtState::RelatedOrEstablished];
            Match::CtState(candidates.into_iter().find(|state| conntrack(&mut Info::new(), *state) == extension)?)
        }
        ("connmark", 1) => Match::Connmark(u32_at(extension.info, 0)?),
        _ => return None,
    };
    // The bytes that were not decoded must be those that detour would write, too.
    (of_match(&found, &mut Info::new()) == Some(extension)).then_some(found)
}

/// Decodes a target; `None` if detour would not write it.
pub(super) fn to_target(extension: Extension<'_>, family: Family) -> Option<Target> {
    let info = extension.info;
    let found = match (extension.name, extension.revision) {
        ("REDIRECT", 0) => Target::Redirect(be16_at(info, if family == Family::Ip { 16 } else { 36 })?),
        ("CT", 2) => Target::Zone(u16_at(info, 2)?),
        ("TPROXY", 1) => Target::Tproxy { port: be16_at(info, 24)?, mark: u32_at(info, 4)? },
        ("MARK", 2) => Target::SetMark(u32_at(info, 0)?),
        ("CONNMARK", 2) if info.get(14) == Some(&CONNMARK_SAVE) => Target::SaveMark,
        ("CONNMARK", 2) => Target::RestoreMark,
        _ => return None,
    };
    (of_target(&found, family, &mut Info::new()) == Some(extension)).then_some(found)
}

fn to_owner(info: &[u8]) -> Option<Match> {
    let (which, invert) = (*info.get(16)?, *info.get(17)?);
    let at = if which == OWNER_UID { 0 } else { 8 };
    let ids = Is { not: invert != 0, value: IdRange { first: u32_at(info, at)?, last: u32_at(info, at + 4)? } };
    Some(if which == OWNER_UID { Match::Uid(ids) } else { Match::Gid(ids) })
}

fn to_multiport(info: &[u8]) -> Option<Match> {
    let count = usize::from(*info.get(1)?);
    let flags = info.get(32..32 + MULTIPORT_SLOTS)?;
    let mut ports = Vec::new();
    let mut slot = 0;
    while slot < count {
        let first = u16_at(info, 2 + 2 * slot)?;
        slot += usize::from(*flags.get(slot)? != 0);
        ports.push(PortRange { first, last: u16_at(info, 2 + 2 * slot)? });
        slot += 1;
    }
    Some(Match::DestinationPorts(Is { not: *info.get(47)? != 0, value: ports }))
}

fn u16_at(info: &[u8], at: usize) -> Option<u16> {
    info.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

fn be16_at(info: &[u8], at: usize) -> Option<u16> {
    info.get(at..at + 2)?.try_into().ok().map(u16::from_be_bytes)
}

fn u32_at(info: &[u8], at: usize) -> Option<u32> {
    info.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}
