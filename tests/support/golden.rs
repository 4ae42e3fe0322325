//! Golden reports: one Markdown file for each command, with a heading and the output of each case. Set `UPDATE_GOLDEN` to
//! write them, and read each difference before you commit it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Tests of one program run at the same time.
static FILES: Mutex<()> = Mutex::new(());

/// Compares the output of a case with the one in `tests/golden/FILE`.
#[track_caller]
pub(crate) fn compare(file: &str, case: &str, found: &str) {
    let _lock = FILES.lock().unwrap_or_else(PoisonError::into_inner);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
    let text = fs::read_to_string(&path).expect("readable");
    let (introduction, mut cases) = parse(&text);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        cases.insert(case, found);
        fs::write(&path, print(introduction, &cases)).expect("writable");
    }
    let wanted = cases.get(case).copied().unwrap_or_default();
    for (number, (found, wanted)) in (1..).zip(found.lines().zip(wanted.lines())) {
        assert_eq!(found, wanted, "{file}: {case}:{number}");
    }
    assert_eq!(found.lines().count(), wanted.lines().count(), "{file}: {case}");
}

/// Returns what is before the first case, and the output of each case.
fn parse(text: &str) -> (&str, BTreeMap<&str, &str>) {
    let mut parts = text.split("\n## ");
    let introduction = parts.next().expect("one at least");
    let cases = parts.map(|part| {
        let (case, rest) = part.split_once("\n\n```text\n").expect("a block");
        (case, &rest[..rest.rfind("```").expect("the block ends")])
    });
    (introduction, cases.collect())
}

fn print(introduction: &str, cases: &BTreeMap<&str, &str>) -> String {
    let print = |(case, output): (&&str, &&str)| {
        let end = if output.ends_with('\n') { "" } else { "\n" };
        format!("\n## {case}\n\n```text\n{output}{end}```\n")
    };
    introduction.to_owned() + &cases.iter().map(print).collect::<String>()
}
