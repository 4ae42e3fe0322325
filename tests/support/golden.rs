//! Golden files: one Markdown file for each table of cases, with a heading and a block for each case. Set `UPDATE_GOLDEN`
//! to write them, and read each difference before you commit it.

use similar::{ChangeTag, TextDiff};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Tests of one program run at the same time.
static FILES: Mutex<()> = Mutex::new(());
const TEXT: &str = "text";
/// The text has no line break at its end.
const OPEN: &str = "text without a line break at its end";
/// The lines that differ from those of another case.
const DIFF: &str = "diff";

/// The kind of a block, and its text.
type Block = (String, String);

/// Compares the output of a case with the one in `tests/golden/FILE`. The file has the lines in which it differs from the
/// case `base`, unless the whole output is shorter.
#[track_caller]
pub(crate) fn compare(file: &str, base: &str, case: &str, found: &str) {
    let _lock = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, cases) = read(file);
    let found = match cases.get(base).filter(|_| case != base).map(|(_, base)| differences(base, found)) {
        Some(differences) if differences.len() < found.len() => (DIFF.to_owned(), differences),
        _ => block(found),
    };
    let wanted = updated(file, case, &found).unwrap_or_else(|| cases.get(case).cloned().unwrap_or_default());
    for (number, (found, wanted)) in (1..).zip(found.1.lines().zip(wanted.1.lines())) {
        assert_eq!(found, wanted, "{file}: {case}:{number}");
    }
    assert_eq!(found.1.lines().count(), wanted.1.lines().count(), "{file}: {case}");
}

/// Returns the texts of the cases in `tests/golden/FILE` whose names begin with `prefix`, by the rest of the name.
pub(crate) fn cases(file: &str, prefix: &str) -> BTreeMap<String, String> {
    let (_, cases) = read(file);
    let of_prefix = |(case, (_, text)): (String, Block)| Some((case.strip_prefix(prefix)?.to_owned(), text));
    cases.into_iter().filter_map(of_prefix).collect()
}

/// Replaces the cases whose names begin with `prefix` by these texts, if `UPDATE_GOLDEN` is set.
pub(crate) fn update(file: &str, prefix: &str, texts: &BTreeMap<String, String>) {
    let _lock = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, text) in texts {
        updated(file, &format!("{prefix}{name}"), &block(text));
    }
}

fn block(text: &str) -> Block {
    (if text.ends_with('\n') { TEXT } else { OPEN }.to_owned(), text.to_owned())
}

/// Writes a case if `UPDATE_GOLDEN` is set, and returns it.
fn updated(file: &str, case: &str, found: &Block) -> Option<Block> {
    std::env::var_os("UPDATE_GOLDEN")?;
    let (introduction, mut cases) = read(file);
    cases.insert(case.to_owned(), found.clone());
    let print = |(case, (kind, text)): (&String, &Block)| {
        let end = if text.ends_with('\n') { "" } else { "\n" };
        format!("\n## {case}\n\n```{kind}\n{text}{end}```\n")
    };
    fs::write(path(file), introduction + &cases.iter().map(print).collect::<String>()).expect("writable");
    Some(found.clone())
}

/// Returns the deleted and inserted lines.
fn differences(before: &str, after: &str) -> String {
    let diff = TextDiff::from_lines(before, after);
    let line = |change: similar::Change<&str>| match change.tag() {
        ChangeTag::Equal => None,
        ChangeTag::Delete => Some(format!("- {}", change.value())),
        ChangeTag::Insert => Some(format!("+ {}", change.value())),
    };
    diff.iter_all_changes().filter_map(line).collect()
}

fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file)
}

/// Returns what is before the first case, and the cases.
fn read(file: &str) -> (String, BTreeMap<String, Block>) {
    let text = fs::read_to_string(path(file)).expect("readable");
    let mut parts = text.split("\n## ");
    let introduction = parts.next().expect("one at least").to_owned();
    let cases = parts.map(|part| {
        let (case, rest) = part.split_once("\n\n```").expect("a block");
        let (kind, rest) = rest.split_once('\n').expect("a block");
        let text = &rest[..rest.rfind("```").expect("the block ends")];
        let text = if kind == OPEN { text.strip_suffix('\n').expect("a line") } else { text };
        (case.to_owned(), (kind.to_owned(), text.to_owned()))
    });
    (introduction, cases.collect())
}
