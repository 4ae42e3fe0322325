//! The guard of hack/instructions.sh names the counts that exceed their limits.

use crate::support::directory::Directory;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

const COUNTS: &str = "VERSION: instructions|1030\nADD: instructions|2000\nADD: system calls|120\n";

#[test]
fn a_count_above_its_limit_fails_and_the_message_names_it_and_the_next_step() {
    let directory = Directory::new("measure");
    let [limits, counts] = ["limits.json", "counts"].map(|name| directory.join(name).display().to_string());
    // Value and tolerance in percent.
    let run = |values: Value| -> (bool, String) {
        fs::write(&limits, json!({"compiler": "rustc 1", "values": values}).to_string()).expect("written");
        fs::write(&counts, COUNTS).expect("written");
        let program = Path::new(env!("CARGO_BIN_EXE_detour")).with_file_name("examples/measure");
        assert!(program.exists(), "{} is missing: run `cargo build --examples`", program.display());
        let output = Command::new(program).args(["limits", &limits, &counts, "--compiler", "rustc 2"]).output();
        let output = output.expect("started");
        assert!(output.stderr.is_empty(), "{output:?}");
        (output.status.success(), String::from_utf8(output.stdout).expect("text"))
    };
    let limit = |value: u64, percent: u64| json!({"value": value, "tolerance_percent": percent});

    let (passed, output) = run(json!({
        "VERSION: instructions": limit(1000, 3), "ADD: instructions": limit(2200, 3), "ADD: system calls": limit(120, 1),
    }));
    assert!(passed, "{output}");
    assert_eq!(words(&output, "VERSION: instructions"), ["1000", "3", "%", "1030", "+3.00", "%", "ok"]);
    assert_eq!(words(&output, "ADD: instructions"), ["2200", "3", "%", "2000", "-9.09", "%", "lower"]);
    assert!(output.contains("hack/instructions.sh --update"), "{output}");

    let (passed, output) = run(json!({
        "VERSION: instructions": limit(999, 3), "ADD: instructions": limit(2000, 3), "ADD: system calls": limit(119, 0),
    }));
    assert!(!passed, "{output}");
    assert_eq!(words(&output, "VERSION: instructions").last(), Some(&"EXCEEDED"));
    assert_eq!(words(&output, "ADD: instructions").last(), Some(&"ok"));
    let last = output.lines().last().expect("a line");
    assert!(last.contains("VERSION: instructions (+3.10 %)") && last.contains("ADD: system calls (+0.84 %)"), "{last}");
    assert!(!last.contains("ADD: instructions"), "{last}");
    assert!(last.contains("--update"), "{last}");
    assert!(output.contains("compiler: rustc 2; the limits are from rustc 1"), "{output}");
}

/// Returns the words of the line that begins with `name`.
fn words<'a>(output: &'a str, name: &str) -> Vec<&'a str> {
    let line = output.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("{name}: not in {output}")).split_whitespace().collect()
}
