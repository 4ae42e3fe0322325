//! The C structures of xtables matches and targets as bytes: each has a name, a revision and an info block
//! (linux/netfilter/xt_*.h), padded to eight bytes as by `XT_ALIGN`.

use crate::firewall::expression::Extension;
use crate::firewall::rule::{Condition, ESTABLISHED_OR_RELATED, Family, INVALID, Key, MULTIPORT_SLOTS, Target};
use crate::firewall::set::{Span, Spans};

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
/// `-m multiport`, and `XT_MULTIPORT_DESTINATION`.
pub(super) const MULTIPORT: &str = "multiport";
const MULTIPORT_DESTINATION: u8 = 1;
/// `XT_CONNTRACK_STATE`; the bits of `XT_CONNTRACK_STATE_BIT` and `XT_CONNTRACK_STATE_INVALID` are those of nf_tables.
const CONNTRACK_STATE: u16 = 1;
/// `NF_NAT_RANGE_PROTO_SPECIFIED`.
const PORT_GIVEN: u32 = 2;
/// `XT_CONNMARK_SAVE`, `XT_CONNMARK_RESTORE`.
const CONNMARK_SAVE: u8 = 1;
const CONNMARK_RESTORE: u8 = 2;
const ALL_BITS: u32 = u32::MAX;

/// Encodes a condition in the empty `info`; `None` if iptables uses no extension for it.
pub(super) fn of_match<'a>(condition: &Condition, info: &'a mut Info) -> Option<Extension<'a>> {
    let Condition { key, not, values } = condition;
    match (key, values.single()) {
        (Key::Uid, Some(ids)) => Some(owner(info, OWNER_UID, *not, ids)),
        (Key::Gid, Some(ids)) => Some(owner(info, OWNER_GID, *not, ids)),
        (Key::DestinationPort, None) => Some(multiport(info, *not, values.as_slice())),
        (Key::CtState, Some(Span { first: state @ (INVALID | ESTABLISHED_OR_RELATED), .. })) if !not => {
            Some(conntrack(info, narrow(state)))
        }
        // struct xt_connmark_mtinfo1 { mark, mask, invert }
        (Key::CtMark, Some(mark)) if !not => {
            Some(info.u32(narrow(mark.first)).u32(ALL_BITS).u8(0).named("connmark", 1))
        }
        _ => None,
    }
}

/// Returns a number that is small enough because of its key.
fn narrow<N: TryFrom<u128> + Default>(number: u128) -> N {
    N::try_from(number).unwrap_or_default()
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
fn owner(info: &mut Info, which: u8, not: bool, ids: Span) -> Extension<'_> {
    let ids = (narrow(ids.first), narrow(ids.last));
    let [uid, gid] = if which == OWNER_UID { [ids, (0, 0)] } else { [(0, 0), ids] };
    info.u32(uid.0).u32(uid.1).u32(gid.0).u32(gid.1);
    info.u8(which).u8(if not { which } else { 0 }).named("owner", 1)
}

/// `struct xt_multiport_v1 { flags, count, ports[15], pflags[15], invert }`; a flag marks the first of two slots that
/// form a range.
fn multiport<'a>(info: &'a mut Info, not: bool, ports: &[Span]) -> Extension<'a> {
    let mut slots: Vec<(u16, u8)> = Vec::new();
    for range in ports {
        slots.push((narrow(range.first), u8::from(!range.is_one())));
        slots.extend((!range.is_one()).then(|| (narrow(range.last), 0)));
    }
    slots.truncate(MULTIPORT_SLOTS);
    let count = u8::try_from(slots.len()).unwrap_or_default();
    slots.resize(MULTIPORT_SLOTS, (0, 0));
    info.u8(MULTIPORT_DESTINATION).u8(count);
    let info = slots.iter().fold(info, |info, (port, _)| info.u16(*port));
    let info = slots.iter().fold(info, |info, (_, flag)| info.u8(*flag));
    info.u8(u8::from(not)).named(MULTIPORT, 1)
}

/// The offset of the states in `struct xt_conntrack_mtinfo3`, behind eight addresses, expiry, protocol and ports, and the
/// flags of the match and of its negation.
const STATES: usize = 8 * 16 + 2 * 4 + 5 * 2 + 2 * 2;

fn conntrack(info: &mut Info, states: u16) -> Extension<'_> {
    info.zeros(STATES - 2 * 2).u16(CONNTRACK_STATE).u16(0).u16(states).u16(0);
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

/// Decodes a match, regardless of those bytes that detour always writes as the same.
pub(super) fn to_match(Extension { name, revision, info }: Extension<'_>) -> Option<Condition> {
    let is = |key, number: u32| Some(Condition::is(key, Spans::one(number)));
    match (name, revision) {
        ("owner", 1) => {
            let (key, at) = if info.get(16) == Some(&OWNER_UID) { (Key::Uid, 0) } else { (Key::Gid, 8) };
            let values = Spans::of(u32_at(info, at)?, u32_at(info, at + 4)?);
            Some(Condition { key, not: *info.get(17)? != 0, values })
        }
        ("conntrack", 3) => is(Key::CtState, u16_at(info, STATES)?.into()),
        ("connmark", 1) => is(Key::CtMark, u32_at(info, 0)?),
        _ => None,
    }
}

/// Decodes a target, regardless of those bytes that detour always writes as the same.
pub(super) fn to_target(Extension { name, revision, info }: Extension<'_>, family: Family) -> Option<Target> {
    match (name, revision) {
        ("REDIRECT", 0) => Some(Target::Redirect(be16_at(info, if family == Family::Ip { 16 } else { 36 })?)),
        ("CT", 2) => Some(Target::Zone(u16_at(info, 2)?)),
        ("TPROXY", 1) => Some(Target::Tproxy { port: be16_at(info, 24)?, mark: u32_at(info, 4)? }),
        ("MARK", 2) => Some(Target::SetMark(u32_at(info, 0)?)),
        ("CONNMARK", 2) if info.get(14) == Some(&CONNMARK_SAVE) => Some(Target::SaveMark),
        ("CONNMARK", 2) => Some(Target::RestoreMark),
        _ => None,
    }
}

/// Decodes `-m multiport --dports`, with the ports in any order; `None` for another one.
pub(super) fn to_multiport(extension: &Extension<'_>) -> Option<Condition> {
    let info = extension.info;
    let (count, flags) = (usize::from(*info.get(1)?), info.get(32..32 + MULTIPORT_SLOTS)?);
    let mut ports = Vec::new();
    let mut slot = 0;
    while slot < count {
        let first = u16_at(info, 2 + 2 * slot)?;
        slot += usize::from(*flags.get(slot)? != 0);
        ports.push(Span { first: first.into(), last: u16_at(info, 2 + 2 * slot)?.into() });
        slot += 1;
    }
    let not = *info.get(47)? != 0;
    let is_same = multiport(&mut Info::new(), not, &ports) == *extension;
    is_same.then(|| Condition { key: Key::DestinationPort, not, values: ports.into_iter().collect() })
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
