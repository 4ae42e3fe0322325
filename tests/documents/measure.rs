//! The tools of the benchmark. The guard of hack/instructions.sh names the counts that exceed their limits, and
//! `--update` writes new ones. hack/bench.sh compares medians with targets.

use crate::support::directory::Directory;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const COUNTS: &str = "VERSION: instructions|1030\nADD: instructions|2000\nADD: system calls|120\n";

struct Guard {
    directory: Directory,
}

impl Guard {
    /// A guard whose file of limits has these values: name, value, tolerance in percent.
    fn new(test: &str, values: &[(&str, u64, u64)]) -> Self {
        let guard = Self { directory: Directory::new(&format!("measure-{test}")) };
        let values: serde_json::Map<_, _> = values
            .iter()
            .map(|(name, value, tolerance)| {
                ((*name).to_owned(), json!({"value": value, "tolerance_percent": tolerance}))
            })
            .collect();
        fs::write(guard.path("limits.json"), json!({"compiler": "rustc 1", "values": values}).to_string())
            .expect("written");
        fs::write(guard.path("counts"), COUNTS).expect("written");
        guard
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn run(&self, more: &[&str]) -> (bool, String) {
        let output = measure(
            &[
                &["limits"][..],
                &[text(&self.path("limits.json")), text(&self.path("counts"))],
                &["--compiler", "rustc 2"],
                more,
            ]
            .concat(),
        );
        assert!(output.stderr.is_empty(), "{output:?}");
        (output.status.success(), String::from_utf8(output.stdout).expect("text"))
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

fn example(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_detour")).with_file_name("examples").join(name);
    assert!(path.exists(), "{} is missing: run `cargo build --examples`", path.display());
    path
}

fn measure(arguments: &[&str]) -> Output {
    Command::new(example("measure")).args(arguments).output().expect("started")
}

/// Returns the words of the line that begins with `name`.
fn words<'a>(output: &'a str, name: &str) -> Vec<&'a str> {
    let line = output.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("{name}: not in {output}")).split_whitespace().collect()
}

#[test]
fn counts_within_their_tolerance_pass_and_a_gain_is_noted() {
    let limits = [("VERSION: instructions", 1000, 3), ("ADD: instructions", 2200, 3), ("ADD: system calls", 120, 1)];
    let (passed, output) = Guard::new("pass", &limits).run(&[]);
    assert!(passed, "{output}");
    assert_eq!(words(&output, "VERSION: instructions"), ["1000", "3", "%", "1030", "+3.00", "%", "ok"]);
    assert_eq!(words(&output, "ADD: instructions"), ["2200", "3", "%", "2000", "-9.09", "%", "lower"]);
    assert!(output.contains("hack/instructions.sh --update"), "{output}");
}

#[test]
fn a_count_above_its_limit_fails_and_the_message_names_it_and_the_next_step() {
    let limits = [("VERSION: instructions", 999, 3), ("ADD: instructions", 2000, 3), ("ADD: system calls", 119, 0)];
    let (passed, output) = Guard::new("exceeded", &limits).run(&[]);
    assert!(!passed, "{output}");
    assert_eq!(words(&output, "VERSION: instructions").last(), Some(&"EXCEEDED"));
    assert_eq!(words(&output, "ADD: instructions").last(), Some(&"ok"));
    let last = output.lines().last().expect("a line");
    assert!(last.contains("VERSION: instructions (+3.10 %)") && last.contains("ADD: system calls (+0.84 %)"), "{last}");
    assert!(!last.contains("ADD: instructions"), "{last}");
    assert!(last.contains("--update"), "{last}");
    assert!(output.contains("compiler: rustc 2; the limits are from rustc 1"), "{output}");
}
