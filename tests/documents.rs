//! What the documents say of the code is so.

use detour_cni::cni::Code;
use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn every_error_code_is_in_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("conf/README.md");
    let text = std::fs::read_to_string(path).expect("readable");
    let (_, table) = text.split_once("## Error codes").expect("a section");
    for code in Code::ALL {
        let row = format!("\n| {} | `{}` |", code.number(), code.name());
        assert!(table.contains(&row), "{code:?} is not in the table");
    }
}

/// Adds the files of a directory, as paths within `root`.
fn files(root: &Path, directory: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(directory).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            files(root, &path, found);
        } else {
            found.insert(path.strip_prefix(root).expect("below src").to_str().expect("text").to_owned());
        }
    }
}

/// The names in backticks.
fn names(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// A heading that names one folder applies to the rows below it; other rows have paths within `src`.
#[test]
fn the_architecture_page_lists_every_source_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join("docs/architecture.md")).expect("readable");
    let (_, section) = text.split_once("## Files of each module").expect("a section");
    let section = section.split("\n## ").next().expect("one at least");
    let (mut folder, mut listed) = (String::new(), BTreeSet::new());
    for line in section.lines() {
        if line.starts_with("### ") || line.starts_with("**`") {
            let heading = names(line.split(':').next().expect("one at least"));
            folder = if let [one] = heading[..] { format!("{one}/") } else { String::new() };
        } else if let Some(row) = line.strip_prefix("| `") {
            let cell = format!("`{}", row.split('|').next().expect("one at least"));
            listed.extend(names(&cell).into_iter().map(|name| format!("{folder}{name}")));
        }
    }
    let mut sources = BTreeSet::new();
    files(&root.join("src"), &root.join("src"), &mut sources);
    let unknown: Vec<_> = listed.difference(&sources).collect();
    assert!(unknown.is_empty(), "docs/architecture.md lists files that are not in src: {unknown:?}");
    let may_miss = |name: &&String| name.ends_with("mod.rs") || name.ends_with("tests.rs");
    let missing: Vec<_> = sources.difference(&listed).filter(|name| !may_miss(name)).collect();
    assert!(missing.is_empty(), "docs/architecture.md does not list these files: {missing:?}");
}
