//! The checklist as people and programs get it.
//!
//! A check, what it came to, and the list of all.
//!
//! Whom the doctor looks at, and where things are.

use crate::host_path::{HostPath, HostRoot};
use crate::inspect::terminal::{Cell, Screen, TextReport, Tone};
use crate::pod::PodRef;
use crate::printable::without_userinfo;
use serde::Serialize;
use std::io;
use std::path::PathBuf;

/// What was looked at and what was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Checklist {
    /// `NAMESPACE/NAME`; none where the node alone was looked at.
    pub pod: Option<String>,
    /// The node's name, as far as it is known.
    pub node: Option<String>,
    /// How the node's directories are known.
    pub platform: String,
    /// The version of the program that looked.
    pub version: &'static str,
    /// Whether nothing failed.
    pub healthy: bool,
    /// The checks.
    pub checks: Vec<ReportLine>,
}

/// A line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReportLine {
    /// Which check it is; stable.
    pub id: &'static str,
    /// What it is about.
    pub group: CheckGroup,
    /// What must hold.
    pub checked: &'static str,
    /// Whether it does.
    pub outcome: CheckOutcome,
    /// What was found, or why it could not be looked at.
    pub found: String,
    /// What to do next; none where it holds.
    pub next: Option<String>,
}

/// What a check is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckGroup {
    /// What the node has on disk.
    Node,
    /// How the plugin reaches the API, and what it may there.
    Cluster,
    /// What the kernel can do.
    Kernel,
    /// What the pod asks for.
    Pod,
    /// What is in the pod's network namespace.
    Sandbox,
    /// What real packets do.
    Probe,
    /// What runtime and plugin have said.
    Logs,
}

/// What a check came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckOutcome {
    /// It holds.
    Pass,
    /// It does not.
    Fail,
    /// It could not be looked at, or there was no need to.
    NotChecked,
}

impl CheckGroup {
    const fn title(self) -> &'static str {
        match self {
            Self::Node => "Node",
            Self::Cluster => "Cluster",
            Self::Kernel => "Kernel",
            Self::Pod => "Pod",
            Self::Sandbox => "Sandbox",
            Self::Probe => "Live proof",
            Self::Logs => "Logs",
        }
    }
}

impl CheckOutcome {
    const fn sign(self) -> (&'static str, Tone) {
        match self {
            Self::Pass => ("pass", Tone::Good),
            Self::Fail => ("FAIL", Tone::Bad),
            Self::NotChecked => ("-", Tone::Faint),
        }
    }
}

impl Checklist {
    pub(super) fn of(lines: Vec<ReportLine>) -> Self {
        let healthy = lines.iter().all(|line| line.outcome != CheckOutcome::Fail);
        let version = env!("CARGO_PKG_VERSION");
        Self { pod: None, node: None, platform: String::new(), version, healthy, checks: lines }
    }

    fn verdict(&self) -> (String, Tone) {
        let count = |outcome| self.checks.iter().filter(|line| line.outcome == outcome).count();
        let (pass, fail) = (count(CheckOutcome::Pass), count(CheckOutcome::Fail));
        let text = format!("{pass} passed, {fail} failed, {} not checked", count(CheckOutcome::NotChecked));
        (text, if self.healthy { Tone::Good } else { Tone::Bad })
    }
}

impl TextReport for Checklist {
    fn write(&self, page: &mut Screen) {
        let node = self.node.as_ref().map_or_else(|| "this node".to_owned(), |name| format!("node {name}"));
        let what = match &self.pod {
            Some(pod) => format!("Pod {pod} on {node} ({}):", self.platform),
            None => format!("{}{} ({}):", node[..1].to_uppercase(), &node[1..], self.platform),
        };
        let (verdict, tone) = self.verdict();
        page.line(&[Cell::of(what), Cell::of(verdict).tone(tone)]);
        let width = |text: fn(&ReportLine) -> &str| self.checks.iter().map(|line| text(line).chars().count()).max();
        let (ids, statements) = (width(|line| line.id), width(|line| line.checked));
        let widths = (ids.unwrap_or_default(), statements.unwrap_or_default());
        for group in self.checks.chunk_by(|a, b| a.group == b.group) {
            page.heading(group[0].group.title());
            group.iter().for_each(|line| line.write(widths, page));
        }
    }
}

impl ReportLine {
    /// In one line where it holds; else with what was found and what to do below.
    fn write(&self, (ids, statements): (usize, usize), page: &mut Screen) {
        let (sign, tone) = self.outcome.sign();
        let failed = self.outcome == CheckOutcome::Fail;
        let statement = Cell::of(format!(" {:statements$}", self.checked));
        let mut cells = vec![
            Cell::of(format!("  {sign:4}")).tone(tone),
            Cell::of(format!(" {:ids$}", self.id)).tone(if failed { Tone::Strong } else { Tone::Plain }),
            statement,
        ];
        if !failed {
            cells.push(Cell::of(format!(" {}", self.found)).tone(Tone::Faint));
        }
        page.line(&cells);
        if failed {
            page.line(&[Cell::of("       "), Cell::of(&self.found).tone(Tone::Bad)]);
        }
        // Commands are in lines of their own; what was found is one line, for it holds text from elsewhere.
        let next = self.next.iter().flat_map(|next| next.lines()).enumerate();
        for (index, line) in next {
            let label = if index == 0 { "next: " } else { "" };
            page.line(&[Cell::of("       "), Cell::of(format!("{label}{line}")).tone(Tone::Notable)]);
        }
    }
}

/// Something that is looked at.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Check {
    /// How programs know it; stable.
    pub(super) id: &'static str,
    pub(super) group: CheckGroup,
    /// What must hold.
    pub(super) holds: &'static str,
}

impl Check {
    pub(super) const fn of(group: CheckGroup, id: &'static str, holds: &'static str) -> Self {
        Self { id, group, holds }
    }
}

/// What a check came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CheckVerdict {
    /// It holds; what was found.
    Pass(String),
    /// It does not; what was found, and what to do.
    Fail(String, String),
    /// That can't be told; why, and what to do about that.
    NotChecked(String, Option<String>),
}

impl CheckVerdict {
    pub(super) fn pass(found: impl Into<String>) -> Self {
        Self::Pass(found.into())
    }

    pub(super) fn fail(found: impl Into<String>, next: impl Into<String>) -> Self {
        Self::Fail(found.into(), next.into())
    }

    /// Of several tries of one check: a failure counts, else what was found each time. `none` where
    /// there was no try.
    pub(super) fn all(verdicts: Vec<Self>, none: &str) -> Self {
        let (mut passed, mut failed, mut not_checked) = (Vec::new(), None, None);
        for verdict in verdicts {
            match verdict {
                Self::Pass(found) => passed.push(found),
                Self::Fail(..) => drop(failed.get_or_insert(verdict)),
                Self::NotChecked(..) => drop(not_checked.get_or_insert(verdict)),
            }
        }
        let passed = (!passed.is_empty()).then(|| Self::Pass(passed.join("; ")));
        failed.or(passed).or(not_checked).unwrap_or_else(|| Self::not_checked(none))
    }

    pub(super) fn not_checked(why: impl Into<String>) -> Self {
        Self::NotChecked(why.into(), None)
    }
}

/// The checks that were done, in their order.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) lines: Vec<ReportLine>,
}

impl Results {
    /// Notes what a check came to. A list may be shown to others, so URLs lose their users and passwords.
    pub(super) fn add(&mut self, check: &Check, verdict: CheckVerdict) {
        let (outcome, found, next) = match verdict {
            CheckVerdict::Pass(found) => (CheckOutcome::Pass, found, None),
            CheckVerdict::Fail(found, next) => (CheckOutcome::Fail, found, Some(next)),
            CheckVerdict::NotChecked(why, next) => (CheckOutcome::NotChecked, why, next),
        };
        let (found, next) =
            (without_userinfo(&found).into_owned(), next.map(|next| without_userinfo(&next).into_owned()));
        let Check { id, group, holds } = *check;
        self.lines.push(ReportLine { id, group, checked: holds, outcome, found, next });
    }

    /// Does a check that makes sense only where `needed` all hold.
    pub(super) fn after(&mut self, needed: &[&Check], check: &Check, verdict: impl FnOnce() -> CheckVerdict) {
        let verdict = match self.obstacle(needed) {
            Some(why) => CheckVerdict::not_checked(why),
            None => verdict(),
        };
        self.add(check, verdict);
    }

    /// Whether it was looked at and does not hold.
    pub(super) fn has_failed(&self, check: &Check) -> bool {
        self.lines.iter().any(|line| line.id == check.id && line.outcome == CheckOutcome::Fail)
    }

    /// The first of `needed` that was looked at and is not known to hold.
    pub(super) fn obstacle(&self, needed: &[&Check]) -> Option<String> {
        let bad = |check: &&Check| {
            let line = self.lines.iter().find(|line| line.id == check.id && line.outcome != CheckOutcome::Pass)?;
            let how = if line.outcome == CheckOutcome::Fail { "failed" } else { "was not checked" };
            Some(format!("because {} {how}", line.id))
        };
        needed.iter().find_map(bad)
    }
}

/// A node, and perhaps a pod.
#[derive(Debug, Clone)]
pub struct CheckTarget {
    /// Where this process finds the node's file system.
    pub mount: PathBuf,
    /// The name by which the cluster knows this node, where that is known.
    pub node_name: Option<String>,
    /// The platform's name, as `--platform` calls it.
    pub platform: String,
    /// Whether the plugin is a member of the cluster network's list there.
    pub chained: bool,
    /// Where programs are looked for.
    pub bin_dirs: Vec<HostPath>,
    /// A configuration, or the directory with those among which it is.
    pub conf: HostPath,
    /// What is known of the installation.
    pub installation: Installation,
    /// The kubeconfig of whoever asks, as this process sees it; else the plugin's own is used.
    pub kubeconfig: Option<PathBuf>,
    /// The pod.
    pub pod: Option<PodRef>,
    /// Whether packets may be sent in its namespace.
    pub probe: bool,
}

/// What the log of the installation says of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installation {
    /// The log.
    pub log: HostPath,
    /// The programs that were installed.
    pub programs: Vec<HostPath>,
    /// How the node differs from what was installed, one line each; `None` where nothing was. An
    /// error says why that can't be told.
    pub changed: Result<Option<Vec<String>>, String>,
}

impl CheckTarget {
    /// Where this process finds what the node calls `path`.
    pub(super) fn reach(&self, path: &HostPath) -> io::Result<PathBuf> {
        HostRoot::new(&self.mount).reach(path)
    }

    /// The same for a path that a configuration names.
    pub(super) fn reach_named(&self, path: &std::path::Path) -> io::Result<PathBuf> {
        let path = HostPath::new(path);
        let path = path.ok_or_else(|| io::Error::other("accepted: an absolute path without \"..\""))?;
        self.reach(&path)
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
    fn what_was_not_checked_is_no_failure() {
        let fine = || vec![line("a", CheckOutcome::Pass, None), line("b", CheckOutcome::NotChecked, None)];
        assert!(Checklist::of(fine()).healthy);
        let failed = [fine(), vec![line("c", CheckOutcome::Fail, Some("mend it"))]].concat();
        assert!(!Checklist::of(failed).healthy);
    }

    #[test]
    fn what_to_do_stands_below_what_was_found() {
        let list =
            Checklist { platform: "k3s".into(), ..Checklist::of(vec![line("c", CheckOutcome::Fail, Some("mend it"))]) };
        let mut page = Screen::new(false);
        list.write(&mut page);
        let text = page.into_text();
        let text = text.as_str();
        assert!(text.starts_with("This node (k3s): 0 passed, 1 failed, 0 not checked\n\nNode\n"), "{text}");
        let lines: Vec<&str> = text.lines().skip(3).collect();
        assert_eq!(lines, ["  FAIL  c  it holds", "        c was found", "        next: mend it"]);
    }

    const A: Check = Check::of(CheckGroup::Node, "a", "a");
    const B: Check = Check::of(CheckGroup::Node, "b", "b");
    const C: Check = Check::of(CheckGroup::Node, "c", "c");

    #[test]
    fn one_failure_of_several_tries_counts() {
        let (pass, fail) = (|text: &str| CheckVerdict::pass(text), || CheckVerdict::fail("broken", "mend it"));
        let not = || CheckVerdict::not_checked("no route");
        assert_eq!(CheckVerdict::all(vec![pass("a"), fail(), pass("b")], "none"), fail());
        assert_eq!(CheckVerdict::all(vec![pass("a"), not(), pass("b")], "none"), pass("a; b"));
        assert_eq!(CheckVerdict::all(vec![not()], "none"), not());
        assert_eq!(CheckVerdict::all(Vec::new(), "none"), CheckVerdict::not_checked("none"));
    }

    #[test]
    fn urls_are_shown_without_their_user() {
        let mut checkup = Results::default();
        checkup.add(&A, CheckVerdict::fail("https://u:s3cr3t@a failed", "ask http://s3cr3t@b"));
        let line = &checkup.lines[0];
        let shown = (line.found.as_str(), line.next.as_deref());
        assert_eq!(shown, ("https://(redacted)@a failed", Some("ask http://(redacted)@b")));
    }

    #[test]
    fn what_needs_a_check_that_failed_is_not_done() {
        let mut checkup = Results::default();
        checkup.add(&A, CheckVerdict::pass("fine"));
        checkup.after(&[&A], &B, || CheckVerdict::fail("broken", "mend it"));
        checkup.after(&[&A, &B], &C, || unreachable!("b failed"));
        let outcomes: Vec<_> = checkup.lines.iter().map(|line| (line.outcome, line.found.as_str())).collect();
        let wanted = [
            (CheckOutcome::Pass, "fine"),
            (CheckOutcome::Fail, "broken"),
            (CheckOutcome::NotChecked, "because b failed"),
        ];
        assert_eq!(outcomes, wanted);
        assert_eq!(checkup.obstacle(&[&C]), Some("because c was not checked".to_owned()));
        assert_eq!(checkup.obstacle(&[&A]), None);
    }
}
