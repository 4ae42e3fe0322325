//! The types that all checks share: a verdict, the results, and the list that is printed or serialized.

use crate::cluster::agent::{PoliciesReport, PolicyCounts};
use crate::host_path::{HostPath, HostRoot};
use crate::inspect::terminal::{Cell, Screen, TextReport, Tone, counted, first_of, joined};
use crate::plugin::FormatCounts;
use crate::plugin::node::InstalledText;
use crate::pod::PodRef;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The results of a run of `detour doctor`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checklist {
    /// `NAMESPACE/NAME`; `None` if only the node was examined.
    pub pod: Option<String>,
    /// The node's name, if known.
    pub node: Option<String>,
    /// The platform, which decides the node's directories.
    #[serde(default)]
    pub platform: String,
    /// The version of this program.
    pub version: Cow<'static, str>,
    /// Whether no check failed.
    pub healthy: bool,
    /// The policies of the node's running pods, as the agent reports them; `None` if they are unknown.
    pub policies: Option<PoliciesReport>,
    /// How many pod sandboxes have a redirection of detour in each rule format; `None` if that is unknown.
    pub rule_formats: Option<FormatCounts>,
    /// The exclusions of the node's pods that are not needed; `None` if a pod was checked or the API is unknown.
    pub needless_exclusions: Option<Vec<NeedlessExclusion>>,
    /// The checks, in order.
    pub checks: Vec<ReportLine>,
}

/// The exclusions that an init container of a workload does not need.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeedlessExclusion {
    /// The namespace of the workload.
    pub namespace: String,
    /// The kind of the workload: that of the pods' controller, `Deployment` for its ReplicaSets, or `Pod`.
    pub kind: String,
    /// The name of the workload.
    pub name: String,
    /// The init container.
    pub container: String,
    /// The exclusions, each with its source.
    pub exclusions: BTreeSet<String>,
    /// The number of the workload's pods with these exclusions.
    pub pods: u32,
}

impl NeedlessExclusion {
    /// Returns its line in the table.
    pub(in crate::inspect) fn row(&self) -> Vec<Cell> {
        let Self { namespace, kind, name, container, exclusions, pods } = self;
        let exclusions = exclusions.iter().cloned().collect::<Vec<_>>().join("; ");
        let (workload, container) = (format!("{kind} {namespace}/{name}"), format!("init container {container}"));
        [workload, counted(*pods, "pod"), container, exclusions].map(Cell::of).to_vec()
    }
}

/// Returns one entry for each init container of a workload, sorted, with all of its exclusions and pods.
pub(in crate::inspect) fn merged(all: impl IntoIterator<Item = NeedlessExclusion>) -> Vec<NeedlessExclusion> {
    let mut merged: BTreeMap<[String; 4], NeedlessExclusion> = BTreeMap::new();
    for one in all {
        let key = [&one.namespace, &one.kind, &one.name, &one.container].map(Clone::clone);
        let known = merged.entry(key).or_insert_with(|| NeedlessExclusion { pods: 0, ..one.clone() });
        known.pods = known.pods.saturating_add(one.pods);
        known.exclusions.extend(one.exclusions);
    }
    merged.into_values().collect()
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportLine {
    /// The name of the check; stable across releases.
    pub id: Cow<'static, str>,
    /// The subject of the check.
    #[serde(default)]
    pub group: Cow<'static, str>,
    /// The condition that the check examines.
    pub checked: Cow<'static, str>,
    /// The verdict.
    #[serde(flatten)]
    pub verdict: CheckVerdict,
}

/// The verdict of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckVerdict {
    /// Whether the condition is met.
    pub outcome: CheckOutcome,
    /// What was found, or why the check was not run.
    pub found: String,
    /// The next step; `None` if there is nothing to do.
    pub next: Option<String>,
}

/// The outcome of a check. Of several conditions, the greatest counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckOutcome {
    /// The check was not possible, or not needed.
    NotChecked,
    /// The condition is met.
    Pass,
    /// The condition is not met, but the node works as configured.
    Warn,
    /// The condition is not met.
    Fail,
}

impl CheckOutcome {
    pub(in crate::inspect) const fn sign(self) -> (&'static str, Tone) {
        match self {
            Self::Pass => ("pass", Tone::Good),
            Self::Warn => ("warn", Tone::Notable),
            Self::Fail => ("FAIL", Tone::Bad),
            Self::NotChecked => ("-", Tone::Faint),
        }
    }
}

impl Checklist {
    pub(super) fn of(lines: Vec<ReportLine>) -> Self {
        let healthy = lines.iter().all(|line| line.verdict.outcome != CheckOutcome::Fail);
        Self { version: env!("CARGO_PKG_VERSION").into(), healthy, checks: lines, ..Self::default() }
    }

    /// Returns the checks with this outcome.
    pub(in crate::inspect) fn with(&self, outcome: CheckOutcome) -> impl Iterator<Item = &ReportLine> {
        self.checks.iter().filter(move |line| line.verdict.outcome == outcome)
    }

    fn verdict(&self) -> (String, Tone) {
        let count = |outcome| self.with(outcome).count();
        let (pass, fail) = (count(CheckOutcome::Pass), count(CheckOutcome::Fail));
        let text = format!("{pass} passed, {fail} failed, {} not checked", count(CheckOutcome::NotChecked));
        let text = match count(CheckOutcome::Warn) {
            0 => text,
            count => format!("{text}, {}", counted(count, "warning")),
        };
        (text, if self.healthy { Tone::Good } else { Tone::Bad })
    }
}

impl PolicyCounts {
    pub(in crate::inspect) const fn plus(self, other: Self) -> Self {
        Self {
            current: self.current.saturating_add(other.current),
            rejected: self.rejected.saturating_add(other.rejected),
            failed: self.failed.saturating_add(other.failed),
            none: self.none.saturating_add(other.none),
            outside: self.outside.saturating_add(other.outside),
        }
    }

    /// Returns the number of pods whose rules are missing or may be wrong.
    pub(in crate::inspect) const fn lost(self) -> u32 {
        self.failed.saturating_add(self.none).saturating_add(self.outside)
    }
}

impl Display for PolicyCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { current, rejected, failed, none, outside } = self;
        write!(f, "{current} current, {rejected} with rejected requests, {failed} failed, {none} without rules")?;
        if *outside > 0 { write!(f, ", {outside} outside of the ambient mesh") } else { Ok(()) }
    }
}

impl TextReport for Checklist {
    fn write(&self, page: &mut Screen) {
        let node = self.node.as_ref().map_or_else(|| "this node".to_owned(), |name| format!("node {name}"));
        let what = match (&self.pod, &self.node) {
            (Some(pod), _) => format!("Pod {pod} on {node}"),
            (None, Some(name)) => format!("Node {name}"),
            (None, None) => "This node".to_owned(),
        };
        let (verdict, tone) = self.verdict();
        page.labeled(format!("{what} ({}):", self.platform), verdict, tone);
        let is_open = |line: &&ReportLine| line.verdict.next.is_some();
        let outcomes = [CheckOutcome::Fail, CheckOutcome::Warn, CheckOutcome::NotChecked];
        let mut detailed = outcomes.into_iter().flat_map(|outcome| self.with(outcome)).filter(is_open).peekable();
        if detailed.peek().is_some() {
            page.heading("To do");
            detailed.for_each(|line| line.write(page));
        }
        let row = |line: &ReportLine| {
            let sign = Cell::of("pass").tone(Tone::Good);
            vec![sign, Cell::of(&line.id), Cell::of(&line.checked), Cell::of(&line.verdict.found).tone(Tone::Faint)]
        };
        page.section("Passed", self.with(CheckOutcome::Pass).map(row));
        let skipped = self.with(CheckOutcome::NotChecked).filter(|line| !is_open(line));
        let skipped = joined(skipped.map(|line| format!("{} ({})", line.id, line.verdict.found)));
        page.section("Not checked", (!skipped.is_empty()).then(|| vec![Cell::of(skipped).tone(Tone::Faint)]));
        let again = |line: &ReportLine| {
            let sign = Cell::of("FAIL").tone(Tone::Bad);
            vec![sign, Cell::of(&line.id).tone(Tone::Strong), Cell::of(&line.verdict.found)]
        };
        page.section("Failed", self.with(CheckOutcome::Fail).map(again));
    }
}

impl ReportLine {
    /// Writes a check with its finding and its next step.
    pub(in crate::inspect) fn write(&self, page: &mut Screen) {
        let CheckVerdict { outcome, found, next } = &self.verdict;
        let (sign, tone) = outcome.sign();
        let name = Cell::of(&self.id).tone(Tone::Strong);
        page.line(&[Cell::of(format!("  {sign:4}")).tone(tone), name, Cell::of(format!("({})", self.checked))]);
        page.line(&[Cell::of("       "), Cell::of(found).tone(tone)]);
        if let Some(next) = next {
            page.line(&[Cell::of("       "), Cell::of(format!("next: {next}")).tone(Tone::Notable)]);
        }
    }
}

impl CheckVerdict {
    /// The condition is met: the finding.
    pub(super) fn pass(found: impl Into<String>) -> Self {
        Self { outcome: CheckOutcome::Pass, found: found.into(), next: None }
    }

    /// The condition is not met, but the node works as configured: the finding and the next step.
    pub(super) fn warn(found: impl Into<String>, next: impl Into<String>) -> Self {
        Self { outcome: CheckOutcome::Warn, ..Self::fail(found, next) }
    }

    /// The condition is not met: the finding and the next step.
    pub(super) fn fail(found: impl Into<String>, next: impl Into<String>) -> Self {
        Self { outcome: CheckOutcome::Fail, found: found.into(), next: Some(next.into()) }
    }

    /// The condition is met, with this finding, unless something is wrong, of which the first three are named.
    pub(super) fn unless(wrong: impl IntoIterator<Item = String>, fine: impl Into<String>, next: &str) -> Self {
        let wrong = first_of(wrong, NAMED, "; ");
        if wrong.is_empty() { Self::pass(fine) } else { Self::fail(wrong, next) }
    }

    /// The condition is met: the finding. Or it is not: the reason and the next step.
    pub(super) fn of(result: Result<impl Into<String>, impl Display>, next: impl Into<String>) -> Self {
        result.map_or_else(|why| Self::fail(why.to_string(), next), Self::pass)
    }

    /// The check was not possible: the reason.
    pub(super) fn not_checked(why: impl Into<String>) -> Self {
        Self { outcome: CheckOutcome::NotChecked, found: why.into(), next: None }
    }

    /// The check was not possible: the reason, and how to make it.
    pub(super) fn to_do(why: impl Into<String>, next: impl Into<String>) -> Self {
        Self { outcome: CheckOutcome::NotChecked, ..Self::fail(why, next) }
    }

    /// Returns one verdict for several conditions: all failures and warnings, with their next steps; or else what
    /// was found; or else the first reason why a check was not possible.
    pub(super) fn merged(verdicts: impl IntoIterator<Item = Self>) -> Self {
        let mut all: Vec<Self> = verdicts.into_iter().collect();
        let outcome = all.iter().map(|one| one.outcome).max().unwrap_or(CheckOutcome::NotChecked);
        if outcome == CheckOutcome::NotChecked {
            return all.into_iter().next().unwrap_or_else(|| Self::not_checked("nothing to check"));
        }
        all.retain(|one| one.outcome >= outcome.min(CheckOutcome::Warn));
        all.sort_by_key(|one| Reverse(one.outcome));
        let found = all.iter().map(|one| one.found.as_str()).collect::<Vec<_>>().join("; ");
        let mut next: Vec<String> = all.into_iter().filter_map(|one| one.next).collect();
        next.dedup();
        Self { outcome, found, next: (!next.is_empty()).then(|| next.join("; ")) }
    }
}

/// The number of things that a finding names; the rest is counted.
pub(super) const NAMED: usize = 3;

/// The timeout of a request to the agent.
pub(super) const AGENT_TIMEOUT: Duration = Duration::from_secs(2);

/// The node to examine, and optionally a pod.
#[derive(Debug, Clone)]
pub struct CheckTarget {
    /// The mount point of the node's file system in this process.
    pub mount: PathBuf,
    /// The node's name in the cluster, if known.
    pub node_name: Option<String>,
    /// The platform, a value of `--platform`.
    pub platform: String,
    /// Whether the plugin is part of the cluster network's configuration list.
    pub chained: bool,
    /// The directories of CNI plugins.
    pub bin_dirs: BTreeSet<HostPath>,
    /// A configuration file, or the directory of configuration files.
    pub conf: HostPath,
    /// The installed programs.
    pub programs: Vec<HostPath>,
    /// The installed configurations; none if the command line names one.
    pub installed: Vec<InstalledText>,
    /// The own lists of the node.
    pub own_lists: Vec<OwnList>,
    /// The directory of Multus's auxiliary chain, if one of the plugin's files is there, and the files because of which
    /// Multus skips all plugins, each with the reason.
    pub multus_chain: Option<(HostPath, Vec<String>)>,
    /// The differences between the node and the installation record, one line each; `None` without an installation. The
    /// error is the reason why they are unknown.
    pub changed: Result<Option<Vec<String>>, String>,
    /// The pod to examine.
    pub pod: Option<PodRef>,
    /// Whether to send packets in the pod's network namespace.
    pub probe: bool,
}

/// An own list: the copy of the cluster network's configuration list that runtimes use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnList {
    /// Its file.
    pub path: HostPath,
    /// The name of its source, a file in the same directory.
    pub source: String,
    /// Why it is not a copy of its source; `None` if it is.
    pub difference: Option<String>,
}

impl CheckTarget {
    /// Returns the path in this process of a path on the node.
    pub(super) fn reach(&self, path: &HostPath) -> io::Result<PathBuf> {
        HostRoot::new(&self.mount).reach(path)
    }

    /// Returns the path in this process of a path that a configuration contains.
    pub(super) fn reach_named(&self, path: &Path) -> io::Result<PathBuf> {
        let path = HostPath::new(path);
        let path = path.ok_or_else(|| io::Error::other("expected an absolute path without \"..\""))?;
        self.reach(&path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: &'static str, outcome: CheckOutcome, next: Option<&str>) -> ReportLine {
        let verdict = CheckVerdict { outcome, found: format!("{id} was found"), next: next.map(str::to_owned) };
        ReportLine { id: id.into(), group: "node".into(), checked: "it holds".into(), verdict }
    }

    #[test]
    fn a_check_that_was_not_run_is_not_a_failure() {
        let fine = || vec![line("a", CheckOutcome::Pass, None), line("b", CheckOutcome::NotChecked, None)];
        assert!(Checklist::of(fine()).healthy);
        let warned = [fine(), vec![line("c", CheckOutcome::Warn, Some("restart it"))]].concat();
        assert!(Checklist::of(warned).healthy);
        let failed = [fine(), vec![line("c", CheckOutcome::Fail, Some("mend it"))]].concat();
        assert!(!Checklist::of(failed).healthy);
    }

    #[test]
    fn the_next_step_is_printed_below_the_finding() {
        let list =
            Checklist { platform: "k3s".into(), ..Checklist::of(vec![line("c", CheckOutcome::Fail, Some("mend it"))]) };
        let mut page = Screen::plain();
        list.write(&mut page);
        let text = page.into_text();
        let text = text.as_str();
        assert!(text.starts_with("This node (k3s): 0 passed, 1 failed, 0 not checked\n\nTo do\n"), "{text}");
        let lines: Vec<&str> = text.lines().skip(3).collect();
        let expected = ["  FAIL c (it holds)", "        c was found", "        next: mend it", ""];
        assert_eq!(lines[..4], expected);
        assert_eq!(lines[4..], ["Failed", "  FAIL  c  c was found"]);
    }

    #[test]
    fn a_warning_is_counted_and_has_its_next_step() {
        let warned = vec![line("a", CheckOutcome::Pass, None), line("c", CheckOutcome::Warn, Some("restart it"))];
        let list = Checklist { platform: "k3s".into(), ..Checklist::of(warned) };
        let mut page = Screen::plain();
        list.write(&mut page);
        let text = page.into_text();
        let lines: Vec<&str> = text.as_str().lines().collect();
        assert_eq!(lines[0], "This node (k3s): 1 passed, 0 failed, 0 not checked, 1 warning");
        assert_eq!(lines[3..6], ["  warn c (it holds)", "        c was found", "        next: restart it"]);
        assert_eq!(serde_json::to_value(CheckOutcome::Warn).expect("serialized"), "warn");
    }

    /// A node's name comes from its host name or from a flag.
    #[test]
    fn any_name_of_a_node_is_printed() {
        for name in ["", "\u{e9}t\u{e9}", "n"] {
            let list = Checklist { node: Some(name.to_owned()), ..Checklist::of(Vec::new()) };
            let mut page = Screen::plain();
            list.write(&mut page);
            assert!(page.into_text().as_str().starts_with("Node "), "{name}");
        }
    }

    #[test]
    fn several_conditions_have_one_verdict_with_all_failures() {
        let (pass, fail) = (CheckVerdict::pass, |what: &str| CheckVerdict::fail(what, format!("mend {what}")));
        let failed = CheckVerdict::merged([pass("a"), fail("b"), CheckVerdict::not_checked("c"), fail("d")]);
        assert_eq!(failed, CheckVerdict::fail("b; d", "mend b; mend d"));
        assert_eq!(CheckVerdict::merged([pass("a"), CheckVerdict::not_checked("c"), pass("b")]), pass("a; b"));
        assert_eq!(CheckVerdict::merged([CheckVerdict::not_checked("c")]), CheckVerdict::not_checked("c"));
    }

    #[test]
    fn one_init_container_of_a_workload_has_one_entry() {
        let one = |name: &str, exclusion: &str, pods| NeedlessExclusion {
            name: name.into(),
            exclusions: [exclusion.into()].into(),
            pods,
            ..NeedlessExclusion::default()
        };
        let all = [one("b", "y", 1), one("b", "x", u32::MAX), one("a", "x", 1), one("b", "y", 1)];
        let both = NeedlessExclusion { exclusions: ["x".into(), "y".into()].into(), ..one("b", "", u32::MAX) };
        assert_eq!(merged(all), [one("a", "x", 1), both]);
    }
}
