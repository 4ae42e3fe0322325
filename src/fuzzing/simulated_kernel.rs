//! nf_tables without a kernel: applies transactions and lists rules as the kernel does (linux/net/netfilter,
//! `nf_tables_api.c`), so that changes can be planned, encoded, committed, listed and decoded without privileges.
//! The other end of a socket pair answers.

use super::Choices;
use crate::firewall::nfnetlink::{NfSocket, nfta};
use crate::netlink::attributes::{Attributes, find, find_be32, find_be64, find_text, parse};
use crate::netlink::{Messages, NLMSG_ERROR, Received, split};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, setsockopt, socketpair, sockopt};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;

const SUBSYSTEM: u16 = 10 << 8;
const BATCH_BEGIN: u16 = 16;
/// `NFNL_BATCH_GENID`; `NFTA_GEN_ID`.
const GENERATION: u16 = 1;
/// `ERESTART`.
const RESTART: i32 = 85;
/// `NLM_F_APPEND`; `NLM_F_ACK`.
const APPEND: u16 = 0x800;
const ACKNOWLEDGE: u16 = 4;
/// The length of `struct nfgenmsg`.
const HEADER: usize = 4;
/// `NFT_SET_ANONYMOUS`.
const ANONYMOUS: u32 = 1;
/// `NFTA_EXPR_…`; within a lookup the set's name and number; within an immediate the verdict with its chain.
const NAME: u16 = 1;
const DATA: u16 = 2;
const LOOKUP_SET: u16 = 1;
const LOOKUP_SET_ID: u16 = 4;
const IMMEDIATE: u16 = 2;
const VERDICT: u16 = 2;
const VERDICT_CHAIN: u16 = 2;

/// The rules of a network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Rules {
    generation: u32,
    last_handle: u64,
    tables: BTreeMap<(u8, String), KernelTable>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct KernelTable {
    chains: BTreeMap<String, KernelChain>,
    sets: BTreeMap<String, KernelSet>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct KernelChain {
    attributes: Vec<u8>,
    rules: Vec<KernelRule>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct KernelRule {
    handle: u64,
    expressions: Vec<u8>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct KernelSet {
    attributes: Vec<u8>,
    elements: Vec<Vec<u8>>,
}

impl Rules {
    /// Calls `work` with a socket to these rules; returns the rules afterwards.
    pub(crate) fn with_socket<T>(self, work: impl FnOnce(&mut NfSocket) -> T) -> (Self, T) {
        with_socket(self, Self::answer, work)
    }

    /// Adds a rule of another tool to a chain, before the rule with this index or at the end. Creates table and chain.
    pub(crate) fn add_foreign(&mut self, table: (u8, &str), chain: &str, at: usize, expressions: &Attributes) {
        let table = self.tables.entry((table.0, table.1.to_owned())).or_default();
        let chain = table.chains.entry(chain.to_owned()).or_default();
        self.last_handle += 1;
        let rule = KernelRule { handle: self.last_handle, expressions: expressions.as_bytes().to_vec() };
        chain.rules.insert(at.min(chain.rules.len()), rule);
    }

    /// Adds an empty chain of another tool.
    pub(crate) fn add_chain(&mut self, table: (u8, &str), chain: &str) {
        self.tables.entry((table.0, table.1.to_owned())).or_default().chains.entry(chain.to_owned()).or_default();
    }

    /// Damages rules as another process in the pod can: deletes, repeats or moves a rule, flushes a chain or deletes a
    /// table. The rules in `kept` stay in their order.
    pub(crate) fn damage(&mut self, kept: &Self, from: &mut Choices<'_>) {
        let keys: Vec<(u8, String)> = self.tables.keys().cloned().collect();
        let Some(key) = keys.get(from.below(keys.len().max(1))) else { return };
        let kept = kept.tables.get(key);
        let Some(table) = self.tables.get_mut(key) else { return };
        let action = from.below(8);
        if action == 0 && kept.is_none() {
            self.tables.remove(key);
            return;
        }
        let names: Vec<String> = table.chains.keys().cloned().collect();
        let name = &names[from.below(names.len())];
        let kept: Vec<u64> = kept
            .and_then(|kept| kept.chains.get(name))
            .into_iter()
            .flat_map(|chain| chain.rules.iter().map(|rule| rule.handle))
            .collect();
        let Some(chain) = table.chains.get_mut(name).filter(|chain| !chain.rules.is_empty()) else { return };
        let (at, to) = (from.below(chain.rules.len()), from.below(chain.rules.len()));
        if action == 1 {
            chain.rules.retain(|rule| kept.contains(&rule.handle));
        } else if !kept.contains(&chain.rules[at].handle) {
            let rule = if action < 4 { chain.rules[at].clone() } else { chain.rules.remove(at) };
            if action < 6 {
                self.last_handle += 1;
                chain.rules.insert(to, KernelRule { handle: self.last_handle, ..rule });
            }
        }
        self.generation += 1;
        self.drop_unused_sets();
    }

    /// Returns the expressions of all rules by chain, without handles.
    pub(crate) fn expressions(&self) -> BTreeMap<(u8, &str, &str), Vec<&[u8]>> {
        let mut all = BTreeMap::new();
        for ((family, table), contents) in &self.tables {
            for (name, chain) in &contents.chains {
                let rules = chain.rules.iter().map(|rule| &*rule.expressions).collect();
                all.insert((*family, table.as_str(), name.as_str()), rules);
            }
        }
        all
    }

    fn answer(&mut self, messages: &[Received<'_>]) -> Vec<Vec<u8>> {
        let Some(first) = messages.first() else { return Vec::new() };
        if first.kind == BATCH_BEGIN {
            return self.transact(messages);
        }
        let (family, attributes) = (first.body[0], &first.body[HEADER..]);
        match first.kind & 0xff {
            16 => {
                let generation = Attributes::of(|list| list.be32(GENERATION, self.generation));
                vec![message(SUBSYSTEM | 15, first.sequence, &[0; HEADER], generation.as_bytes())]
            }
            kind => dump(first.sequence, self.list(kind, family, attributes)),
        }
    }

    fn list(&self, kind: u16, family: u8, which: &[u8]) -> Vec<Reply> {
        let name = find_text(which, nfta::TABLE);
        let is_listed = |(of, table): &(u8, String)| {
            (family == 0 || *of == family) && (kind == 4 || name.is_none_or(|name| name == table))
        };
        let mut all = Vec::new();
        for ((family, table), contents) in self.tables.iter().filter(|(key, _)| is_listed(key)) {
            let of_table = || Attributes::of(|list| list.text(nfta::TABLE, table));
            let mut reply = |kind: u16, attributes: &[u8]| {
                all.push((SUBSYSTEM | kind, [&[*family, 0, 0, 0], attributes].concat()));
            };
            match kind {
                1 => reply(0, of_table().be32(nfta::TABLE_FLAGS, 0).as_bytes()),
                4 => contents.chains.iter().for_each(|(name, chain)| {
                    let mut known = of_table();
                    known.text(nfta::CHAIN_NAME, name);
                    reply(3, if chain.attributes.is_empty() { known.as_bytes() } else { &chain.attributes });
                }),
                7 => contents.chains.iter().for_each(|(name, chain)| {
                    for rule in &chain.rules {
                        let mut about = of_table();
                        about.text(nfta::RULE_CHAIN, name).be64(nfta::RULE_HANDLE, rule.handle);
                        reply(6, about.bytes(nfta::RULE_EXPRESSIONS, &rule.expressions).as_bytes());
                    }
                }),
                10 => contents.sets.iter().for_each(|(name, set)| {
                    reply(9, &with_text(&set.attributes, nfta::SET_NAME, name));
                }),
                13 => {
                    let set = find_text(which, nfta::ELEMENTS_SET).and_then(|name| contents.sets.get(name));
                    set.into_iter().flat_map(|set| &set.elements).for_each(|elements| reply(12, elements));
                }
                other => panic!("unexpected request {other}"),
            }
        }
        all
    }

    fn transact(&mut self, messages: &[Received<'_>]) -> Vec<Vec<u8>> {
        let acknowledge = |sequence: u32, errno: i32| message(NLMSG_ERROR, sequence, &(-errno).to_ne_bytes(), &[]);
        if find_be32(&messages[0].body[HEADER..], GENERATION) != Some(self.generation) {
            return vec![acknowledge(messages[0].sequence, RESTART)];
        }
        let (mut changed, mut replies, mut refused, mut sets) = (self.clone(), Vec::new(), false, BTreeMap::new());
        for message in &messages[1..messages.len() - 1] {
            let errno = changed.apply(message, &mut sets).err().map_or(0, |errno| errno as i32);
            refused |= errno != 0;
            if errno != 0 || message.flags & ACKNOWLEDGE != 0 {
                replies.push(acknowledge(message.sequence, errno));
            }
        }
        if !refused {
            changed.drop_unused_sets();
            changed.generation += 1;
            *self = changed;
        }
        replies
    }

    /// Applies one message of a transaction. `sets` are the names of the transaction's new sets by their numbers.
    fn apply(&mut self, message: &Received<'_>, sets: &mut BTreeMap<u32, String>) -> Result<(), Errno> {
        let (family, attributes) = (message.body[0], &message.body[HEADER..]);
        let text = |kind| find_text(attributes, kind).map(str::to_owned).ok_or(Errno::EINVAL);
        let key = (family, text(nfta::TABLE)?);
        if message.kind & 0xff == 0 {
            self.tables.entry(key).or_default();
            return Ok(());
        }
        if message.kind & 0xff == 2 {
            return self.tables.remove(&key).map(drop).ok_or(Errno::ENOENT);
        }
        let table = self.tables.get_mut(&key).ok_or(Errno::ENOENT)?;
        match message.kind & 0xff {
            3 => {
                let chain = table.chains.entry(text(nfta::CHAIN_NAME)?).or_default();
                chain.attributes = attributes.to_vec();
            }
            5 => {
                let name = text(nfta::CHAIN_NAME)?;
                let chain = table.chains.get(&name).ok_or(Errno::ENOENT)?;
                let others = table.chains.iter().filter(|(other, _)| **other != name);
                let mut rules = others.flat_map(|(_, chain)| &chain.rules);
                if !chain.rules.is_empty() || rules.any(|rule| targets(&rule.expressions).any(|to| to == name)) {
                    return Err(Errno::EBUSY);
                }
                table.chains.remove(&name);
            }
            6 => {
                let expressions = listed(find(attributes, nfta::RULE_EXPRESSIONS).unwrap_or_default(), sets);
                if targets(&expressions).any(|to| !table.chains.contains_key(to)) {
                    return Err(Errno::ENOENT);
                }
                self.last_handle += 1;
                let rule = KernelRule { handle: self.last_handle, expressions };
                let chain = table.chains.get_mut(&text(nfta::RULE_CHAIN)?).ok_or(Errno::ENOENT)?;
                let at = match find_be64(attributes, nfta::RULE_POSITION) {
                    Some(handle) => chain.position(handle)?,
                    None if message.flags & APPEND != 0 => chain.rules.len(),
                    None => 0,
                };
                chain.rules.insert(at, rule);
            }
            8 => {
                let chain = table.chains.get_mut(&text(nfta::RULE_CHAIN)?).ok_or(Errno::ENOENT)?;
                match find_be64(attributes, nfta::RULE_HANDLE) {
                    Some(handle) => drop(chain.rules.remove(chain.position(handle)?)),
                    None => chain.rules.clear(),
                }
            }
            9 => {
                let pattern = text(nfta::SET_NAME)?;
                let names = (0..).map(|number| pattern.replace("%d", &format!("{number}")));
                let is_free = |name: &String| *name == pattern || !table.sets.contains_key(name);
                let name = names.into_iter().find(is_free).ok_or(Errno::ENFILE)?;
                sets.insert(find_be32(attributes, nfta::SET_ID).ok_or(Errno::EINVAL)?, name.clone());
                let new = KernelSet { attributes: attributes.to_vec(), elements: Vec::new() };
                table.sets.entry(name).or_insert(new);
            }
            11 => {
                let name = text(nfta::SET_NAME)?;
                let mut rules = table.chains.values().flat_map(|chain| &chain.rules);
                if rules.any(|rule| lookups(&rule.expressions).any(|used| used == name)) {
                    return Err(Errno::EBUSY);
                }
                table.sets.remove(&name).ok_or(Errno::ENOENT)?;
            }
            12 => {
                let new = find_be32(attributes, nfta::ELEMENTS_SET_ID).and_then(|id| sets.get(&id).cloned());
                let name = new.map_or_else(|| text(nfta::ELEMENTS_SET), Ok)?;
                let set = table.sets.get_mut(&name).ok_or(Errno::ENOENT)?;
                set.elements.push(with_text(attributes, nfta::ELEMENTS_SET, &name));
            }
            _ => return Err(Errno::EOPNOTSUPP),
        }
        Ok(())
    }

    /// Drops anonymous sets whose rule was deleted.
    fn drop_unused_sets(&mut self) {
        for table in self.tables.values_mut() {
            let rules = table.chains.values().flat_map(|chain| &chain.rules);
            let used: Vec<String> = rules.flat_map(|rule| lookups(&rule.expressions)).map(str::to_owned).collect();
            let is_anonymous =
                |set: &KernelSet| find_be32(&set.attributes, nfta::SET_FLAGS).unwrap_or_default() & ANONYMOUS != 0;
            table.sets.retain(|name, set| !is_anonymous(set) || used.contains(name));
        }
    }
}

impl KernelChain {
    fn position(&self, handle: u64) -> Result<usize, Errno> {
        self.rules.iter().position(|rule| rule.handle == handle).ok_or(Errno::ENOENT)
    }
}

/// Returns the data of the expressions called `name`.
fn named<'a>(expressions: &'a [u8], name: &'static str) -> impl Iterator<Item = &'a [u8]> {
    let of_name = move |(_, element): (u16, &'a [u8])| {
        (find_text(element, NAME) == Some(name)).then(|| find(element, DATA).unwrap_or_default())
    };
    parse(expressions).filter_map(of_name)
}

/// Returns the chains to which a rule jumps.
fn targets(expressions: &[u8]) -> impl Iterator<Item = &str> {
    let verdicts = named(expressions, "immediate").filter_map(|data| find(find(data, IMMEDIATE)?, VERDICT));
    verdicts.filter_map(|verdict| find_text(verdict, VERDICT_CHAIN))
}

/// Returns the sets in which a rule looks up values.
fn lookups(expressions: &[u8]) -> impl Iterator<Item = &str> {
    named(expressions, "lookup").filter_map(|data| find_text(data, LOOKUP_SET))
}

/// Returns the expressions as the kernel lists them: a lookup has the name of its set, no number.
fn listed(expressions: &[u8], sets: &BTreeMap<u32, String>) -> Vec<u8> {
    let mut all = Attributes::new();
    for (kind, element) in parse(expressions) {
        let data = find(element, DATA).unwrap_or_default();
        let set = find_be32(data, LOOKUP_SET_ID).and_then(|id| sets.get(&id));
        match set.filter(|_| find_text(element, NAME) == Some("lookup")) {
            Some(set) => {
                let others = parse(data).filter(|(kind, _)| ![LOOKUP_SET, LOOKUP_SET_ID].contains(kind));
                _ = all.nested(kind, |lookup| {
                    lookup.text(NAME, "lookup").nested(DATA, |data| {
                        others.fold(data.text(LOOKUP_SET, set), |data, (kind, value)| data.bytes(kind, value))
                    })
                })
            }
            None => _ = all.bytes(kind, element),
        }
    }
    all.as_bytes().to_vec()
}

/// Returns attributes with another text.
fn with_text(attributes: &[u8], kind: u16, text: &str) -> Vec<u8> {
    let others = parse(attributes).filter(|(other, _)| *other != kind);
    let mut all = Attributes::new();
    others.for_each(|(kind, value)| _ = all.bytes(kind, value));
    all.text(kind, text).as_bytes().to_vec()
}

/// Datagrams are smaller than those of the kernel, so that dumps have several.
const DATAGRAM: usize = 8 << 10;
/// The size of buffers for the largest transaction.
const BUFFER: usize = 4 << 20;
/// The message that ends a dump, and the flag on its messages (`NLMSG_DONE`, `NLM_F_MULTI`).
const DONE: u16 = 3;
const MULTI: u16 = 2;

/// A message that answers a request: its type, and its body.
pub(crate) type Reply = (u16, Vec<u8>);

/// Calls `work` with a socket to `kernel`, whose function `answer` gets the messages of each datagram that is sent.
/// Returns the kernel and the result.
pub(crate) fn with_socket<K: Send, T>(
    mut kernel: K,
    answer: impl Fn(&mut K, &[Received<'_>]) -> Vec<Vec<u8>> + Send,
    work: impl FnOnce(&mut NfSocket) -> T,
) -> (K, T) {
    let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC);
    let (own, other) = pair.expect("a pair of sockets");
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            serve(&other, |messages| answer(&mut kernel, messages));
            kernel
        });
        let mut socket = NfSocket::of(own);
        let result = work(&mut socket);
        drop(socket);
        (server.join().expect("the kernel does not panic"), result)
    })
}

fn serve(fd: &OwnedFd, mut answer: impl FnMut(&[Received<'_>]) -> Vec<Vec<u8>>) {
    setsockopt(fd, sockopt::SndBuf, &BUFFER).expect("a buffer");
    let mut request = vec![0; 64 << 10];
    loop {
        let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC;
        let length = recv(fd.as_raw_fd(), &mut request, peek).expect("a request");
        request.resize(length.max(request.len()), 0);
        let length = recv(fd.as_raw_fd(), &mut request, MsgFlags::empty()).expect("a request");
        if length == 0 {
            return;
        }
        let messages: Vec<Received<'_>> = split(&request[..length]).collect();
        for datagram in answer(&messages) {
            if send(fd.as_raw_fd(), &datagram, MsgFlags::MSG_NOSIGNAL).is_err() {
                return;
            }
        }
    }
}

/// Returns the datagrams of a dump.
pub(crate) fn dump(sequence: u32, replies: impl IntoIterator<Item = Reply>) -> Vec<Vec<u8>> {
    let mut datagrams = vec![Messages::new()];
    let end = (DONE, 0_i32.to_ne_bytes().to_vec());
    for (kind, body) in replies.into_iter().chain([end]) {
        if datagrams.last().is_some_and(|last| last.as_bytes().len() + body.len() > DATAGRAM) {
            datagrams.push(Messages::new());
        }
        datagrams.last_mut().expect("one at least").put(kind, MULTI, sequence, &body, |list| list);
    }
    datagrams.iter().map(|datagram| datagram.as_bytes().to_vec()).collect()
}

/// Returns the datagram of one message.
pub(crate) fn message(kind: u16, sequence: u32, header: &[u8], attributes: &[u8]) -> Vec<u8> {
    Messages::one(kind, 0, sequence, header, attributes).as_bytes().to_vec()
}
