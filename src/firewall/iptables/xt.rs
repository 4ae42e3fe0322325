//! The C structures that xtables extensions take, as bytes: each a name, a revision and an info
//! block (linux/netfilter/xt_*.h), padded to eight bytes as `XT_ALIGN` does.

use crate::firewall::rule::{CtState, Family, Is, Match, Target};
use crate::policy::{IdRange, PortRange};

/// An extension's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::firewall) struct Extension {
    /// `owner`, `REDIRECT`, …
    pub name: String,
    /// Which version of the structure.
    pub revision: u32,
    /// The structure.
    pub info: Vec<u8>,
}

/// A structure being written, fields in the order of the C declaration.
#[derive(Default)]
struct Info(Vec<u8>);

impl Info {
    fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }
    fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }
    fn be16(mut self, value: u16) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }
    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }
    fn zeros(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }
    fn named(mut self, name: &str, revision: u32) -> Extension {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
        Extension { name: name.to_owned(), revision, info: self.0 }
    }
}

/// `XT_OWNER_UID`, `XT_OWNER_GID`.
const OWNER_UID: u8 = 1;
const OWNER_GID: u8 = 2;
/// `XT_MULTIPORT_DESTINATION`.
const MULTIPORT_DESTINATION: u8 = 1;
const MULTIPORT_PLACES: usize = 15;
/// `XT_CONNTRACK_STATE`, and the bits of `XT_CONNTRACK_STATE_BIT` and `XT_CONNTRACK_STATE_INVALID`.
const CONNTRACK_STATE: u16 = 1;
const STATE_INVALID: u16 = 1;
const STATE_RELATED_OR_ESTABLISHED: u16 = 2 | 4;
/// `NF_NAT_RANGE_PROTO_SPECIFIED`.
const RANGE_OF_PORTS: u32 = 2;
/// `XT_CONNMARK_SAVE`, `XT_CONNMARK_RESTORE`.
const CONNMARK_SAVE: u8 = 1;
const CONNMARK_RESTORE: u8 = 2;
const EVERY_BIT: u32 = u32::MAX;

/// The extension that checks `condition`; `None` where nf_tables has an expression for it.
pub(super) fn of_match(condition: &Match) -> Option<Extension> {
    match condition {
        Match::Uid(ids) => Some(owner(OWNER_UID, ids)),
        Match::Gid(ids) => Some(owner(OWNER_GID, ids)),
        Match::DestinationPorts(ports) => Some(multiport(ports)),
        Match::CtState(state) => Some(conntrack(*state)),
        // struct xt_connmark_mtinfo1 { mark, mask, invert }
        Match::Connmark(mark) => Some(Info::default().u32(*mark).u32(EVERY_BIT).u8(0).named("connmark", 1)),
        Match::DestinationPort(_) | Match::SourcePort(_) | Match::Mark(_) => None,
    }
}

/// The extension that does what `target` says; `None` for a verdict.
pub(super) fn of_target(target: &Target, family: Family) -> Option<Extension> {
    match target {
        Target::Redirect(port) => Some(redirect(*port, family)),
        // struct xt_ct_target_info_v1 { flags, zone, ct_events, exp_events, helper[16], timeout[32], *ct }
        Target::Zone(zone) => Some(Info::default().u16(0).u16(*zone).zeros(4 + 4 + 16 + 32 + 4 + 8).named("CT", 2)),
        // struct xt_tproxy_target_info_v1 { mark_mask, mark_value, laddr, lport }
        Target::Tproxy { port, mark } => {
            Some(Info::default().u32(EVERY_BIT).u32(*mark).zeros(16).be16(*port).named("TPROXY", 1))
        }
        // struct xt_mark_tginfo2 { mark, mask }
        Target::SetMark(mark) => Some(Info::default().u32(*mark).u32(EVERY_BIT).named("MARK", 2)),
        Target::SaveMark => Some(connmark(CONNMARK_SAVE)),
        Target::RestoreMark => Some(connmark(CONNMARK_RESTORE)),
        Target::Accept | Target::Return | Target::Drop | Target::Jump(_) => None,
    }
}

/// `struct xt_owner_match_info { uid_min, uid_max, gid_min, gid_max, match, invert }`.
fn owner(which: u8, ids: &Is<IdRange>) -> Extension {
    let IdRange { first, last } = ids.value;
    let [uid, gid] = if which == OWNER_UID { [(first, last), (0, 0)] } else { [(0, 0), (first, last)] };
    let info = Info::default().u32(uid.0).u32(uid.1).u32(gid.0).u32(gid.1);
    info.u8(which).u8(if ids.not { which } else { 0 }).named("owner", 1)
}

/// `struct xt_multiport_v1 { flags, count, ports[15], pflags[15], invert }`; a flag says that the
/// next place is the range's end.
fn multiport(ports: &Is<Vec<PortRange>>) -> Extension {
    let mut places: Vec<(u16, u8)> = Vec::new();
    for range in &ports.value {
        places.push((range.first, u8::from(range.first != range.last)));
        if range.first != range.last {
            places.push((range.last, 0));
        }
    }
    places.truncate(MULTIPORT_PLACES);
    let count = u8::try_from(places.len()).unwrap_or_default();
    places.resize(MULTIPORT_PLACES, (0, 0));
    let info = Info::default().u8(MULTIPORT_DESTINATION).u8(count);
    let info = places.iter().fold(info, |info, (port, _)| info.u16(*port));
    let info = places.iter().fold(info, |info, (_, flag)| info.u8(*flag));
    info.u8(u8::from(ports.not)).named("multiport", 1)
}

/// `struct xt_conntrack_mtinfo3`: eight addresses, expiry, protocol and ports, then the flags.
fn conntrack(state: CtState) -> Extension {
    let mask = match state {
        CtState::Invalid => STATE_INVALID,
        CtState::RelatedOrEstablished => STATE_RELATED_OR_ESTABLISHED,
    };
    let info = Info::default().zeros(8 * 16 + 2 * 4 + 5 * 2).u16(CONNTRACK_STATE).u16(0).u16(mask).u16(0);
    info.zeros(4 * 2).named("conntrack", 3)
}

/// `struct nf_nat_ipv4_multi_range_compat { rangesize, range[1] }` of `struct nf_nat_ipv4_range
/// { flags, min_ip, max_ip, min, max }`; IPv6 has `struct nf_nat_range` with longer addresses.
fn redirect(port: u16, family: Family) -> Extension {
    let info = match family {
        Family::Ip => Info::default().u32(1).u32(RANGE_OF_PORTS).zeros(2 * 4),
        Family::Ip6 => Info::default().u32(RANGE_OF_PORTS).zeros(2 * 16),
    };
    info.be16(port).be16(port).named("REDIRECT", 0)
}

/// `struct xt_connmark_tginfo2 { ctmark, ctmask, nfmask, shift_dir, shift_bits, mode }`.
fn connmark(mode: u8) -> Extension {
    Info::default().u32(0).u32(EVERY_BIT).u32(EVERY_BIT).u8(0).u8(0).u8(mode).named("CONNMARK", 2)
}

/// The condition that an extension checks; `None` where it is none of ours.
pub(super) fn to_match(extension: &Extension) -> Option<Match> {
    let found = match (extension.name.as_str(), extension.revision) {
        ("owner", 1) => to_owner(&extension.info)?,
        ("multiport", 1) => to_multiport(&extension.info)?,
        ("conntrack", 3) => {
            let candidates = [CtState::Invalid, CtState::RelatedOrEstablished];
            Match::CtState(candidates.into_iter().find(|state| conntrack(*state) == *extension)?)
        }
        ("connmark", 1) => Match::Connmark(u32_at(&extension.info, 0)?),
        _ => return None,
    };
    // What was left unread must be what we would write, or the rule is not what it seems.
    (of_match(&found).as_ref() == Some(extension)).then_some(found)
}

/// What an extension does; `None` where it is none of ours.
pub(super) fn to_target(extension: &Extension, family: Family) -> Option<Target> {
    let info = &extension.info;
    let found = match (extension.name.as_str(), extension.revision) {
        ("REDIRECT", 0) => Target::Redirect(be16_at(info, if family == Family::Ip { 16 } else { 36 })?),
        ("CT", 2) => Target::Zone(u16_at(info, 2)?),
        ("TPROXY", 1) => Target::Tproxy { port: be16_at(info, 24)?, mark: u32_at(info, 4)? },
        ("MARK", 2) => Target::SetMark(u32_at(info, 0)?),
        ("CONNMARK", 2) if info.get(14) == Some(&CONNMARK_SAVE) => Target::SaveMark,
        ("CONNMARK", 2) => Target::RestoreMark,
        _ => return None,
    };
    (of_target(&found, family).as_ref() == Some(extension)).then_some(found)
}

fn to_owner(info: &[u8]) -> Option<Match> {
    let (which, invert) = (*info.get(16)?, *info.get(17)?);
    let at = if which == OWNER_UID { 0 } else { 8 };
    let ids = Is { not: invert != 0, value: IdRange { first: u32_at(info, at)?, last: u32_at(info, at + 4)? } };
    Some(if which == OWNER_UID { Match::Uid(ids) } else { Match::Gid(ids) })
}

fn to_multiport(info: &[u8]) -> Option<Match> {
    let count = usize::from(*info.get(1)?);
    let flags = info.get(32..32 + MULTIPORT_PLACES)?;
    let mut ports = Vec::new();
    let mut place = 0;
    while place < count {
        let first = u16_at(info, 2 + 2 * place)?;
        place += usize::from(*flags.get(place)? != 0);
        ports.push(PortRange { first, last: u16_at(info, 2 + 2 * place)? });
        place += 1;
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
