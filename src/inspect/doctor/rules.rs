//! What is in the pod's network namespace, beside what should be.

use super::check::{Check, Checkup, Verdict};
use super::report::Group;
use super::sandbox::NETNS;
use crate::cni::Error;
use crate::inspect::rules::{LiveRules, Mark, RuleLine, RulesReport};
use crate::policy::Policy;
use crate::sandbox::find::Found;
use crate::state::Store;

pub(super) const RULES: Check = Check::of(Group::Sandbox, "rules-equal", "its rules are those that are asked for");
const IN_FRONT: Check = Check::of(Group::Sandbox, "rules-first", "no foreign rule decides before them");
const FIXTURES: Check = Check::of(Group::Sandbox, "fixtures", "what they need besides is there");
const TRAFFIC: Check = Check::of(Group::Sandbox, "traffic", "packets meet them");

/// How many rules are named; the rest is counted.
const NAMED: usize = 3;
const REPAIR: &str =
    "delete the pod, or have the agent repair it; detour rules shows each rule beside those that are asked for";

/// Reads and compares.
pub(super) fn examine(
    found: Option<&Found>,
    store: &Store,
    wanted: Option<&Policy>,
    checkup: &mut Checkup,
) -> Option<(LiveRules, RulesReport)> {
    let read = found.map(|found| read(found, store));
    checkup.after(&[&NETNS], &RULES, || match &read {
        Some(Ok((report, _))) => equal(report, wanted),
        Some(Err(error)) => unread(error),
        None => Verdict::not_checked("there is no namespace"),
    });
    let read = read.and_then(Result::ok).map(|(report, live)| (live, report));
    let of = |verdict: &dyn Fn(&LiveRules, &RulesReport) -> Verdict| match &read {
        Some((live, report)) if live.asked.is_some() => verdict(live, report),
        _ => Verdict::not_checked("nothing is asked for in the namespace"),
    };
    checkup.after(&[&NETNS], &IN_FRONT, || of(&|_, report| in_front(report)));
    checkup.after(&[&NETNS], &FIXTURES, || of(&|live, _| fixtures(live)));
    checkup.after(&[&NETNS, &RULES], &TRAFFIC, || of(&|_, report| traffic(report)));
    read
}

/// What is in the namespace now.
///
/// # Errors
/// It has gone, or can't be read.
pub(super) fn read(found: &Found, store: &Store) -> Result<(RulesReport, LiveRules), Error> {
    let live = LiveRules::of(&found.open()?, store)?;
    Ok((live.report(&found.netns), live))
}

fn unread(error: &Error) -> Verdict {
    Verdict::fail(error.to_string(), "run it as root on the node, or in the agent's pod")
}

fn equal(report: &RulesReport, wanted: Option<&Policy>) -> Verdict {
    let is_wrong = |line: &&RuleLine| !matches!(line.mark, Mark::Fine | Mark::Foreign);
    let wrong: Vec<&RuleLine> = report.rules.iter().filter(is_wrong).collect();
    // What is missing besides rules is another check's.
    let only_absent = wrong.is_empty() && !report.absent.is_empty();
    match report.as_asked.map(|as_asked| as_asked || only_absent) {
        Some(true) => {
            let own = report.rules.iter().filter(|line| line.mark == Mark::Fine).count();
            let dialect = report.dialect.unwrap_or_default();
            Verdict::pass(format!("{own} rules, as {dialect}, for {}", report.attachments.join(", ")))
        }
        Some(false) => {
            let named: Vec<String> = wrong.iter().take(NAMED).map(|line| spelled(line)).collect();
            let more = wrong.len().saturating_sub(NAMED);
            let more = if more > 0 { format!("; and {more} more") } else { String::new() };
            Verdict::fail(format!("{}{more}", named.join("; ")), REPAIR)
        }
        None if wanted.is_some_and(|policy| !policy.is_empty()) => Verdict::fail(
            "no attachment has asked for any: the plugin did not run for this pod",
            "it was started before the plugin was installed, or its network was not named then: delete the pod",
        ),
        None if wanted.is_some() => Verdict::pass("no attachment has asked for any, and none are wanted"),
        None => Verdict::not_checked("no attachment has asked for any, and whether any are wanted is not known"),
    }
}

fn spelled(RuleLine { table, chain, rule, mark, .. }: &RuleLine) -> String {
    let how = match mark {
        Mark::Missing => "missing",
        Mark::Extra => "too much",
        Mark::Moved => "not in its place",
        Mark::Fine | Mark::Foreign => "there",
    };
    format!("{how}: {table} {chain} {rule}").trim_end().to_owned()
}

/// Foreign rules with one of ours behind them in the same chain.
fn in_front(report: &RulesReport) -> Verdict {
    let mut front = Vec::new();
    for chain in report.rules.chunk_by(|a, b| (&a.table, &a.chain) == (&b.table, &b.chain)) {
        let last = chain.iter().rposition(|line| line.mark == Mark::Fine).unwrap_or(0);
        front.extend(chain[..last].iter().filter(|line| line.mark == Mark::Foreign));
    }
    let legacy = match report.legacy.as_slice() {
        [] => String::new(),
        tables => format!("; tables of iptables-legacy ({}) are passed too, and not seen here", tables.join(", ")),
    };
    let Some(first) = front.first() else { return Verdict::pass(format!("none does{legacy}")) };
    let named: Vec<String> = front.iter().take(NAMED).map(|line| spelled(line)).collect();
    let more = front.len().saturating_sub(NAMED);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    let (table, chain) = (first.table.split(' ').next_back().unwrap_or_default(), &first.chain);
    Verdict::fail(
        format!("{}{more}{legacy}", named.join("; ")),
        format!(
            "if a home-made plugin means it, let uid-exclude or dns-exclude do the same; else remove it in the namespace: \
             iptables -t {table} -D {chain} 1"
        ),
    )
}

fn fixtures(live: &LiveRules) -> Verdict {
    match live.unfixed.is_empty() {
        true => Verdict::pass("addresses and routes are as they should be"),
        false => Verdict::fail(live.unfixed.join("; "), REPAIR),
    }
}

/// Counters of the rules that send somewhere else.
fn traffic(report: &RulesReport) -> Verdict {
    let sends =
        |line: &&RuleLine| ["REDIRECT", "TPROXY", "redirect to", "tproxy to"].iter().any(|to| line.rule.contains(to));
    let packets: u64 = report.rules.iter().filter(sends).filter_map(|line| line.packets).sum();
    let met: u64 = report.rules.iter().filter_map(|line| line.packets).sum();
    match (packets, met) {
        (0, 0) => Verdict::not_checked("no packet has met any rule so far; --probe sends some"),
        (0, met) => Verdict::pass(format!("{met} times a packet met a rule, none was redirected so far")),
        (packets, _) => Verdict::pass(format!("{packets} packets were redirected")),
    }
}
