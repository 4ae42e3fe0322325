//! The rows of the map in `src/lib.rs`: a module, its tests and its fuzzing targets import only from rows below its own,
//! and no files import each other in a cycle. And what clippy demands of `src` alone, where tests need it too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// From the top down; modules of one row don't know each other.
const ROWS: [&[&str]; 12] = [
    &["fuzzing"],
    &["cli"],
    &["agent", "inspect"],
    &["plugin"],
    &["sub_plugins", "delegate"],
    &["networks"],
    &["cluster"],
    &["cgroup"],
    &["netns", "firewall", "state", "logging"],
    &["host_path", "trusted_file", "netlink"],
    &["streams"],
    &["policy", "pod", "cni", "printable", "wait", "links"],
];

fn row_of(module: &str) -> Option<usize> {
    ROWS.iter().position(|row| row.contains(&module))
}

/// The source files in a directory.
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
        // Its type lets nothing but `Text` through; a process in a container has streams of its own.
        let only_text = [
            "crate::print(io::stdout()",
            "crate::print(io::stderr()",
            "crate::write(io::stdout()",
            ".use_stderr()",
            "process.stdout()",
            "process.stderr()",
        ];
        let code = only_text.iter().fold(code, |code, call| code.replace(call, ""));
        let writes = ["stdout()", "stderr()", "io::stdout", "io::stderr", "print!(", "println!(", "dbg!(", ".print()"];
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

/// In `src` clippy sees to it (`clippy.toml`); tests are not subject to its list: they open files as they like.
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

/// The files of `src` and what each imports, with re-exports followed to the file that defines a name.
#[derive(Default)]
struct Imports {
    /// Module path (`firewall::native`) → file.
    files: BTreeMap<Vec<String>, String>,
    /// Module path → the names that its `use` items bring into scope, with the path of each.
    scopes: BTreeMap<Vec<String>, BTreeMap<String, Vec<String>>>,
    /// Module path → paths that its code names.
    uses: BTreeMap<Vec<String>, BTreeSet<Vec<String>>>,
}

impl Imports {
    fn read(root: &Path) -> Self {
        let mut all = Vec::new();
        sources(root, &mut all);
        let mut imports = Self::default();
        let names = |path: &Path| -> Vec<String> {
            let text = path.with_extension("").to_str().expect("text").replace("/mod", "");
            text.split('/').filter(|name| *name != "lib").map(str::to_owned).collect()
        };
        for path in &all {
            let within = path.strip_prefix(root).expect("below src");
            imports.files.insert(names(within), within.to_str().expect("text").to_owned());
        }
        for path in all {
            let module = names(path.strip_prefix(root).expect("below src"));
            let text = std::fs::read_to_string(&path).expect("readable");
            let code: Vec<&str> = text.lines().map(|line| line.split("//").next().expect("one at least")).collect();
            let code = code.join("\n");
            let (code, tests) = code.split_once("#[cfg(test)]\nmod tests {").unwrap_or((&code, ""));
            let (scope, uses) = imports.scope_and_uses(&module, code);
            // The tests in a file are a module of their own, which no other module imports.
            let own_tests = [&module[..], &["tests".into()]].concat();
            if !tests.is_empty() {
                imports.files.insert(own_tests.clone(), format!("{} (tests)", imports.files[&module]));
                let (scope, uses) = imports.scope_and_uses(&own_tests, tests);
                imports.scopes.insert(own_tests.clone(), scope);
                imports.uses.insert(own_tests, uses);
            }
            imports.scopes.insert(module.clone(), scope);
            imports.uses.insert(module, uses);
        }
        imports
    }

    /// The names that the `use` items of `module` bring into scope, with the path of each; and all paths that its code
    /// names.
    fn scope_and_uses(&self, module: &[String], code: &str) -> (BTreeMap<String, Vec<String>>, BTreeSet<Vec<String>>) {
        let mut scope = BTreeMap::new();
        let mut uses = BTreeSet::new();
        let mut rest = String::new();
        for statement in code.split_inclusive(';') {
            let is_start = |at: &usize| {
                let before = statement[..*at].rsplit('\n').next().unwrap_or_default().trim();
                let item = &statement[*at..];
                let is_text = !item.ends_with(';') || item.contains('"') || !item[4..].starts_with(char::is_alphabetic);
                (before.is_empty() || before.starts_with("pub")) && !is_text
            };
            let start = statement.match_indices("use ").map(|(at, _)| at).filter(is_start).last();
            let Some(start) = start else {
                rest.push_str(statement);
                continue;
            };
            rest.push_str(&statement[..start]);
            let is_public = statement[..start].trim_end().ends_with(['b', ')']);
            for leaf in leaves(statement[start + 4..].trim_end_matches(';')) {
                let Some((path, name)) = self.absolute(module, &leaf) else { continue };
                scope.insert(name, path.clone());
                if !is_public {
                    uses.insert(path);
                }
            }
        }
        for start in ["crate::", "super::", "self::"] {
            for (at, _) in rest.match_indices(start) {
                let before = rest[..at].chars().next_back();
                // A visibility is not an import.
                let is_visibility = rest[..at].ends_with("pub(in ");
                if is_visibility || before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                    continue;
                }
                let path: String =
                    rest[at..].chars().take_while(|c| c.is_alphanumeric() || "_:".contains(*c)).collect();
                uses.extend(self.absolute(module, path.trim_end_matches(':')).map(|(path, _)| path));
            }
        }
        (scope, uses)
    }

    /// The path of `text` from the crate's root, and the name that it brings into scope; `None` for other crates.
    fn absolute(&self, module: &[String], text: &str) -> Option<(Vec<String>, String)> {
        let (path, alias) = text.split_once(" as ").map_or((text, None), |(path, alias)| (path, Some(alias)));
        let mut names = path.trim().split("::").map(str::to_owned).peekable();
        let mut absolute = module.to_vec();
        match names.peek()?.as_str() {
            "crate" => {
                absolute.clear();
                names.next();
            }
            "self" => drop(names.next()),
            "super" => {
                while names.next_if(|name| name == "super").is_some() {
                    absolute.pop();
                }
            }
            child => {
                absolute.push(child.to_owned());
                self.files.contains_key(&absolute).then_some(())?;
                absolute.pop();
            }
        }
        absolute.extend(names.filter(|name| name != "self"));
        let name = alias.map(str::to_owned).or_else(|| absolute.last().cloned())?;
        Some((absolute, name))
    }

    /// The file that defines what `path` names.
    fn file(&self, path: &[String]) -> Option<&str> {
        let mut path = path.to_vec();
        for _ in 0..10 {
            let depth = (0..=path.len()).rev().find(|depth| self.files.contains_key(&path[..*depth]))?;
            let (module, item) = path.split_at(depth);
            let target = item.first().and_then(|name| self.scopes.get(module)?.get(name));
            match target {
                Some(target) if *target != path => path = target.iter().chain(&item[1..]).cloned().collect(),
                _ => return self.files.get(module).map(String::as_str),
            }
        }
        None
    }
}

/// The paths of a `use` item.
fn leaves(tree: &str) -> Vec<String> {
    let Some((before, group)) = tree.split_once('{') else { return vec![tree.trim().to_owned()] };
    let group = &group[..group.rfind('}').expect("closed")];
    let (mut depth, mut start, mut all) = (0, 0, Vec::new());
    for (at, c) in group.char_indices().chain([(group.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let branch = group[start..at].trim();
                start = at + 1;
                if !branch.is_empty() {
                    all.extend(leaves(branch).into_iter().map(|leaf| before.trim().to_owned() + &leaf));
                }
            }
            _ => {}
        }
    }
    all
}

#[test]
fn no_files_import_each_other_in_a_cycle() {
    let imports = Imports::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    let mut edges: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (module, uses) in &imports.uses {
        let file = imports.files[module].as_str();
        let targets = uses.iter().filter_map(|path| imports.file(path)).filter(|target| *target != file);
        edges.entry(file).or_default().extend(targets);
    }
    assert!(edges.values().map(BTreeSet::len).sum::<usize>() > 400, "imports are found at all");
    let reached: BTreeMap<&str, BTreeSet<&str>> = edges.keys().map(|file| (*file, reachable(&edges, file))).collect();
    let mut cycles = BTreeSet::new();
    for (file, reached_here) in &reached {
        let back = |other: &&&str| reached.get(**other).is_some_and(|from_other| from_other.contains(file));
        let members: BTreeSet<&str> = reached_here.iter().filter(back).copied().collect();
        if !members.is_empty() {
            cycles.insert(members);
        }
    }
    let mut lines = Vec::new();
    for members in &cycles {
        lines.push("a cycle:".to_owned());
        for file in members {
            let targets: Vec<&str> = edges[file].intersection(members).copied().collect();
            lines.push(format!("  {file} imports {}", targets.join(", ")));
        }
    }
    assert!(lines.is_empty(), "files import each other\n{}", lines.join("\n"));
}

/// The files that `file` imports, directly or through others.
fn reachable<'a>(edges: &BTreeMap<&'a str, BTreeSet<&'a str>>, file: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut next: Vec<&str> = edges.get(file).into_iter().flatten().copied().collect();
    while let Some(file) = next.pop() {
        if reached.insert(file) {
            next.extend(edges.get(file).into_iter().flatten());
        }
    }
    reached
}
