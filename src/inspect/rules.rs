//! The rules that a network namespace holds, with their counters, beside those that its
//! attachments ask for.
//!
//! Rules to walk through, whether a policy asks for them or the kernel holds them, in both dialects.

use super::terminal::{Cell, Screen, TextReport, Tone};
use crate::cni::{Code, Error};
use crate::firewall::native::rule as native;
use crate::firewall::native::rule::table_name;
use crate::firewall::rule::{Family, Rule, Table};
use crate::firewall::{Counter, Difference, Drift, LiveRule, LiveRuleset, Ruleset, foreign_rules, legacy_tables};
use crate::netns::{NetNs, own_addresses};
use crate::plugin::netns_state::NetnsState;
use crate::policy::{Interception, Policy};
use crate::state::Store;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

/// How long to wait for a call of the plugin that is at work in the namespace.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many rules of a chain are listed that are not as they should be; the rest is counted.
const LISTED: usize = 200;

/// What was found in a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveRules {
    /// Its rules.
    pub live: LiveRuleset,
    /// What its attachments ask for; `None` where nothing is kept of any.
    pub asked: Option<NetnsState>,
    /// Its own addresses, loopback and link-local left out.
    pub addresses: Vec<IpAddr>,
    /// Tables of `iptables-legacy`, which packets pass too, and whose rules can't be read.
    pub legacy: Vec<String>,
    /// What its attachments need besides rules and is not there, one line each.
    pub unfixed: Vec<String>,
}

impl LiveRules {
    /// Reads the namespace at `path`.
    ///
    /// # Errors
    /// It is no network namespace, or as [`Self::of`].
    pub fn read(path: &Path, store: &Store) -> Result<Self, Error> {
        let none = || {
            let msg = format!("{}: there is no network namespace", path.display());
            Error::new(Code::InvalidNetns, msg)
        };
        Self::of(&NetNs::open(path)?.ok_or_else(none)?, store)
    }

    /// Reads a namespace.
    ///
    /// # Errors
    /// It can't be entered, or its rules or what is kept of its attachments can't be read.
    pub fn of(sandbox: &NetNs, store: &Store) -> Result<Self, Error> {
        let asked = NetnsState::find(store, sandbox)?;
        sandbox.enter(PATIENCE, || {
            let legacy = legacy_tables().iter().map(|(family, table)| format!("{} {table}", family.name())).collect();
            let unfixed = asked.as_ref().map_or_else(|| Ok(Vec::new()), |asked| asked.fixtures.drift())?;
            Ok(Self { live: LiveRuleset::now()?, asked, addresses: own_addresses()?, legacy, unfixed })
        })
    }

    /// The rules, to walk through.
    #[must_use]
    pub fn rulebook(&self) -> Rulebook {
        let mut book = Rulebook::of_live(&self.live);
        if !self.legacy.is_empty() {
            book.beware(format!(
                "tables of iptables-legacy ({}) are passed too, and not seen here",
                self.legacy.join(", ")
            ));
        }
        book
    }

    /// The report.
    #[must_use]
    pub fn report(&self, netns: &Path) -> RulesReport {
        let nothing = Ruleset::default();
        let desired = self.asked.as_ref().map_or(&nothing, |asked| &asked.rules);
        let drift = self.asked.as_ref().map(|asked| asked.dialect.drift(&self.live, desired));
        let as_asked = drift.as_ref().map(|drift| drift.is_empty() && self.unfixed.is_empty());
        let foreign = if self.asked.is_some() { foreign_rules(&self.live, desired) } else { Vec::new() };
        let attachments = self.asked.iter().flat_map(|asked| &asked.attachments).map(ToString::to_string).collect();
        let known = self.asked.as_ref().map(|asked| &asked.rules);
        let (rules, left_out) = lines(&present(&self.live, known), drift.unwrap_or_default(), &foreign);
        RulesReport {
            netns: netns.display().to_string(),
            found_by: None,
            attachments,
            dialect: self.asked.as_ref().map(|asked| asked.dialect.name()),
            as_asked,
            legacy: self.legacy.clone(),
            absent: self.unfixed.clone(),
            rules,
            left_out,
        }
    }
}

/// A namespace's rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RulesReport {
    /// The path by which the namespace was opened.
    pub netns: String,
    /// How it is known to be the pod's; none where it was named itself.
    pub found_by: Option<String>,
    /// Who asks for rules in it, as far as is kept.
    pub attachments: Vec<String>,
    /// How they have them written: `iptables` or `nftables`; none where nothing is kept of any.
    pub dialect: Option<&'static str>,
    /// Whether it holds what they ask for; none where nothing is kept of any.
    pub as_asked: Option<bool>,
    /// Tables of `iptables-legacy`, which packets pass too, and whose rules can't be read.
    pub legacy: Vec<String>,
    /// Addresses, routes and policy rules that its attachments need and that are missing, one line each.
    pub absent: Vec<String>,
    /// Every rule that is there or should be, but for those that are left out.
    pub rules: Vec<RuleLine>,
    /// Chains of which not every foreign, extra or moved rule is listed.
    pub left_out: Vec<LeftOut>,
}

/// The rules of a chain that are not listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// The table with its family.
    pub table: String,
    /// The chain.
    pub chain: String,
    /// How many rules.
    pub rules: usize,
}

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RuleLine {
    /// The table with its family: `ip nat`, `inet detour-nat`.
    pub table: String,
    /// The chain.
    pub chain: String,
    /// As its dialect's tool prints it, without its chain; empty for a chain that should not be there.
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

/// A rule that is there.
struct Present {
    /// The table with its family.
    place: String,
    chain: String,
    /// Its chain and text as a [`Difference`] has them.
    text: String,
    counter: Counter,
    /// Whether the chain is a built-in one or one that attachments ask for.
    is_asked_for: bool,
}

fn present(live: &LiveRuleset, known: Option<&Ruleset>) -> Vec<Present> {
    let mut all = Vec::new();
    for (family, table, name, chain) in live.chains() {
        let place = format!("{} {}", family.name(), table.name());
        let is_asked_for = known.is_some_and(|known| chain.built_in || known.has_chain(family, table, name));
        all.extend(chain.rules.iter().map(|rule| Present {
            is_asked_for,
            place: place.clone(),
            chain: name.to_owned(),
            text: format!("-A {name} {rule}"),
            counter: rule.counter,
        }));
    }
    for (table, chains) in &live.native {
        for (name, chain) in chains {
            all.extend(chain.rules.iter().zip(&chain.counters).map(|(rule, counter)| Present {
                is_asked_for: known.is_some(),
                place: format!("inet {}", table_name(*table)),
                chain: name.clone(),
                text: match rule {
                    Some(rule) => format!("{name} {rule}"),
                    None => format!("{name} (a foreign rule)"),
                },
                counter: *counter,
            }));
        }
    }
    all
}

/// What is there, and behind each chain what is missing in it; and for each chain, how many rules are not
/// listed because there are more than [`LISTED`] that are not as they should be.
fn lines(present: &[Present], drift: Vec<Drift>, foreign: &[String]) -> (Vec<RuleLine>, Vec<LeftOut>) {
    let (mut lines, mut left_out) = (Vec::new(), Vec::new());
    let foreign: HashSet<&str> = foreign.iter().map(String::as_str).collect();
    let mut marks: HashMap<(String, String), Vec<Mark>> = HashMap::new();
    let mut absentees: Vec<Option<RuleLine>> = Vec::new();
    let mut missing: HashMap<(String, String), Vec<usize>> = HashMap::new();
    for drift in drift {
        match (&drift.what, chain_of(&drift.what)) {
            (Difference::Extra(rule) | Difference::Moved(rule), _) => {
                let mark = if matches!(drift.what, Difference::Extra(_)) { Mark::Extra } else { Mark::Moved };
                marks.entry((drift.place, rule.clone())).or_default().push(mark);
            }
            (_, chain) => {
                let place = chain.map(|chain| (drift.place.clone(), chain.to_owned()));
                place.into_iter().for_each(|place| missing.entry(place).or_default().push(absentees.len()));
                absentees.push(absent(&drift));
            }
        }
    }
    for marks in marks.values_mut() {
        // The last one is taken first.
        marks.reverse();
    }
    for chain in present.chunk_by(|a, b| (&a.place, &a.chain) == (&b.place, &b.chain)) {
        let Some(Present { place, chain: name, .. }) = chain.first() else { continue };
        let mut to_list = LISTED;
        let mut more = 0;
        for rule in chain {
            let known = marks.get_mut(&(rule.place.clone(), rule.text.clone())).and_then(Vec::pop);
            let is_foreign = || foreign.contains(format!("{} {}", rule.place, rule.text).as_str());
            let mark = known.unwrap_or_else(|| if is_foreign() { Mark::Foreign } else { Mark::Fine });
            let counts = mark != Mark::Fine || !rule.is_asked_for;
            if counts && to_list == 0 {
                more += 1;
                continue;
            }
            to_list -= usize::from(counts);
            lines.push(line(&rule.place, &rule.text, mark, Some(rule.counter)));
        }
        if more > 0 {
            left_out.push(LeftOut { table: place.clone(), chain: name.clone(), rules: more });
        }
        let missing = missing.remove(&(place.clone(), name.clone())).into_iter().flatten();
        lines.extend(missing.filter_map(|at| absentees[at].take()));
    }
    lines.extend(absentees.into_iter().flatten());
    (lines, left_out)
}

fn line(place: &str, text: &str, mark: Mark, counter: Option<Counter>) -> RuleLine {
    let text = text.strip_prefix("-A ").unwrap_or(text);
    let (chain, rule) = text.split_once(' ').unwrap_or((text, ""));
    RuleLine {
        table: place.to_owned(),
        chain: chain.to_owned(),
        rule: rule.to_owned(),
        mark,
        packets: counter.map(|counter| counter.packets),
        bytes: counter.map(|counter| counter.bytes),
    }
}

/// The chain that a rule is missing in.
fn chain_of(what: &Difference) -> Option<&str> {
    match what {
        Difference::Missing(rule) => rule.strip_prefix("-A ").unwrap_or(rule).split(' ').next(),
        _ => None,
    }
}

/// A rule that should be there; a chain that should not, or is entered from elsewhere.
fn absent(Drift { place, what }: &Drift) -> Option<RuleLine> {
    match what {
        Difference::Missing(rule) => Some(line(place, rule, Mark::Missing, None)),
        Difference::ExtraChain(chain) => Some(line(place, chain, Mark::Extra, None)),
        Difference::OtherHook(chain) => Some(line(place, chain, Mark::Moved, None)),
        Difference::NoChain(_) | Difference::Extra(_) | Difference::Moved(_) => None,
    }
}

/// A report as it is printed. Programs get all of it; a table begins with the difference, if there is one.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct RulesView<'a> {
    /// The report.
    pub report: &'a RulesReport,
    /// Whether a table with a difference lists all rules too.
    #[serde(skip)]
    pub all: bool,
}

impl TextReport for RulesView<'_> {
    fn write(&self, page: &mut Screen) {
        let report = self.report;
        report.write_summary(page);
        let different: Vec<&RuleLine> = report.rules.iter().filter(|rule| rule.mark != Mark::Fine).collect();
        if report.as_asked == Some(false) && !different.is_empty() {
            for group in different.chunk_by(|a, b| a.table == b.table) {
                write_table(page, &format!("Difference in {}", group[0].table), group);
            }
            report.write_left_out(page);
            if !self.all {
                let rest = report.rules.len() - different.len();
                page.line(&[Cell::of("")]);
                page.line(&[
                    Cell::of(format!("{rest} other rules are as asked for; --all lists them")).tone(Tone::Faint)
                ]);
                return;
            }
        }
        for group in report.rules.iter().collect::<Vec<_>>().chunk_by(|a, b| a.table == b.table) {
            write_table(page, &group[0].table, group);
        }
        report.write_left_out(page);
    }
}

impl RulesReport {
    fn write_summary(&self, page: &mut Screen) {
        let (verdict, tone) = match self.as_asked {
            Some(true) => ("holds what is asked for", Tone::Good),
            Some(false) => ("does not hold what is asked for", Tone::Bad),
            None => ("nothing is kept of any attachment", Tone::Notable),
        };
        page.line(&[Cell::of(format!("{}:", self.netns)), Cell::of(verdict).tone(tone)]);
        if let Some(evidence) = &self.found_by {
            page.line(&[Cell::of(format!("  found by: {evidence}")).tone(Tone::Faint)]);
        }
        for attachment in &self.attachments {
            page.line(&[Cell::of(format!("  {attachment}")).tone(Tone::Faint)]);
        }
        for table in &self.legacy {
            page.line(&[Cell::of(format!("  iptables-legacy {table}: not seen here")).tone(Tone::Notable)]);
        }
        for absent in &self.absent {
            page.line(&[Cell::of(format!("  {absent}")).tone(Tone::Bad)]);
        }
    }

    fn write_left_out(&self, page: &mut Screen) {
        for LeftOut { table, chain, rules } in &self.left_out {
            page.line(&[Cell::of(format!("{table} {chain}: {rules} more rules")).tone(Tone::Notable)]);
        }
    }
}

fn write_table(page: &mut Screen, heading: &str, rules: &[&RuleLine]) {
    page.heading(heading);
    let row = |rule: &&RuleLine| {
        let (sign, tone) = rule.mark.sign();
        let count = |n: Option<u64>| Cell::of(n.map_or_else(|| "-".to_owned(), |n| n.to_string()));
        vec![
            Cell::of(sign).tone(tone),
            count(rule.packets).tone(Tone::Faint),
            count(rule.bytes).tone(Tone::Faint),
            Cell::of(&rule.chain).tone(tone),
            Cell::of(&rule.rule).tone(tone),
        ]
    };
    let head = ["", "packets", "bytes", "chain", "rule"].map(|text| Cell::of(text).tone(Tone::Faint)).to_vec();
    page.table(&[head].into_iter().chain(rules.iter().map(row)).collect::<Vec<_>>());
}

/// A rule in one of the two vocabularies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Words {
    /// iptables'.
    Iptables(Rule),
    /// nft's own.
    Native(native::NativeRule),
    /// It is a foreign one that is not understood.
    Unknown,
}

/// A rule with its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RuleText {
    pub words: Words,
    /// As its dialect's tool prints it, without its chain.
    pub text: String,
}

/// A table as the kernel passes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TableListing {
    /// Ours of family `inet`: where it has iptables' priority or one less, it comes first.
    Native(Table),
    /// iptables', of one family.
    Iptables(Table, Family),
}

impl TableListing {
    /// The table's name in the kernel.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Native(table) => table_name(table),
            Self::Iptables(table, _) => table.name(),
        }
    }
}

/// Chains by where they stand and by name, built-in ones too.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rulebook {
    chains: BTreeMap<(TableListing, String), Vec<RuleText>>,
    /// What is not in it although packets pass it.
    pub(super) caveats: Vec<String>,
}

impl Rulebook {
    /// The rules that `policy` asks for, in both families.
    #[must_use]
    pub fn of_policy(policy: &Policy) -> Self {
        let ruleset = Ruleset::of(policy, &Family::ALL);
        let line = |rule: &Rule| RuleText { words: Words::Iptables(rule.clone()), text: rule.to_string() };
        let mut book = Self::default();
        for ((family, table), rules) in &ruleset.tables {
            let hooks = rules.hooks.iter().map(|(hook, rules)| (hook.chain(), rules));
            for (name, rules) in hooks.chain(rules.chains.iter().map(|(name, rules)| (name.as_str(), rules))) {
                book.add(TableListing::Iptables(*table, *family), name, rules.iter().map(line).collect());
            }
        }
        if policy.interception == Interception::Unsaid {
            let caveat =
                "this configuration does not redirect the pod: if somebody else does, those rules are not seen here";
            book.caveats.push(caveat.to_owned());
        }
        book
    }

    /// What the kernel holds.
    #[must_use]
    pub fn of_live(live: &LiveRuleset) -> Self {
        let mut book = Self::default();
        let line = |live: &LiveRule| {
            let words = live.rule.clone().map_or(Words::Unknown, Words::Iptables);
            RuleText { words, text: live.to_string() }
        };
        for (family, table, name, chain) in live.chains() {
            book.add(TableListing::Iptables(table, family), name, chain.rules.iter().map(line).collect());
        }
        let native = |rule: &Option<native::NativeRule>| match rule {
            Some(rule) => RuleText { words: Words::Native(rule.clone()), text: rule.to_string() },
            None => RuleText { words: Words::Unknown, text: "(a foreign rule)".to_owned() },
        };
        for (table, chains) in &live.native {
            for (name, chain) in chains {
                book.add(TableListing::Native(*table), name, chain.rules.iter().map(native).collect());
            }
        }
        if live.native_istio.is_some() {
            book.caveats.push("tables inet istio-proxy-* redirect the pod too, and are not understood here".to_owned());
        }
        book
    }

    /// Says that packets pass something else, too.
    pub fn beware(&mut self, of: String) {
        self.caveats.push(of);
    }

    fn add(&mut self, book: TableListing, chain: &str, lines: Vec<RuleText>) {
        self.chains.insert((book, chain.to_owned()), lines);
    }

    /// A chain's rules; none where there is no such chain.
    pub(super) fn chain(&self, book: TableListing, name: &str) -> &[RuleText] {
        self.chains.get(&(book, name.to_owned())).map_or(&[], Vec::as_slice)
    }
}
