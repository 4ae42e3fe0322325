//! How a container runtime reads its configuration directory (libcni, `ConfFiles` and `NetworkConfFromBytes`).

use crate::support::background::Repeated;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) const OWN_LIST: &str = "00-detour.conflist";

/// The configuration that a runtime uses for a new pod.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Choice {
    pub(crate) file: String,
    pub(crate) list: Value,
}

/// What a runtime finds in its directory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    /// The first file by name. containerd accepts no other one.
    pub(crate) first: Option<String>,
    /// The first valid file by name. CRI-O skips invalid files.
    pub(crate) choice: Option<Choice>,
}

/// Returns what a runtime finds in `directory`. A file that disappears between listing and reading is skipped.
pub(crate) fn read(directory: &Path) -> Found {
    let entries = fs::read_dir(directory).expect("the directory");
    let mut names: Vec<String> = entries
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|name| [".conflist", ".conf", ".json"].iter().any(|suffix| name.ends_with(suffix)))
        .filter(|name| !directory.join(name).is_dir())
        .collect();
    names.sort();
    let valid = |name: &String| Some(Choice { file: name.clone(), list: list(&directory.join(name))? });
    Found { choice: names.iter().find_map(valid), first: names.into_iter().next() }
}

/// Returns the types of the plugins that a runtime with libcni 1.3 calls for a pod: those of the list, then those in the
/// files of the directory of its name (libcni, `NetworkConfFromFile`).
pub(crate) fn called(directory: &Path) -> Vec<String> {
    let Choice { file, list } = read(directory).choice.expect("a valid configuration");
    let text = |plugin: &Value| plugin["type"].as_str().expect("a type").to_owned();
    let mut types: Vec<String> = list["plugins"].as_array().expect("plugins").iter().map(text).collect();
    let beside = directory.join(list["name"].as_str().expect("a name"));
    if file.ends_with(".conflist") && list["loadOnlyInlinedPlugins"] != true && beside.is_dir() {
        let entries = fs::read_dir(beside).expect("readable").map(|entry| entry.expect("readable").path());
        let mut files: Vec<_> = entries.filter(|path| path.extension().is_some_and(|end| end == "conf")).collect();
        files.sort();
        let plugin = |path| serde_json::from_str(&fs::read_to_string(path).expect("text")).expect("JSON");
        types.extend(files.into_iter().map(|path| text(&plugin(path))));
    }
    types
}

/// Returns the configuration list in a file; `None` if the runtime refuses it.
fn list(path: &Path) -> Option<Value> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => panic!("{}: {error}", path.display()),
    };
    let value: Value = serde_json::from_str(&text).ok()?;
    value["name"].as_str()?;
    let has_type = |plugin: &Value| plugin["type"].as_str().is_some_and(|kind| !kind.is_empty());
    if path.extension().is_some_and(|extension| extension == "conflist") {
        let plugins = value["plugins"].as_array()?;
        return (!plugins.is_empty() && plugins.iter().all(has_type)).then_some(value);
    }
    let wrapped = json!({"name": value["name"], "cniVersion": value["cniVersion"], "plugins": [value]});
    has_type(&wrapped["plugins"][0]).then_some(wrapped)
}

impl Choice {
    /// Returns the list without the plugin's entry: the cluster CNI's list.
    ///
    /// # Errors
    /// The list has no entry of the plugin, several ones, or another plugin after it.
    pub(crate) fn original(&self) -> Result<Value, String> {
        let types: Vec<_> =
            self.list["plugins"].as_array().into_iter().flatten().map(|plugin| plugin["type"].clone()).collect();
        let own: Vec<_> = (0..types.len()).filter(|index| types[*index] == "detour").collect();
        if own != [types.len() - 1] {
            return Err(format!("{}: expected the entry detour once, at the end, got {types:?}", self.file));
        }
        let mut list = self.list.clone();
        list["plugins"].as_array_mut().expect("a list").pop();
        Ok(list)
    }
}

/// Returns the list that the runtime uses, without the plugin's entry, as text.
pub(crate) fn used(directory: &Path) -> Option<String> {
    let choice = read(directory).choice?;
    Some(choice.original().ok()?.to_string())
}

/// Returns a list as the text that [`used`] returns.
pub(crate) fn compact(text: &str) -> String {
    serde_json::from_str::<Value>(text).expect("JSON").to_string()
}

/// A runtime that reads its directory all the time, and records each choice that would start a pod outside the mesh.
pub(crate) struct Runtime {
    reads: Repeated,
    violations: Arc<Mutex<Vec<String>>>,
}

impl Runtime {
    /// Starts to read `directory`, which has a copy of one of these lists.
    pub(crate) fn start(directory: &Path, allowed: &[&str]) -> Self {
        let allowed: BTreeSet<String> = allowed.iter().map(|text| compact(text)).collect();
        let violations = Arc::new(Mutex::new(Vec::new()));
        let (directory, seen) = (directory.to_owned(), Arc::clone(&violations));
        let reads = Repeated::start(Duration::from_micros(100), move || {
            if let Err(violation) = check(&read(&directory), &allowed) {
                seen.lock().expect("unpoisoned").push(violation);
            }
        });
        Self { reads, violations }
    }

    /// Stops reading.
    #[track_caller]
    pub(crate) fn end(self) {
        self.reads.end();
        assert_none(&self.violations);
    }
}

#[track_caller]
fn assert_none(violations: &Mutex<Vec<String>>) {
    let violations = violations.lock().expect("unpoisoned").clone();
    assert!(violations.is_empty(), "{} of the reads: {:#?}", violations.len(), &violations[..1]);
}

fn check(found: &Found, allowed: &BTreeSet<String>) -> Result<(), String> {
    let choice = found.choice.as_ref().ok_or("no valid configuration")?;
    if choice.file != OWN_LIST || found.first.as_deref() != Some(OWN_LIST) {
        return Err(format!("the runtime uses {}, and {:?} is first", choice.file, found.first));
    }
    let original = choice.original()?.to_string();
    if allowed.contains(&original) { Ok(()) } else { Err(format!("the cluster CNI never wrote {original}")) }
}
