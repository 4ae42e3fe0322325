//! The checklist as people and programs get it.

use crate::inspect::terminal::{Cell, Screen, TextReport, Tone};
use serde::Serialize;

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
}
