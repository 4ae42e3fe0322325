//! The rules, and the fixtures that they need, of a network namespace, read from the kernel. `support::kernel` reads
//! the same with `iptables-save`, `nft` and `ip`, which takes a hundred times as long.

use crate::support::new_netns::in_netns;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// `NFNL_SUBSYS_NFTABLES` (linux/netfilter/nfnetlink.h), in the upper byte of a message's type.
const NFTABLES: u16 = 10 << 8;
/// `NFT_MSG_GETTABLE` and so on (linux/netfilter/nf_tables.h), with the attributes that differ between two equal
/// states: handles, positions, counters.
const OBJECTS: [(u16, &[u16]); 4] = [(1, &[4]), (4, &[2, 8, 11]), (7, &[3, 6, 9]), (10, &[10, 16])];
const RULES: u16 = 7;
const SETS: u16 = 10;
const ELEMENTS: u16 = 13;
/// `NFTA_RULE_EXPRESSIONS`.
const EXPRESSIONS: u16 = 4;
/// `RTM_GETADDR`, `RTM_GETROUTE`, `RTM_GETRULE` (linux/rtnetlink.h): the length of the header, and volatile attributes.
const ADDRESSES: (u16, usize, &[u16]) = (22, 8, &[6, 8]);
const ROUTES: (u16, usize, &[u16]) = (26, 12, &[12]);
const POLICY_RULES: (u16, usize, &[u16]) = (34, 12, &[]);

/// Sockets in a network namespace.
#[derive(Debug)]
pub(crate) struct Reader {
    netfilter: OwnedFd,
    route: OwnedFd,
}

/// A state of a network namespace. Two states are equal if their tables, netfilter chains, rules and sets are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ruleset {
    pub(crate) rules: Vec<Vec<u8>>,
    /// Policy rules, routes outside of the tables `main` and `local`, addresses of lo.
    pub(crate) fixtures: BTreeSet<Vec<u8>>,
}

impl Reader {
    /// Opens sockets in the network namespace at this path.
    pub(crate) fn new(netns: &Path) -> Self {
        let open = |protocol| {
            socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol).expect("a netlink socket")
        };
        in_netns(netns, || Self {
            netfilter: open(SockProtocol::NetlinkNetFilter),
            route: open(SockProtocol::NetlinkRoute),
        })
    }

    /// Reads the current state.
    pub(crate) fn read(&self) -> Ruleset {
        let mut rules = Vec::new();
        for (object, volatile) in OBJECTS {
            let found = self.nftables(object, &[]);
            // The kernel lists objects in the order of their creation, which matters only for the rules of one chain.
            let place = |payload: &Vec<u8>| {
                if object == RULES { place_of_rule(payload) } else { without(payload, 4, volatile) }
            };
            let mut sorted: Vec<_> =
                found.iter().map(|payload| (place(payload), without(payload, 4, volatile))).collect();
            sorted.sort_by(|(one, _), (other, _)| one.cmp(other));
            if object == SETS {
                let lists = found.iter().flat_map(|set| self.nftables(ELEMENTS, &name_of_set(set)));
                let mut elements: Vec<Vec<u8>> = lists.flat_map(|list| elements(&list)).collect();
                elements.sort();
                rules.extend(elements);
            }
            rules.extend(sorted.into_iter().map(|(_, rule)| rule));
        }
        let mut fixtures = BTreeSet::new();
        for (message, header, volatile) in [ADDRESSES, ROUTES, POLICY_RULES] {
            // Index 1 is lo; the tables `main` and `local` contain what other tools add.
            let found = dump(&self.route, message, &[0; 12][..header], |payload| match message {
                22 => payload[4..8] == 1_u32.to_ne_bytes(),
                26 => payload[4] != 254 && payload[4] != 255,
                _ => true,
            });
            // The flags of an address change while the kernel verifies it, and those of a route with its link.
            let mut found: Vec<_> = found.iter().map(|payload| without(payload, header, volatile)).collect();
            if message == 22 {
                found.iter_mut().for_each(|address| address[2] = 0);
            }
            fixtures.extend(found);
        }
        Ruleset { rules, fixtures }
    }

    fn nftables(&self, object: u16, attributes: &[u8]) -> Vec<Vec<u8>> {
        let family = attributes.first().copied().unwrap_or_default();
        let body = [&[family, 0, 0, 0], attributes.get(4..).unwrap_or_default()].concat();
        dump(&self.netfilter, NFTABLES | object, &body, |_| true)
    }
}

impl Ruleset {
    /// Returns whether the rules of both are equal; fixtures may differ.
    pub(crate) fn has_same_rules(&self, other: &Self) -> bool {
        self.rules == other.rules
    }
}

/// Requests a list; returns the bodies of all messages of the answer that `wanted` selects.
fn dump(socket: &OwnedFd, message: u16, body: &[u8], wanted: impl Fn(&[u8]) -> bool) -> Vec<Vec<u8>> {
    'again: loop {
        let mut request = u32::try_from(16 + body.len()).expect("small").to_ne_bytes().to_vec();
        request.extend([message.to_ne_bytes(), 0x301_u16.to_ne_bytes()].concat());
        request.extend([0; 8]);
        request.extend(body);
        send(socket.as_raw_fd(), &request, MsgFlags::empty()).expect("sent");
        let (mut found, mut buffer, mut is_stale) = (Vec::new(), vec![0; 1 << 17], false);
        loop {
            let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()).expect("received");
            let mut rest = &buffer[..length];
            while rest.len() >= 16 {
                let number = |at: usize| u16::from_ne_bytes([rest[at], rest[at + 1]]);
                let length = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
                // NLM_F_DUMP_INTR: another process changed the list meanwhile.
                is_stale |= number(6) & 0x10 != 0;
                match number(4) {
                    2 => continue 'again,
                    3 if is_stale => continue 'again,
                    3 => return found,
                    _ => found.extend(Some(rest[16..length].to_vec()).filter(|payload| wanted(payload))),
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
}

/// Returns type and value of each attribute.
fn attributes(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while bytes.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
        let kind = u16::from_ne_bytes([bytes[2], bytes[3]]) & 0x3fff;
        found.push((kind, &bytes[4..length]));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// Returns a body without volatile attributes, counters, and numbers of generations and anonymous sets.
fn without(payload: &[u8], header: usize, volatile: &[u16]) -> Vec<u8> {
    // struct nfgenmsg contains the generation.
    let mut stable = payload[..if header == 4 { 1 } else { header }].to_vec();
    for (kind, value) in attributes(&payload[header..]) {
        if volatile.contains(&kind) {
            continue;
        }
        stable.extend(kind.to_ne_bytes());
        if kind == EXPRESSIONS && volatile.contains(&6) && header == 4 {
            for (_, expression) in attributes(value) {
                let is_counter = attributes(expression).first().is_some_and(|(_, name)| *name == b"counter\0");
                stable.extend(if is_counter { b"counter".to_vec() } else { expression.to_vec() });
            }
        } else {
            stable.extend(value);
        }
    }
    for name in [b"__set", b"__map"] {
        let starts: Vec<usize> =
            stable.windows(5).enumerate().filter(|(_, w)| w == name).map(|(at, _)| at + 5).collect();
        for start in starts {
            stable[start..].iter_mut().take_while(|byte| byte.is_ascii_digit()).for_each(|byte| *byte = b'0');
        }
    }
    stable
}

/// Returns family, table and netfilter chain of a rule.
fn place_of_rule(rule: &[u8]) -> Vec<u8> {
    let names = attributes(&rule[4..]).into_iter().filter(|(kind, _)| [1, 2].contains(kind));
    rule[..1].iter().copied().chain(names.flat_map(|(_, name)| name.to_vec())).collect()
}

/// Returns the elements of a list (`NFTA_SET_ELEM_LIST_ELEMENTS`): their keys, flags, data and ends of ranges.
fn elements(list: &[u8]) -> Vec<Vec<u8>> {
    let lists = attributes(&list[4..]).into_iter().filter(|(kind, _)| *kind == 3);
    let elements = lists.flat_map(|(_, list)| attributes(list));
    let stable = |(_, element)| attributes(element).into_iter().filter(|(kind, _)| [1, 2, 3, 10].contains(kind));
    elements.map(|element| stable(element).flat_map(|(_, value)| value.to_vec()).collect()).collect()
}

/// Returns family, and table and name of a set as attributes of a request for its elements.
fn name_of_set(set: &[u8]) -> Vec<u8> {
    let mut request = set[..4].to_vec();
    for (kind, value) in attributes(&set[4..]).into_iter().filter(|(kind, _)| [1, 2].contains(kind)) {
        request.extend(u16::try_from(4 + value.len()).expect("a name").to_ne_bytes());
        request.extend(kind.to_ne_bytes());
        request.extend(value);
        request.resize(request.len().next_multiple_of(4), 0);
    }
    request
}
