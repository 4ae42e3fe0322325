//! What the kernel holds: the tables that iptables-nft manages, read in one go.
//!
//! How many rules a policy can need, known before one of them is made: lists of a policy multiply.

use super::exclusions::{captured, covers_dns_port, protocols};
use super::expression::Expression;
use super::native::live::Sets;
use super::native::rule::NativeAction;
use super::nfnetlink::attributes::{Attributes, find, find_be64, find_text};
use super::nfnetlink::{NfError, NfSocket, Verb};
use super::rule::{Family, Hook, Rule, Table};
use super::{iptables, native};
use crate::cni;
use crate::cni::Code;
use crate::netlink::Allowance;
use crate::policy::{DnsCapture, Exclusion, Groups, Policy, Ports, Protocol, Ranges, Redirect};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// `NFPROTO_IPV4`, `NFPROTO_IPV6`.
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
const NFPROTO_INET: u8 = 1;
/// What Istio's own native rules start the names of their tables with, and the one that has rules
/// only where DNS is captured (istio/istio, `tools/istio-nftables`).
const ISTIO_TABLES: &str = "istio-proxy-";
const ISTIO_RAW: &str = "istio-proxy-raw";
/// How often the rules are read again because another process changed them meanwhile, and for how long.
const TRIES: usize = 100;
const DEADLINE: Duration = Duration::from_secs(1);

impl Hook {
    /// `NF_INET_…` (linux/netfilter.h).
    pub(super) const fn number(self) -> u32 {
        match self {
            Self::Prerouting => 0,
            Self::Output => 3,
        }
    }
}

impl Family {
    /// `NFPROTO_…`.
    pub(super) const fn number(self) -> u8 {
        match self {
            Self::Ip => NFPROTO_IPV4,
            Self::Ip6 => NFPROTO_IPV6,
        }
    }
}

/// What a rule has counted; equal to any other, for what was counted is no difference between rules.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counter {
    /// Packets.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Counter {
    /// The counter among a rule's expressions as the kernel lists them.
    pub(super) fn read(expressions: &[u8]) -> Self {
        Expression::counted(expressions).map(|(packets, bytes)| Self { packets, bytes }).unwrap_or_default()
    }
}

impl PartialEq for Counter {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Counter {}

/// A rule in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveRule {
    /// By which it is deleted, and others are put in front of it.
    pub handle: u64,
    /// What it is; where it is no rule that this crate would write, the chain that it goes to.
    pub rule: Result<Rule, Option<String>>,
    /// What it has counted.
    pub counter: Counter,
}

impl LiveRule {
    /// A rule as it is listed.
    pub(super) fn read(body: &[u8], family: Family) -> Option<Self> {
        let (handle, expressions) = (find_be64(body, 3)?, find(body, 4).unwrap_or_default());
        Some(Self { handle, rule: iptables::decode(expressions, family), counter: Counter::read(expressions) })
    }

    /// The chain that it goes to.
    #[must_use]
    pub fn goes_to(&self) -> Option<&str> {
        match &self.rule {
            Ok(rule) => rule.goes_to(),
            Err(chain) => chain.as_deref(),
        }
    }
}

impl std::fmt::Display for LiveRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.rule {
            Ok(rule) => rule.fmt(f),
            Err(Some(chain)) => write!(f, "(a foreign rule, handle {}) -j {chain}", self.handle),
            Err(None) => write!(f, "(a foreign rule, handle {})", self.handle),
        }
    }
}

/// A chain in the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LiveChain {
    /// Whether the kernel enters it by itself: iptables' built-in chains.
    pub built_in: bool,
    /// Its rules in order.
    pub rules: Vec<LiveRule>,
}

/// The chains of one table by name.
pub(super) type LiveTable = BTreeMap<String, LiveChain>;

/// What the kernel holds in the tables raw, mangle and nat of `ip` and `ip6`, and in our own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LiveRuleset {
    /// Of which generation this is.
    pub generation: u32,
    /// The tables that there are.
    pub tables: BTreeMap<(Family, Table), LiveTable>,
    /// Tables of the `nftables` dialect.
    pub native: native::NativeLiveTables,
    /// The native redirection of Istio's own tools, if there is one.
    pub native_istio: Option<NativeIstio>,
}

/// A native redirection that is somebody else's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NativeIstio {
    /// Whether it captures DNS.
    pub captures_dns: bool,
}

impl LiveRuleset {
    /// Reads them as they are at one moment.
    ///
    /// # Errors
    /// Netlink fails, [`Code::ForeignRules`] if there are more than
    /// [`Allowance::USUAL`], or
    /// [`Code::TryAgain`] if another process keeps changing them.
    pub fn now() -> Result<Self, cni::Error> {
        let mut socket = NfSocket::open().map_err(|e| failed("reading", e))?;
        let deadline = Instant::now() + DEADLINE;
        for _ in 0..TRIES {
            match Self::read(&mut socket) {
                Err(NfError::Changed) if Instant::now() < deadline => {}
                Err(NfError::Changed) => break,
                other => return other.map_err(|e| failed("reading", e)),
            }
        }
        let msg = "reading the rules of the network namespace failed: another process keeps changing them; retry";
        Err(cni::Error::new(Code::TryAgain, msg))
    }

    /// Reads them, up to [`Allowance::USUAL`].
    ///
    /// # Errors
    /// Netlink fails, there are more, or another process changed the rules meanwhile.
    pub fn read(socket: &mut NfSocket) -> Result<Self, NfError> {
        Self::read_within(Allowance::USUAL, socket)
    }

    /// Reads them, up to `limit`.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_within(limit: Allowance, socket: &mut NfSocket) -> Result<Self, NfError> {
        socket.allow(limit);
        let (mut live, has_other_tables) = Self::read_tables(socket)?;
        if live.tables.is_empty() && live.native.is_empty() && live.native_istio.is_none() {
            return Ok(live);
        }
        let sets = Sets::read(socket, &live.native)?;
        live.read_chains(socket)?;
        for (family, which) in live.dumps_of_rules(has_other_tables) {
            socket.dump_of(Verb::GetRule, family, which, |number, body| live.add_rule(&sets, number, body))?;
        }
        if socket.generation()? == live.generation { Ok(live) } else { Err(NfError::Changed) }
    }

    /// Reads tables and chains, but no rules.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) fn without_rules(socket: &mut NfSocket) -> Result<Self, NfError> {
        socket.allow(Allowance::USUAL);
        let (mut live, _) = Self::read_tables(socket)?;
        live.read_chains(socket)?;
        Ok(live)
    }

    /// The tables, and whether there are others.
    fn read_tables(socket: &mut NfSocket) -> Result<(Self, bool), NfError> {
        let generation = socket.generation()?;
        let mut live = Self { generation, ..Self::default() };
        let mut has_other_tables = false;
        socket.dump(Verb::GetTable, |family, body| {
            let name = find_text(body, 1);
            if let Some(key) = table_of(family, name) {
                live.tables.entry(key).or_default();
            } else if let Some(table) = native::live::table_of(family, name) {
                live.native.entry(table).or_default();
            } else if family == NFPROTO_INET && name.is_some_and(|name| name.starts_with(ISTIO_TABLES)) {
                live.native_istio.get_or_insert_default();
            } else {
                has_other_tables = true;
            }
        })?;
        Ok((live, has_other_tables))
    }

    fn read_chains(&mut self, socket: &mut NfSocket) -> Result<(), NfError> {
        socket.dump(Verb::GetChain, |family, body| {
            let table = table_of(family, find_text(body, 1)).and_then(|key| self.tables.get_mut(&key));
            if let (Some(table), Some(name)) = (table, find_text(body, 3)) {
                table.entry(name.to_owned()).or_default().built_in = find(body, 4).is_some();
            }
            native::live::add_chain(&mut self.native, family, body);
        })
    }

    /// What to ask for so that the rules of the tables that matter are listed: one dump, or one for each
    /// table if there are others, which may hold any number of rules.
    fn dumps_of_rules(&self, has_other_tables: bool) -> Vec<(u8, Attributes)> {
        if !has_other_tables {
            return vec![(0, Attributes::new())];
        }
        let iptables = self.tables.keys().map(|(family, table)| (family.number(), table.name()));
        let native = self.native.keys().map(|table| (NFPROTO_INET, native::rule::table_name(*table)));
        let istio = self.native_istio.map(|_| (NFPROTO_INET, ISTIO_RAW));
        let all = iptables.chain(native).chain(istio);
        all.map(|(family, table)| (family, Attributes::new().text(1, table))).collect()
    }

    /// Takes up a rule as it is listed.
    fn add_rule(&mut self, sets: &Sets, number: u8, body: &[u8]) {
        let key = table_of(number, find_text(body, 1));
        let chain = key.and_then(|key| self.tables.get_mut(&key)?.get_mut(find_text(body, 2)?));
        if let (Some(chain), Some((family, _))) = (chain, key) {
            chain.rules.extend(LiveRule::read(body, family));
        }
        native::live::add_rule(&mut self.native, sets, number, body);
        if let Some(istio) = self.native_istio.as_mut().filter(|_| number == NFPROTO_INET) {
            istio.captures_dns |= find_text(body, 1) == Some(ISTIO_RAW);
        }
    }

    /// Whether detour's native tables redirect traffic.
    #[must_use]
    pub fn redirects_natively(&self) -> bool {
        self.native.values().any(|chains| chains.contains_key("ISTIO_OUTPUT"))
    }

    /// Returns the mark that the rules of detour's native tables give to packets for TPROXY.
    #[must_use]
    pub fn native_tproxy_mark(&self) -> Option<u32> {
        let chains = self.native.values().flat_map(BTreeMap::values);
        chains.flat_map(|chain| chain.rules.iter().flatten()).find_map(|rule| match rule.action {
            NativeAction::Tproxy { mark, .. } => Some(mark),
            _ => None,
        })
    }

    /// A chain's rules; none where there is no such chain.
    #[must_use]
    pub fn rules(&self, family: Family, table: Table, chain: &str) -> &[LiveRule] {
        let chain = self.tables.get(&(family, table)).and_then(|t| t.get(chain));
        chain.map_or(&[], |c| c.rules.as_slice())
    }

    /// Every chain, with where it stands.
    pub fn chains(&self) -> impl Iterator<Item = (Family, Table, &str, &LiveChain)> {
        self.tables.iter().flat_map(|((family, table), chains)| {
            chains.iter().map(|(name, chain)| (*family, *table, name.as_str(), chain))
        })
    }
}

/// The error of a call that failed `doing` something with the rules: [`Code::ForeignRules`] if there are
/// too many.
#[must_use]
pub fn failed(doing: &str, error: NfError) -> cni::Error {
    let (code, next) = match error {
        NfError::TooMany(_) | NfError::TooManyDeletions { .. } => {
            (Code::ForeignRules, "; remove rules in the pod's network namespace, or delete the pod")
        }
        _ => (Code::KernelRefused, ""),
    };
    cni::Error::new(code, format!("{doing} the rules of the network namespace failed: {error}{next}"))
}

fn table_of(family: u8, name: Option<&str>) -> Option<(Family, Table)> {
    let family = Family::ALL.into_iter().find(|f| f.number() == family)?;
    let name = name?;
    let table = Table::ALL.into_iter().find(|t| t.name() == name)?;
    Some((family, table))
}

/// The most rules that an ADD makes for a pod, of both families.
pub const MOST_RULES: usize = 16_000;
/// Rules of a redirection that don't depend on its lists.
const ALWAYS: usize = 30;
/// The jumps to the exclusions, in nat and raw of both families.
const JUMPS: usize = 4;
/// A `multiport` has 15 places, of which a range takes two.
const RANGES_A_RULE: usize = 7;

/// Returns an upper bound of the rules that `policy` needs, of both families, as iptables has them.
#[must_use]
pub fn most_rules(policy: &Policy) -> usize {
    let redirect = policy.redirect().map_or(0, |redirect| 2 * of_redirect(redirect));
    let capture = captured(policy);
    let exclusions = policy.exclusions.iter().map(|exclusion| of_exclusion(exclusion, &capture));
    exclusions.fold(redirect + JUMPS, usize::saturating_add)
}

fn of_exclusion(exclusion: &Exclusion, capture: &DnsCapture) -> usize {
    let families = if exclusion.destination.is_some() { 1 } else { 2 };
    let protocols = protocols(exclusion);
    let leaves = match exclusion.ports.len() {
        0 => 1,
        ports => protocols.len() * ports.div_ceil(RANGES_A_RULE),
    };
    let queries = match captured_servers(capture) {
        0 => 0,
        _ if !covers_dns_port(exclusion) => 0,
        servers if protocols.contains(&Protocol::Udp) => protocols.len() + 2 * servers,
        _ => protocols.len(),
    };
    families * (leaves + queries)
}

/// For how many destinations queries are captured, of the family that has more of them.
fn captured_servers(capture: &DnsCapture) -> usize {
    match capture {
        DnsCapture::Off => 0,
        DnsCapture::All => 1,
        DnsCapture::Servers { v4, v6 } => v4.len().max(v6.len()),
    }
}

/// Of one family.
fn of_redirect(redirect: &Redirect) -> usize {
    let ports = |ports: &Ports| match ports {
        Ports::All => 1,
        Ports::List(list) => list.len(),
    };
    let ranges = |ranges: &Ranges| match ranges {
        Ranges::All => 1,
        Ranges::List(list) => list.len(),
    };
    let included = ranges(&redirect.outbound_ip_ranges_include);
    let groups = match &redirect.owner_groups_include {
        Groups::All => redirect.owner_groups_exclude.len(),
        Groups::List(_) => 1,
    };
    let per_interface = 4 * redirect.exclude_interfaces.len();
    let per_owner = 6 * (redirect.proxy_uid.len() + redirect.proxy_gid.len());
    let per_port = ports(&redirect.inbound_ports_exclude)
        + 2 * ports(&redirect.inbound_ports_include)
        + 2 * ports(&redirect.outbound_ports_exclude)
        + ports(&redirect.outbound_ports_include);
    let rerouted = redirect.reroute_virtual_interfaces.len().saturating_mul(included + 1);
    let per_range = included + ranges(&redirect.outbound_ip_ranges_exclude);
    let per_server = 4 * captured_servers(&redirect.dns);
    ALWAYS.saturating_add(rerouted) + per_interface + per_owner + per_port + per_range + per_server + groups
}
