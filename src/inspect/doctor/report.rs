//! The types that all checks share: a verdict, the results, and the list that is printed or serialized.

use super::checks::{Check, CheckGroup};
pub use super::target::{CheckTarget, Installation, MultusChain, OwnList};
use crate::cluster::agent::PoliciesReport;
use crate::inspect::nodes::NeedlessExclusion;
use crate::inspect::terminal::{Cell, Screen, TextReport, Tone, counted};
use crate::plugin::FormatCounts;
use crate::printable::without_userinfo;
use crate::wait;
use serde::Serialize;
use std::convert::Infallible;
use std::time::Duration;

/// The results of a run of `detour doctor`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Checklist {
    /// `NAMESPACE/NAME`; `None` if only the node was examined.
    pub pod: Option<String>,
    /// The node's name, if known.
    pub node: Option<String>,
    /// The platform, which decides the node's directories.
    pub platform: String,
    /// The version of this program.
    pub version: &'static str,
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

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReportLine {
    /// The name of the check; stable across releases.
    pub id: &'static str,
    /// The subject of the check.
    pub group: CheckGroup,
    /// The condition that the check examines.
    pub checked: &'static str,
    /// Whether the condition is met.
    pub outcome: CheckOutcome,
    /// What was found, or why the check was not run.
    pub found: String,
    /// The next step; `None` if there is nothing to do.
    pub next: Option<String>,
}

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckOutcome {
    /// The condition is met.
    Pass,
    /// The condition is not met, but the node works as configured.
    Warn,
    /// The condition is not met.
    Fail,
    /// The check was not possible, or not needed.
    NotChecked,
}

impl CheckOutcome {
    const fn sign(self) -> (&'static str, Tone) {
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
        let healthy = lines.iter().all(|line| line.outcome != CheckOutcome::Fail);
        Self { version: env!("CARGO_PKG_VERSION"), healthy, checks: lines, ..Self::default() }
    }

    fn verdict(&self) -> (String, Tone) {
        let count = |outcome| self.checks.iter().filter(|line| line.outcome == outcome).count();
        let (pass, fail) = (count(CheckOutcome::Pass), count(CheckOutcome::Fail));
        let text = format!("{pass} passed, {fail} failed, {} not checked", count(CheckOutcome::NotChecked));
        let text = match count(CheckOutcome::Warn) {
            0 => text,
            count => format!("{text}, {}", counted(count, "warning")),
        };
        (text, if self.healthy { Tone::Good } else { Tone::Bad })
    }
}

impl TextReport for Checklist {
    fn write(&self, page: &mut Screen) {
        let node = self.node.as_ref().map_or_else(|| "this node".to_owned(), |name| format!("node {name}"));
        let what = match &self.pod {
            Some(pod) => format!("Pod {pod} on {node} ({}):", self.platform),
            None => match &self.node {
                Some(name) => format!("Node {name} ({}):", self.platform),
                None => format!("This node ({}):", self.platform),
            },
        };
        let (verdict, tone) = self.verdict();
        page.line(&[Cell::of(what), Cell::of(verdict).tone(tone)]);
        let with = |outcome| self.checks.iter().filter(move |line| line.outcome == outcome);
        let is_open = |line: &&ReportLine| line.outcome == CheckOutcome::NotChecked && line.next.is_some();
        let open = self.checks.iter().filter(is_open);
        let detailed: Vec<&ReportLine> = with(CheckOutcome::Fail).chain(with(CheckOutcome::Warn)).chain(open).collect();
        if !detailed.is_empty() {
            page.heading("To do");
            detailed.iter().for_each(|line| line.write(page));
        }
        let row = |line: &ReportLine| {
            vec![
                Cell::of("pass").tone(Tone::Good),
                Cell::of(line.id),
                Cell::of(line.checked),
                Cell::of(&line.found).tone(Tone::Faint),
            ]
        };
        page.section("Passed", with(CheckOutcome::Pass).map(row));
        let skipped: Vec<String> = with(CheckOutcome::NotChecked)
            .filter(|line| line.next.is_none())
            .map(|line| format!("{} ({})", line.id, line.found))
            .collect();
        if !skipped.is_empty() {
            page.heading("Not checked");
            page.table(&[vec![Cell::of(skipped.join(", ")).tone(Tone::Faint)]]);
        }
        let again = |line: &ReportLine| {
            let sign = Cell::of("FAIL").tone(Tone::Bad);
            vec![sign, Cell::of(line.id).tone(Tone::Strong), Cell::of(&line.found)]
        };
        page.section("Failed", with(CheckOutcome::Fail).map(again));
    }
}

impl ReportLine {
    /// Writes a check with its finding and its next step.
    fn write(&self, page: &mut Screen) {
        let (sign, tone) = self.outcome.sign();
        let name = Cell::of(self.id).tone(Tone::Strong);
        page.line(&[Cell::of(format!("  {sign:4}")).tone(tone), name, Cell::of(format!("({})", self.checked))]);
        page.line(&[Cell::of("       "), Cell::of(&self.found).tone(tone)]);
        // Next steps may have several lines, for commands. A finding is one line: it can contain text from elsewhere.
        let next = self.next.iter().flat_map(|next| next.lines()).enumerate();
        for (index, line) in next {
            let label = if index == 0 { "next: " } else { "" };
            page.line(&[Cell::of("       "), Cell::of(format!("{label}{line}")).tone(Tone::Notable)]);
        }
    }
}

/// The verdict of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CheckVerdict {
    /// The condition is met: the finding.
    Pass(String),
    /// The condition is not met, but the node works as configured: the finding and the next step.
    Warn(String, String),
    /// The condition is not met: the finding and the next step.
    Fail(String, String),
    /// The check was not possible: the reason, and the next step if there is one.
    NotChecked(String, Option<String>),
}

impl CheckVerdict {
    pub(super) fn pass(found: impl Into<String>) -> Self {
        Self::Pass(found.into())
    }

    pub(super) fn warn(found: impl Into<String>, next: impl Into<String>) -> Self {
        Self::Warn(found.into(), next.into())
    }

    pub(super) fn fail(found: impl Into<String>, next: impl Into<String>) -> Self {
        Self::Fail(found.into(), next.into())
    }

    /// Unites the verdicts of several attempts: the first failure or warning, otherwise all findings. Without an attempt,
    /// the reason is `none`.
    pub(super) fn all(verdicts: Vec<Self>, none: &str) -> Self {
        let (mut passed, mut warned, mut failed, mut not_checked) = (Vec::new(), None, None, None);
        for verdict in verdicts {
            match verdict {
                Self::Pass(found) => passed.push(found),
                Self::Warn(..) => drop(warned.get_or_insert(verdict)),
                Self::Fail(..) => drop(failed.get_or_insert(verdict)),
                Self::NotChecked(..) => drop(not_checked.get_or_insert(verdict)),
            }
        }
        let passed = (!passed.is_empty()).then(|| Self::Pass(passed.join("; ")));
        failed.or(warned).or(passed).or(not_checked).unwrap_or_else(|| Self::not_checked(none))
    }

    /// Returns one verdict for several conditions: all failures or else all warnings, with their next steps; or else what
    /// was found.
    pub(super) fn merged(verdicts: impl IntoIterator<Item = Self>) -> Self {
        let (mut passed, mut warned, mut failed, mut not_checked) = (Vec::new(), Vec::new(), Vec::new(), None);
        for verdict in verdicts {
            match verdict {
                Self::Pass(found) => passed.push(found),
                Self::Warn(found, next) => warned.push((found, next)),
                Self::Fail(found, next) => failed.push((found, next)),
                Self::NotChecked(..) => drop(not_checked.get_or_insert(verdict)),
            }
        }
        let joined = |both: Vec<(String, String)>| {
            let (found, mut next): (Vec<_>, Vec<_>) = both.into_iter().unzip();
            next.dedup();
            (found.join("; "), next.join("; "))
        };
        match (failed.is_empty(), warned.is_empty(), passed.is_empty()) {
            (false, ..) => {
                let (found, next) = joined(failed.into_iter().chain(warned).collect());
                Self::Fail(found, next)
            }
            (true, false, _) => {
                let (found, next) = joined(warned);
                Self::Warn(found, next)
            }
            (true, true, false) => Self::Pass(passed.join("; ")),
            _ => not_checked.unwrap_or_else(|| Self::not_checked("nothing to check")),
        }
    }

    /// Repeats a check that fails: what it examines may be about to change. Returns the last verdict after `settling`.
    pub(super) fn settled(settling: Duration, verdict: impl Fn() -> Self) -> Self {
        let passed = wait::until(settling, INTERVALS, || match verdict() {
            Self::Fail(..) => Ok::<_, Infallible>(None),
            verdict => Ok(Some(verdict)),
        });
        passed.ok().flatten().unwrap_or_else(verdict)
    }

    pub(super) fn not_checked(why: impl Into<String>) -> Self {
        Self::NotChecked(why.into(), None)
    }
}

/// How often a check is repeated that may pass soon.
const INTERVALS: wait::Intervals = [Duration::from_millis(100); 2];

/// The timeout of a request to the agent.
pub(super) const AGENT_TIMEOUT: Duration = Duration::from_secs(2);

/// The results so far, in the order of the checks.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) lines: Vec<ReportLine>,
}

impl Results {
    /// Adds a verdict. User names and passwords in URLs are removed, because users share these lists.
    pub(super) fn add(&mut self, check: &Check, verdict: CheckVerdict) {
        let (outcome, found, next) = match verdict {
            CheckVerdict::Pass(found) => (CheckOutcome::Pass, found, None),
            CheckVerdict::Warn(found, next) => (CheckOutcome::Warn, found, Some(next)),
            CheckVerdict::Fail(found, next) => (CheckOutcome::Fail, found, Some(next)),
            CheckVerdict::NotChecked(why, next) => (CheckOutcome::NotChecked, why, next),
        };
        let public = |text: String| without_userinfo(&text).into_owned();
        let (found, next) = (public(found), next.map(public));
        let Check { id, group, holds, .. } = *check;
        self.lines.push(ReportLine { id, group, checked: holds, outcome, found, next });
    }

    /// Makes a check if all that it needs were made and did not fail; otherwise adds it as not checked.
    pub(super) fn run(&mut self, check: &Check, verdict: impl FnOnce() -> CheckVerdict) {
        self.after(check.needs, check, verdict);
    }

    /// Makes a check that needs `needed` in this case.
    pub(super) fn after(&mut self, needed: &[&Check], check: &Check, verdict: impl FnOnce() -> CheckVerdict) {
        let verdict = self.obstacle(needed).map_or_else(verdict, CheckVerdict::not_checked);
        self.add(check, verdict);
    }

    /// Adds checks that can't be made without what they need.
    pub(super) fn skip<'a>(&mut self, checks: impl IntoIterator<Item = &'a Check>) {
        for check in checks {
            self.run(check, || CheckVerdict::not_checked("what it needs is not known"));
        }
    }

    /// Returns the first failed check of a group.
    pub(super) fn failed_in(&self, group: CheckGroup) -> Option<&'static str> {
        let failed = |line: &&ReportLine| line.group == group && line.outcome == CheckOutcome::Fail;
        self.lines.iter().find(failed).map(|line| line.id)
    }

    /// Whether the check failed.
    pub(super) fn has_failed(&self, check: &Check) -> bool {
        self.lines.iter().any(|line| line.id == check.id && line.outcome == CheckOutcome::Fail)
    }

    /// Returns why the first of `needed` that failed or was not checked prevents other checks.
    pub(super) fn obstacle(&self, needed: &[&Check]) -> Option<String> {
        let bad = |check: &&Check| {
            let is_usable = |outcome| matches!(outcome, CheckOutcome::Pass | CheckOutcome::Warn);
            let line = self.lines.iter().find(|line| line.id == check.id && !is_usable(line.outcome))?;
            let how = if line.outcome == CheckOutcome::Fail { "failed" } else { "was not checked" };
            Some(format!("because {} {how}", line.id))
        };
        needed.iter().find_map(bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: &'static str, outcome: CheckOutcome, next: Option<&str>) -> ReportLine {
        let found = format!("{id} was found");
        ReportLine { id, group: CheckGroup::Node, checked: "it holds", outcome, found, next: next.map(str::to_owned) }
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

    const fn check(id: &'static str, needs: &'static [&'static Check]) -> Check {
        Check { id, group: CheckGroup::Node, holds: id, needs }
    }

    const A: &Check = &check("a", &[]);
    const B: &Check = &check("b", &[A]);
    const C: &Check = &check("c", &[A, B]);

    #[test]
    fn the_first_failure_of_several_attempts_is_the_verdict() {
        let (pass, fail) = (|text: &str| CheckVerdict::pass(text), || CheckVerdict::fail("broken", "mend it"));
        let not = || CheckVerdict::not_checked("no route");
        assert_eq!(CheckVerdict::all(vec![pass("a"), fail(), pass("b")], "none"), fail());
        assert_eq!(CheckVerdict::all(vec![pass("a"), not(), pass("b")], "none"), pass("a; b"));
        assert_eq!(CheckVerdict::all(vec![not()], "none"), not());
        assert_eq!(CheckVerdict::all(Vec::new(), "none"), CheckVerdict::not_checked("none"));
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
    fn user_names_and_passwords_are_removed_from_urls() {
        let mut results = Results::default();
        results.add(A, CheckVerdict::fail("https://u:s3cr3t@a failed", "ask http://s3cr3t@b"));
        let line = &results.lines[0];
        let shown = (line.found.as_str(), line.next.as_deref());
        assert_eq!(shown, ("https://(redacted)@a failed", Some("ask http://(redacted)@b")));
    }

    #[test]
    fn a_check_that_depends_on_a_failed_one_is_not_run() {
        let mut results = Results::default();
        results.add(A, CheckVerdict::pass("fine"));
        results.run(B, || CheckVerdict::fail("broken", "mend it"));
        results.run(C, || unreachable!("b failed"));
        let outcomes: Vec<_> = results.lines.iter().map(|line| (line.outcome, line.found.as_str())).collect();
        let wanted = [
            (CheckOutcome::Pass, "fine"),
            (CheckOutcome::Fail, "broken"),
            (CheckOutcome::NotChecked, "because b failed"),
        ];
        assert_eq!(outcomes, wanted);
        assert_eq!(results.obstacle(&[C]), Some("because c was not checked".to_owned()));
        assert_eq!(results.obstacle(&[A]), None);
    }
}
