//! The fault table: one row for each fault and kind of call.

use crate::call::{Answer, Ended};
use std::collections::BTreeMap;
use std::time::Duration;

/// The longest text of an answer in the table, in characters.
const MAX_TEXT: usize = 320;

/// The rows of one group. Tries of the same fault in the same kind of call become one row.
pub(crate) struct Table {
    group: &'static str,
    /// By fault and call, in the order of their first tries.
    rows: Vec<(String, String, Row)>,
    is_printed: bool,
}

/// What the tries of one row had as outcome.
#[derive(Default)]
struct Row {
    /// The number of tries and the first text, by answer.
    answers: BTreeMap<String, (u32, String)>,
    left: BTreeMap<String, u32>,
    slowest: Duration,
    violations: Vec<String>,
}

impl Table {
    /// Returns an empty table. The group is the name of the test module.
    pub(crate) fn new(group: &'static str) -> Self {
        Self { group, rows: Vec::new(), is_printed: false }
    }

    /// Adds one try: how the call ended, what it left behind ("nothing" if it left nothing), and whether that
    /// satisfies the contract.
    pub(crate) fn add(&mut self, fault: &str, call: &str, ended: &Ended, left: &str, verdict: Result<(), String>) {
        let known = self.rows.iter().position(|(known, of, _)| known == fault && of == call);
        let at = known.unwrap_or_else(|| {
            self.rows.push((fault.to_owned(), call.to_owned(), Row::default()));
            self.rows.len() - 1
        });
        let row = &mut self.rows[at].2;
        let (answer, text) = match &ended.answer {
            Answer::Done => ("done".to_owned(), String::new()),
            Answer::Refused(code, text) => (format!("code {code}"), text.clone()),
            Answer::Signaled(9) => ("killed".to_owned(), String::new()),
            Answer::Signaled(signal) => (format!("ended by signal {signal}"), String::new()),
            Answer::Silent(code) => (format!("exit code {code} without answer"), String::new()),
            Answer::Hung => ("does not end".to_owned(), String::new()),
        };
        row.answers.entry(answer).or_insert((0, text)).0 += 1;
        *row.left.entry(left.to_owned()).or_default() += 1;
        row.slowest = row.slowest.max(ended.took);
        if let Err(violation) = verdict {
            let violation = format!("{violation}; answer: {:?}; stderr: {}", ended.answer, ended.stderr);
            // At once, because a complete run takes long.
            eprintln!("violated: {fault} | {call}: {violation}");
            row.violations.push(violation);
        }
    }

    /// Prints the rows, and fails if one of them violates the contract.
    #[track_caller]
    pub(crate) fn end(mut self) {
        self.print();
        let violations = self.rows.iter().flat_map(|(fault, call, row)| {
            row.violations.iter().take(3).map(move |violation| format!("{fault} | {call}: {violation}"))
        });
        let violations: Vec<String> = violations.collect();
        assert!(violations.is_empty(), "the contract is violated:\n{}", violations.join("\n"));
    }

    fn print(&mut self) {
        if std::mem::replace(&mut self.is_printed, true) {
            return;
        }
        for (fault, call, row) in &self.rows {
            let columns = [self.group.into(), cell(fault), cell(call), row.answer(), time(row.slowest), row.left(), {
                if row.violations.is_empty() {
                    "holds".into()
                } else {
                    format!("VIOLATED {} times", row.violations.len())
                }
            }];
            println!("FAULT|{}", columns.join("|"));
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.print();
    }
}

impl Row {
    fn answer(&self) -> String {
        let one = |(answer, (count, text)): (&String, &(u32, String))| {
            let count = if self.answers.len() == 1 && *count == 1 { String::new() } else { format!(" ({count})") };
            let text = if text.is_empty() { String::new() } else { format!(": {}", cell(text)) };
            format!("{answer}{count}{text}")
        };
        self.answers.iter().map(one).collect::<Vec<_>>().join("; ")
    }

    fn left(&self) -> String {
        let one = |(left, count): (&String, &u32)| match self.left.len() {
            1 => cell(left),
            _ => format!("{} ({count})", cell(left)),
        };
        self.left.iter().map(one).collect::<Vec<_>>().join("; ")
    }
}

/// Returns a coarse time, so that two runs print the same table.
fn time(took: Duration) -> String {
    match took.as_millis() {
        0..100 => "< 0.1 s".into(),
        100..1000 => "< 1 s".into(),
        _ => format!("{:.0} s", took.as_secs_f64()),
    }
}

/// Returns the text for a cell: without the numbers of processes and pods, separators and line ends, and cut.
fn cell(text: &str) -> String {
    let text = text.replace(['|', '\n'], " ").replace(env!("CARGO_TARGET_TMPDIR"), "/tmp");
    let text = numbers_replaced(&text, "/proc/", "/fd/", "NETNS");
    let text = numbers_replaced(&text, "convergence-", "-", "CONTAINER");
    let text = numbers_replaced(&text, "locks/", "-", "locks/LOCK");
    let text = numbers_replaced(&text, "/detour-netns-", "-", "");
    let text = numbers_replaced(&text, "/detour-faults-", "-", "");
    let text = text.trim().trim_end_matches(':');
    match text.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Replaces `before`, a number, `between` and a number with `name`.
fn numbers_replaced(text: &str, before: &str, between: &str, name: &str) -> String {
    let mut parts = text.split(before);
    let mut replaced = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let rest = part[digits(part)..].strip_prefix(between).filter(|rest| digits(part) * digits(rest) > 0);
        match rest {
            Some(rest) => replaced += &format!("{name}{}", &rest[digits(rest)..]),
            None => replaced += &format!("{before}{part}"),
        }
    }
    replaced
}

/// Checks the form of an answer: success, or an error with a code of the contract and a text. A bug of the plugin
/// (108) is no such code.
pub(crate) fn is_answer(ended: &Ended) -> Result<(), String> {
    match &ended.answer {
        Answer::Done => Ok(()),
        Answer::Refused(1 | 4..=8 | 11 | 50 | 100..=107, text) if text.len() > 10 => Ok(()),
        Answer::Refused(..) => Err("the answer has no code or text of the contract".into()),
        Answer::Signaled(_) | Answer::Silent(_) => Err("the call ended without an answer".into()),
        Answer::Hung => Err("the call did not end".into()),
    }
}

/// Checks that a call was refused with one of these codes; 0 stands for success.
pub(crate) fn is_refused(ended: &Ended, codes: &[u64]) -> Result<(), String> {
    is_answer(ended)?;
    match &ended.answer {
        Answer::Refused(code, _) if codes.contains(code) => Ok(()),
        Answer::Done if codes.contains(&0) => Ok(()),
        _ => Err(format!("expected one of the codes {codes:?} (0: success)")),
    }
}

/// Checks that a call succeeded.
pub(crate) fn is_done(ended: &Ended) -> Result<(), String> {
    if ended.answer == Answer::Done { Ok(()) } else { Err("expected success".into()) }
}

/// Returns whether everything is tried (`FAULTS=all`), not a sample.
pub(crate) fn is_complete() -> bool {
    std::env::var("FAULTS").is_ok_and(|which| which == "all")
}

/// Returns the number in a variable, or `usual`.
pub(crate) fn number(variable: &str, usual: usize) -> usize {
    std::env::var(variable)
        .map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{variable}: expected a number")))
}
