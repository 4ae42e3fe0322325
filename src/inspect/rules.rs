//! The rules that a network namespace holds, with their counters, beside those that its
//! attachments ask for.

use super::page::{Cell, Page, Sheet, Tone};
use crate::cni::{Code, Error};
use crate::firewall::nfnetlink::{self, Socket};
use crate::firewall::rule::{Family, Table};
use crate::firewall::{Difference, Drift, Live, Ruleset, drift, foreign_rules};
use crate::plugin::asked::{Asked, asked};
use crate::sandbox::{Sandbox, own_addresses};
use crate::state::Store;
use serde::Serialize;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

/// How long to wait for a call of the plugin that is at work in the namespace.
const PATIENCE: Duration = Duration::from_secs(10);

/// What was found in a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveRules {
    /// Its rules.
    pub live: Live,
    /// What its attachments ask for; `None` where nothing is kept of any.
    pub asked: Option<Asked>,
    /// Its own addresses, loopback and link-local left out.
    pub addresses: Vec<IpAddr>,
}

impl LiveRules {
    /// Reads the namespace at `path`.
    ///
    /// # Errors
    /// It is no network namespace or can't be entered, or its rules or what is kept of its
    /// attachments can't be read.
    pub fn read(path: &Path, store: &Store) -> Result<Self, Error> {
        let none = || {
            let msg = format!("{}: there is no network namespace", path.display());
            Error::new(Code::InvalidNetns, msg)
        };
        let sandbox = Sandbox::open(path)?.ok_or_else(none)?;
        let asked = asked(store, &sandbox)?;
        sandbox.enter(PATIENCE, || Ok(Self { live: live()?, asked, addresses: own_addresses()? }))
    }

    /// The report.
    #[must_use]
    pub fn report(&self, netns: &Path) -> RulesReport {
        let nothing = Ruleset::default();
        let desired = self.asked.as_ref().map_or(&nothing, |asked| &asked.rules);
        let found = if self.asked.is_some() { drift(&self.live, desired) } else { Vec::new() };
        let foreign = if self.asked.is_some() { foreign_rules(&self.live, desired) } else { Vec::new() };
        let attachments = self.asked.iter().flat_map(|asked| &asked.attachments).map(ToString::to_string).collect();
        RulesReport {
            netns: netns.display().to_string(),
            attachments,
            as_asked: self.asked.as_ref().map(|_| found.is_empty()),
            rules: lines(&self.live, &found, &foreign),
        }
    }
}

fn live() -> Result<Live, Error> {
    let failed = |e: nfnetlink::Error| Error::new(Code::KernelRefused, format!("the rules can't be read: {e}"));
    let mut socket = Socket::open().map_err(failed)?;
    loop {
        match Live::read(&mut socket) {
            Err(nfnetlink::Error::Changed) => {}
            other => return other.map_err(failed),
        }
    }
}

/// A namespace's rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RulesReport {
    /// The path by which the namespace was opened.
    pub netns: String,
    /// Who asks for rules in it, as far as is kept.
    pub attachments: Vec<String>,
    /// Whether it holds what they ask for; none where nothing is kept of any.
    pub as_asked: Option<bool>,
    /// Every rule that is there or should be.
    pub rules: Vec<RuleLine>,
}

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RuleLine {
    /// `ip` or `ip6`.
    pub family: &'static str,
    /// `raw`, `mangle` or `nat`.
    pub table: &'static str,
    /// The chain.
    pub chain: String,
    /// As `iptables-save` prints it, without `-A CHAIN`.
    pub rule: String,
    /// How it stands to what is asked for.
    pub mark: Mark,
    /// Packets that met it; none where it isn't there.
    pub packets: Option<u64>,
    /// Their bytes.
    pub bytes: Option<u64>,
}

/// How a rule stands to what is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mark {
    /// There, as it should be; or nothing is kept to tell by.
    Fine,
    /// It should be there.
    Missing,
    /// In a chain of ours, or like a rule of ours, and not asked for.
    Extra,
    /// There, but not in its place.
    Moved,
    /// Somebody else's, in a built-in chain.
    Foreign,
}

impl Mark {
    const fn sign(self) -> (&'static str, Tone) {
        match self {
            Self::Fine => (" ", Tone::Plain),
            Self::Missing => ("missing", Tone::Bad),
            Self::Extra => ("extra", Tone::Bad),
            Self::Moved => ("moved", Tone::Bad),
            Self::Foreign => ("foreign", Tone::Notable),
        }
    }
}

fn lines(live: &Live, drift: &[Drift], foreign: &[String]) -> Vec<RuleLine> {
    let mut lines = Vec::new();
    let mut left: Vec<&Drift> = drift.iter().collect();
    for (family, table, name, chain) in live.chains() {
        for rule in &chain.rules {
            let text = format!("{name} {rule}");
            let full = format!("{} {} -A {text}", family.name(), table.name());
            let here = |d: &&Drift| (d.family, d.table) == (family, table) && marks(&d.what, &text).is_some();
            let mark = match left.iter().position(here) {
                Some(at) => marks(&left.remove(at).what, &text).unwrap_or(Mark::Fine),
                None if foreign.contains(&full) => Mark::Foreign,
                None => Mark::Fine,
            };
            let (packets, bytes) = (Some(rule.counter.packets), Some(rule.counter.bytes));
            lines.push(line((family, table), &text, mark, packets, bytes));
        }
        let missing = |d: &Drift| (d.family, d.table) == (family, table) && chain_of(&d.what) == Some(name);
        for drift in left.extract_if(.., |d| missing(d)) {
            lines.extend(absent(drift));
        }
    }
    lines.extend(left.into_iter().filter_map(absent));
    lines
}

fn line(
    (family, table): (Family, Table),
    text: &str,
    mark: Mark,
    packets: Option<u64>,
    bytes: Option<u64>,
) -> RuleLine {
    let (chain, rule) = text.split_once(' ').unwrap_or((text, ""));
    RuleLine {
        family: family.name(),
        table: table.name(),
        chain: chain.to_owned(),
        rule: rule.to_owned(),
        mark,
        packets,
        bytes,
    }
}

/// What a difference makes of the rule `CHAIN rule` that is there.
fn marks(what: &Difference, text: &str) -> Option<Mark> {
    match what {
        Difference::Extra(rule) if rule == text => Some(Mark::Extra),
        Difference::Moved(rule) if rule == text => Some(Mark::Moved),
        _ => None,
    }
}

fn chain_of(what: &Difference) -> Option<&str> {
    match what {
        Difference::Missing(rule) => rule.split(' ').next(),
        _ => None,
    }
}

/// A rule or chain that should be there, or a chain without rules that should not.
fn absent(drift: &Drift) -> Option<RuleLine> {
    let at = (drift.family, drift.table);
    match &drift.what {
        Difference::Missing(rule) => Some(line(at, rule, Mark::Missing, None, None)),
        Difference::ExtraChain(chain) => Some(line(at, chain, Mark::Extra, None, None)),
        Difference::NoChain(_) | Difference::Extra(_) | Difference::Moved(_) => None,
    }
}

impl Sheet for RulesReport {
    fn write(&self, page: &mut Page) {
        let (verdict, tone) = match self.as_asked {
            Some(true) => ("holds what is asked for", Tone::Good),
            Some(false) => ("does not hold what is asked for", Tone::Bad),
            None => ("nothing is kept of any attachment", Tone::Notable),
        };
        page.line(&[Cell::of(format!("{}:", self.netns)), Cell::of(verdict).tone(tone)]);
        for attachment in &self.attachments {
            page.line(&[Cell::of(format!("  {attachment}")).tone(Tone::Faint)]);
        }
        for group in self.rules.chunk_by(|a, b| (a.family, a.table) == (b.family, b.table)) {
            page.heading(&format!("{} {}", group[0].family, group[0].table));
            let row = |rule: &RuleLine| {
                let (sign, tone) = rule.mark.sign();
                let count = |n: Option<u64>| Cell::of(n.map_or_else(|| "-".to_owned(), |n| n.to_string()));
                vec![
                    Cell::of(sign).tone(tone),
                    count(rule.packets).tone(Tone::Faint),
                    count(rule.bytes).tone(Tone::Faint),
                    Cell::of(format!("-A {} {}", rule.chain, rule.rule)).tone(tone),
                ]
            };
            let head = ["", "packets", "bytes", ""].map(|text| Cell::of(text).tone(Tone::Faint)).to_vec();
            page.table(&[head].into_iter().chain(group.iter().map(row)).collect::<Vec<_>>());
        }
    }
}
