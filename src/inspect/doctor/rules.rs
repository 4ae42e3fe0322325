//! What is in the pod's network namespace, beside what should be.
//!
//! Where the pod is: on this node or on another, and in which network namespace.

use super::logs::EVENTS;
use super::pod::KNOWN;
use super::report::CheckGroup;
use super::report::CheckTarget;
use super::report::{Check, CheckVerdict, Results};
use crate::cluster::{ApiProbe, ObjectRef};
use crate::cni::{Error, NetConf};
use crate::inspect::restore::{AGENT_NAMESPACE, elsewhere};
use crate::inspect::rules::{LiveRules, Mark, RuleLine, RulesReport};
use crate::netns::find::{FoundNetns, of_name, of_pod};
use crate::pod::{Facts, Pod, PodRef};
use crate::policy::Policy;
use crate::state::Store;

pub(super) const RULES: Check = Check::of(CheckGroup::Sandbox, "rules-equal", "its rules are those that are asked for");
const IN_FRONT: Check = Check::of(CheckGroup::Sandbox, "rules-first", "no foreign rule decides before them");
const FIXTURES: Check = Check::of(CheckGroup::Sandbox, "fixtures", "what they need besides is there");
const TRAFFIC: Check = Check::of(CheckGroup::Sandbox, "traffic", "packets meet them");

/// How many rules are named; the rest is counted.
const NAMED: usize = 3;
const REPAIR: &str =
    "delete the pod, or have the agent repair it; detour rules shows each rule beside those that are asked for";

/// Reads and compares.
pub(super) fn examine(
    found: Option<&FoundNetns>,
    store: &Store,
    wanted: Option<&Policy>,
    checkup: &mut Results,
) -> Option<(LiveRules, RulesReport)> {
    let read = found.map(|found| read(found, store));
    checkup.after(&[&NETNS], &RULES, || match &read {
        Some(Ok((report, _))) => equal(report, wanted),
        Some(Err(error)) => unread(error),
        None => CheckVerdict::not_checked("there is no namespace"),
    });
    let read = read.and_then(Result::ok).map(|(report, live)| (live, report));
    let of = |verdict: &dyn Fn(&LiveRules, &RulesReport) -> CheckVerdict| match &read {
        Some((live, report)) if live.asked.is_some() => verdict(live, report),
        _ => CheckVerdict::not_checked("nothing is asked for in the namespace"),
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
pub(super) fn read(found: &FoundNetns, store: &Store) -> Result<(RulesReport, LiveRules), Error> {
    let live = LiveRules::of(&found.open()?, store)?;
    Ok((live.report(&found.netns), live))
}

fn unread(error: &Error) -> CheckVerdict {
    CheckVerdict::fail(error.to_string(), "run it as root on the node, or in the agent's pod")
}

fn equal(report: &RulesReport, wanted: Option<&Policy>) -> CheckVerdict {
    let is_wrong = |line: &&RuleLine| !matches!(line.mark, Mark::Fine | Mark::Foreign);
    let wrong: Vec<&RuleLine> = report.rules.iter().filter(is_wrong).collect();
    // What is missing besides rules is another check's.
    let only_absent = wrong.is_empty() && !report.absent.is_empty();
    match report.as_asked.map(|as_asked| as_asked || only_absent) {
        Some(true) => {
            let own = report.rules.iter().filter(|line| line.mark == Mark::Fine).count();
            let dialect = report.dialect.unwrap_or_default();
            CheckVerdict::pass(format!("{own} rules, as {dialect}, for {}", report.attachments.join(", ")))
        }
        Some(false) => {
            let named: Vec<String> = wrong.iter().take(NAMED).map(|line| spelled(line)).collect();
            let more = wrong.len().saturating_sub(NAMED);
            let more = if more > 0 { format!("; and {more} more") } else { String::new() };
            CheckVerdict::fail(format!("{}{more}", named.join("; ")), REPAIR)
        }
        None if wanted.is_some_and(|policy| !policy.is_empty()) => CheckVerdict::fail(
            "no attachment has asked for any: the plugin did not run for this pod",
            "it was started before the plugin was installed, or its network was not named then: delete the pod",
        ),
        None if wanted.is_some() => CheckVerdict::pass("no attachment has asked for any, and none are wanted"),
        None => CheckVerdict::not_checked("no attachment has asked for any, and whether any are wanted is not known"),
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
fn in_front(report: &RulesReport) -> CheckVerdict {
    let mut front = Vec::new();
    for chain in report.rules.chunk_by(|a, b| (&a.table, &a.chain) == (&b.table, &b.chain)) {
        let last = chain.iter().rposition(|line| line.mark == Mark::Fine).unwrap_or(0);
        front.extend(chain[..last].iter().filter(|line| line.mark == Mark::Foreign));
    }
    let legacy = match report.legacy.as_slice() {
        [] => String::new(),
        tables => format!("; tables of iptables-legacy ({}) are passed too, and not seen here", tables.join(", ")),
    };
    let Some(first) = front.first() else { return CheckVerdict::pass(format!("none does{legacy}")) };
    let named: Vec<String> = front.iter().take(NAMED).map(|line| spelled(line)).collect();
    let more = front.len().saturating_sub(NAMED);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    let (table, chain) = (first.table.split(' ').next_back().unwrap_or_default(), &first.chain);
    CheckVerdict::fail(
        format!("{}{more}{legacy}", named.join("; ")),
        format!(
            "if a home-made plugin means it, let uid-exclude or dns-exclude do the same; else remove it in the namespace: \
             iptables -t {table} -D {chain} 1"
        ),
    )
}

fn fixtures(live: &LiveRules) -> CheckVerdict {
    match live.unfixed.is_empty() {
        true => CheckVerdict::pass("addresses and routes are as they should be"),
        false => CheckVerdict::fail(live.unfixed.join("; "), REPAIR),
    }
}

/// Counters of the rules that send somewhere else.
fn traffic(report: &RulesReport) -> CheckVerdict {
    let sends =
        |line: &&RuleLine| ["REDIRECT", "TPROXY", "redirect to", "tproxy to"].iter().any(|to| line.rule.contains(to));
    let packets: u64 = report.rules.iter().filter(sends).filter_map(|line| line.packets).sum();
    let met: u64 = report.rules.iter().filter_map(|line| line.packets).sum();
    match (packets, met) {
        (0, 0) => CheckVerdict::not_checked("no packet has met any rule so far; --probe sends some"),
        (0, met) => CheckVerdict::pass(format!("{met} times a packet met a rule, none was redirected so far")),
        (packets, _) => CheckVerdict::pass(format!("{packets} packets were redirected")),
    }
}

pub(super) const HERE: Check = Check::of(CheckGroup::Sandbox, "pod-here", "the pod runs on this node");
pub(super) const NETNS: Check = Check::of(CheckGroup::Sandbox, "netns-found", "its network namespace is known");

/// What is known of where it is.
pub(super) struct PodNetns<'a> {
    pod: Option<&'a Pod>,
    found: Result<Option<FoundNetns>, Error>,
}

impl<'a> PodNetns<'a> {
    /// Looks for it on the node: by its UID, or by its name where the cluster does not tell that.
    pub(super) fn of(case: &CheckTarget, named: &PodRef, facts: Option<&'a Facts>) -> Self {
        let pod = facts.map(|facts| &facts.pod);
        let found = match pod {
            None => of_name(&case.mount, &named.namespace, &named.name),
            Some(pod) if pod.host_network => Ok(None),
            Some(pod) => pod.uid_on_node().map_or(Ok(None), |uid| of_pod(&case.mount, uid)),
        };
        Self { pod, found }
    }

    /// Its namespace, where that was found.
    pub(super) fn found(&self) -> Option<&FoundNetns> {
        self.found.as_ref().ok().and_then(Option::as_ref)
    }

    /// Says where it is, and what to run where it is not here.
    pub(super) fn examine(
        &self,
        case: &CheckTarget,
        inquiry: Option<&ApiProbe>,
        conf: Option<&NetConf>,
        checkup: &mut Results,
    ) {
        let never = checkup.has_failed(&EVENTS);
        let needed = if self.found().is_some() { &[][..] } else { &[&KNOWN] };
        checkup.after(needed, &HERE, || match (self.pod, self.found()) {
            _ if never => CheckVerdict::not_checked(format!("because {} failed", EVENTS.id)),
            (None, Some(_)) => CheckVerdict::pass("by what its runtime keeps under the pod's name"),
            (None, None) => CheckVerdict::not_checked("the pod is not known"),
            // Whatever the node is called here.
            (Some(pod), Some(_)) => {
                CheckVerdict::pass(format!("node {}", pod.node_name.as_deref().unwrap_or("unknown")))
            }
            (Some(pod), None) => here(pod, case, inquiry, conf),
        });
        checkup.after(&[&HERE], &NETNS, || self.netns());
    }

    fn netns(&self) -> CheckVerdict {
        match &self.found {
            _ if self.pod.is_some_and(|pod| pod.host_network) => {
                CheckVerdict::not_checked("the pod has the node's own (hostNetwork)")
            }
            Ok(Some(found)) => CheckVerdict::pass(found.evidence.clone()),
            Ok(None) => CheckVerdict::fail(
                "no result of an ADD and no process of the pod is on this node",
                "it has ended, or was never started: see the line events, and crictl pods --name on the node",
            ),
            Err(error) => {
                CheckVerdict::fail(error.to_string(), "see crictl inspectp for what the runtime knows of the sandbox")
            }
        }
    }
}

fn here(pod: &Pod, case: &CheckTarget, inquiry: Option<&ApiProbe>, conf: Option<&NetConf>) -> CheckVerdict {
    let Some(node) = &pod.node_name else {
        return CheckVerdict::not_checked("it is on no node so far: kubectl describe pod says why");
    };
    if case.node_name.as_ref() == Some(node) {
        return CheckVerdict::pass(format!("node {node}"));
    }
    let this = case.node_name.as_deref().unwrap_or("unknown");
    let probe = if case.probe { " --probe" } else { "" };
    let question = format!("doctor -n {} {}{probe}", pod.namespace, pod.name);
    let kubernetes = conf.map(|conf| &conf.kubernetes);
    let agents = kubernetes.and_then(|kubernetes| kubernetes.agent_namespace.as_deref());
    let agents = agents.unwrap_or(AGENT_NAMESPACE);
    let pods = inquiry.and_then(|inquiry| inquiry.pods_on(agents, node).ok()).unwrap_or_default();
    let is_agent = |pod: &&ObjectRef| {
        kubernetes.is_some_and(|k| k.agent_pod_prefixes.iter().any(|prefix| pod.name.starts_with(prefix.as_str())))
    };
    let agent = pods.iter().find(is_agent).map(|pod| pod.name.as_str());
    let next = elsewhere(pod, Some(agents), agent, &question);
    CheckVerdict::NotChecked(format!("it runs on node {node}, this is {this}"), Some(next))
}
