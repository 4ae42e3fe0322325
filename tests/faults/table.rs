//! The fault table: one row for each fault and kind of call.

use crate::call::{Answer, Ended};
use std::collections::BTreeMap;
use std::time::Duration;

/// The longest text of an answer in the table, in characters.
const MAX_TEXT: usize = 160;

/// The rows of one group, printed when the value is dropped. Trials of the same fault in the same kind of call become
/// one row.
pub(crate) struct Table {
    group: &'static str,
    /// By fault and call, in the order of their first trials.
    rows: Vec<(String, String, Row)>,
}

/// What the trials of one row had as outcome.
#[derive(Default)]
struct Row {
    /// The number of trials and the first text, by answer.
    answers: BTreeMap<String, (u32, String)>,
    left: BTreeMap<String, u32>,
    slowest: Duration,
    violations: Vec<String>,
}

impl Table {
    pub(crate) fn new(group: &'static str) -> Self {
        Self { group, rows: Vec::new() }
    }

    /// Adds one trial: how the call ended, what it left behind ("nothing" if it left nothing), and whether that
    /// satisfies the contract.
    pub(crate) fn add(&mut self, fault: &str, call: &str, ended: &Ended, left: &str, verdict: Result<(), String>) {
        let known = self.rows.iter().position(|(known, of, _)| known == fault && of == call);
        let at = known.unwrap_or_else(|| {
            self.rows.push((fault.to_owned(), call.to_owned(), Row::default()));
            self.rows.len() - 1
        });
        let row = &mut self.rows[at].2;
        let (answer, text) = match &ended.answer {
            Answer::Done => ("done".to_owned(), ""),
            Answer::Refused(code, text) => (format!("code {code}"), text.as_str()),
            Answer::Signaled(signal) => (format!("ended by signal {signal}"), ""),
            Answer::Silent(code) => (format!("exit code {code} without answer"), ""),
            Answer::Hung => ("does not end".to_owned(), ""),
        };
        row.answers.entry(answer).or_insert((0, text.to_owned())).0 += 1;
        *row.left.entry(left.to_owned()).or_default() += 1;
        row.slowest = row.slowest.max(ended.took);
        if let Err(violation) = verdict {
            let violation = format!("{violation}; answer: {:?}; stderr: {}", ended.answer, ended.stderr);
            // At once, because a complete run takes long.
            eprintln!("violated: {fault} | {call}: {violation}");
            row.violations.push(violation);
        }
    }

    /// Adds the rows of another table.
    pub(crate) fn append(&mut self, mut other: Self) {
        self.rows.append(&mut other.rows);
    }

    /// Fails if a row violates the contract.
    #[track_caller]
    pub(crate) fn end(self) {
        let violations = self.rows.iter().flat_map(|(fault, call, row)| {
            row.violations.iter().take(3).map(move |violation| format!("{fault} | {call}: {violation}"))
        });
        let violations: Vec<String> = violations.collect();
        assert!(violations.is_empty(), "the contract is violated:\n{}", violations.join("\n"));
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        for (fault, call, row) in &self.rows {
            let answers =
                row.answers.iter().map(|(answer, (count, text))| format!("{answer} ({count}): {}", cell(text)));
            let left = row.left.iter().map(|(left, count)| format!("{left} ({count})"));
            let (answers, left): (Vec<_>, Vec<_>) = (answers.collect(), left.collect());
            let contract = match row.violations.len() {
                0 => "holds".to_owned(),
                count => format!("VIOLATED {count} times"),
            };
            let slowest = format!("{:.1} s", row.slowest.as_secs_f64());
            let columns = [self.group, fault, call, &answers.join("; "), &slowest, &left.join("; "), &contract];
            println!("FAULT|{}", columns.join("|"));
        }
    }
}

/// Returns the beginning of a text without separators and line ends.
fn cell(text: &str) -> String {
    text.replace(['|', '\n'], " ").chars().take(MAX_TEXT).collect()
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
