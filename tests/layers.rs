//! The rows of the map in `src/lib.rs`: a module imports only from rows below its own. And what clippy
//! demands of `src` alone, where tests need it too.

use std::path::{Path, PathBuf};

/// From the top down; modules of one row don't know each other.
const ROWS: [&[&str]; 10] = [
    &["cli"],
    &["agent", "inspect"],
    &["plugin"],
    &["sub_plugins", "delegate"],
    &["networks"],
    &["cluster"],
    &["netns", "firewall", "state", "logging"],
    &["host_path", "trusted_file", "netlink"],
    &["streams"],
    &["policy", "pod", "cni", "printable", "suggest"],
];

fn row_of(module: &str) -> Option<usize> {
    ROWS.iter().position(|row| row.contains(&module))
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// What writes to stdout and stderr: `printable::Text` (`main`, `panics`, the relay of a plugin's stderr) and log
/// lines (`logging`). `output` asks whether stdout is a terminal.
const WRITERS: [&str; 6] =
    ["cli/output.rs", "delegate/process.rs", "logging.rs", "main.rs", "plugin/mod.rs", "streams.rs"];

#[test]
fn only_printable_text_reaches_terminals() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    sources(&root, &mut all);
    for path in all {
        let within = path.strip_prefix(&root).expect("below src").to_str().expect("text");
        let text = std::fs::read_to_string(&path).expect("readable");
        let code = text.split("#[cfg(test)]").next().expect("one at least");
        let code: String = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        // Its type lets nothing but `Text` through.
        let only_text =
            ["crate::print(io::stdout()", "crate::print(io::stderr()", "crate::write(io::stdout()", ".use_stderr()"];
        let code = only_text.iter().fold(code, |code, call| code.replace(call, "")).replace("io::stdout().flush()", "");
        let writes = ["stdout()", "stderr()", "io::stdout", "io::stderr", "print!(", "println!(", "dbg!("];
        let found = writes.into_iter().find(|call| code.contains(call));
        assert!(found.is_none() || WRITERS.contains(&within), "{within}: {}", found.unwrap_or_default());
        let colors = code.contains("\\u{1b}[") || code.contains("\\x1b[");
        assert!(!colors || within == "printable.rs", "{within}: only printable::Text writes colors");
    }
}

#[test]
fn modules_import_from_below_only() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    sources(&root, &mut all);
    let mut seen = 0;
    for path in all {
        let within = path.strip_prefix(&root).expect("below src");
        let own = within.iter().next().and_then(|p| p.to_str()).expect("a name").trim_end_matches(".rs");
        if own == "main" || own == "lib" {
            continue;
        }
        let own_row = row_of(own).unwrap_or_else(|| panic!("{own} is in no row of the map"));
        let text = std::fs::read_to_string(&path).expect("readable");
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let text = code.collect::<Vec<_>>().join("\n");
        // The values of a row of their own know each other where they must: cni speaks of pods.
        let lowest = ROWS.len() - 1;
        for piece in text.split("crate::").skip(1) {
            let name: String = piece.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let Some(row) = row_of(&name).filter(|_| name != own) else { continue };
            seen += 1;
            assert!(row > own_row || (row == lowest && own_row == lowest), "{}: crate::{name}", path.display());
        }
    }
    assert!(seen > 20, "imports are found at all");
}

/// In `src` clippy sees to it (`clippy.toml`); tests are exempt from its list, for they open files as they like.
#[test]
fn no_test_sleeps() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = Vec::new();
    ["src", "tests", "examples"].iter().for_each(|directory| sources(&root.join(directory), &mut all));
    let forbidden = ["thread", "sleep"].join("::");
    for path in all {
        let text = std::fs::read_to_string(&path).expect("readable");
        assert!(!text.contains(&forbidden), "{}: wait for a condition with a deadline", path.display());
    }
}
