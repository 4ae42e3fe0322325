//! The chart's README, whose table is written from the comments of `values.yaml`, and the rendered chart.

use crate::helm::{chart_file, manifests, values};
use std::process::Command;
use std::{env, fs};

/// The lines above the table.
const START: &str = "\
<!-- hack/manifests.sh writes the table from values.yaml. Do not edit it. -->
| value (default) | meaning |
|---|---|
";

/// A key of `values.yaml` and the comment above it.
struct Entry {
    path: String,
    comment: String,
}

/// Returns the keys of `values.yaml` that have a comment. Keys below them belong to their value.
fn entries(text: &str) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let (mut parents, mut comment): (Vec<(usize, &str)>, Vec<&str>) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        match (trimmed.strip_prefix("# "), trimmed.split_once(':')) {
            // Indented lines are an example.
            (Some(text), _) if text.starts_with(' ') => {}
            (Some(text), _) => comment.push(text),
            (None, Some((key, _))) if !trimmed.starts_with('-') => {
                parents.retain(|(column, _)| *column < indent);
                parents.push((indent, key));
                if !comment.is_empty() {
                    let path: Vec<&str> = parents.iter().map(|(_, key)| *key).collect();
                    entries.push(Entry { path: path.join("."), comment: comment.join(" ") });
                }
                comment.clear();
            }
            _ => comment.clear(),
        }
    }
    entries
}

fn table() -> String {
    let values = values();
    let row = |entry: Entry| {
        let value = values.pointer(&format!("/{}", entry.path.replace('.', "/"))).expect("a value");
        let default = if entry.path == "repair" { String::new() } else { format!(" (`{value}`)") };
        format!("| `{}`{default} | {} |\n", entry.path, entry.comment.replace('|', "\\|"))
    };
    entries(&chart_file("values.yaml")).into_iter().map(row).collect()
}

#[test]
fn the_table_is_written_from_the_values() {
    let path = manifests().join("chart/README.md");
    let found = fs::read_to_string(&path).expect("readable");
    let (head, _) = found.split_once(START).expect("a table");
    let wanted = format!("{head}{START}{}", table());
    if env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &wanted).expect("writable");
        return;
    }
    assert!(found == wanted, "{}: it differs from the comments of values.yaml; run hack/manifests.sh", path.display());
}

#[test]
fn each_value_has_a_comment() {
    let commented: Vec<String> = entries(&chart_file("values.yaml")).into_iter().map(|entry| entry.path).collect();
    for leaf in crate::helm::leaves(&values()) {
        let is_covered = commented.iter().any(|path| leaf == *path || leaf.starts_with(&format!("{path}.")));
        assert!(is_covered, "{leaf}: no comment in values.yaml");
    }
}

#[test]
fn the_kustomize_bases_are_rendered_from_this_chart() {
    let script = manifests().join("../hack/manifests.sh");
    let output = Command::new(script).arg("--digest").output().expect("it starts");
    let line = format!("# Chart: {}\n", String::from_utf8_lossy(&output.stdout).trim());
    assert!(output.status.success() && line.len() > 20, "{line}");
    for platform in ["kubernetes", "openshift"] {
        let text = fs::read_to_string(manifests().join(platform).join("rendered.yaml")).expect("readable");
        assert!(text.contains(&line), "{platform}: run hack/manifests.sh");
    }
}
