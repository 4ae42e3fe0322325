//! Golden files: configurations of real clusters before and after an installation, and unusable ones.

use crate::support::golden::cases;
use detour_cni::agent::install::conflist::ConfList;
use detour_cni::agent::install::{
    Change, ConfFile, DesiredState, Digest, FoundFile, FoundState, HostPath, InstallPlan, InstallRecord, ListEntry,
    undo,
};
use detour_cni::state::format;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn file(path: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(path)).expect("readable")
}

fn dir() -> HostPath {
    "/etc/cni/net.d".parse().expect("a path")
}

/// Desires only an entry in the configuration list.
fn desired(file: Option<&str>) -> DesiredState {
    let entry = json!({
        "type": "detour",
        "kubernetes": { "kubeconfig": "/var/lib/cni/detour/kubeconfig", "exclude_namespaces": ["kube-system"] },
        "chain": [{ "type": "istio-redirect" }],
    });
    let list = ListEntry { dir: dir(), file: file.map(Into::into), value: entry, own_list: false };
    DesiredState { entry: Some(list), ..DesiredState::default() }
}

fn reconcile(desired: &DesiredState, found: &FoundState) -> InstallPlan {
    detour_cni::agent::install::reconcile(desired, found).expect("a plan")
}

fn found(name: &str, text: &str) -> FoundState {
    let mut found = FoundState::default();
    put(&mut found, name, text, 0o640);
    found
}

fn put(found: &mut FoundState, name: &str, text: &str, mode: u32) {
    let file = ConfFile { list: ConfList::of_file(name, text), untrusted: None };
    found.configurations.insert(name.to_owned(), file);
    let file = FoundFile { digest: Digest::of(text.as_bytes()), text: Some(text.to_owned()), mode, trusted: true };
    found.files.insert(dir().join(name), file);
}

/// Returns the directory and the record after the plan.
fn after(mut found: FoundState, plan: &InstallPlan) -> FoundState {
    for action in &plan.actions {
        match &action.change {
            Change::Text(text, mode) => put(&mut found, &action.path.name(), text, *mode),
            Change::Remove => {
                found.configurations.remove(&action.path.name());
                found.files.remove(&action.path);
            }
            Change::Program(_) => panic!("{action}"),
        }
    }
    found.record = plan.record.clone();
    found
}

fn only(found: &FoundState) -> (String, String, u32) {
    let files: Vec<_> = found.files.iter().collect();
    let [(path, file)] = &files[..] else { panic!("{files:?}") };
    (path.name(), file.text.clone().expect("text"), file.mode)
}

#[test]
fn each_configuration_gets_the_entry_and_loses_only_that() {
    let wanted = cases("conflist.md", "after/");
    for (name, before) in cases("conflist.md", "before/") {
        let found = found(&name, &before);
        let plan = reconcile(&desired(None), &found);
        assert_eq!((plan.unmet(), plan.notes.len()), (None, 0), "{name}");
        let installed = after(found, &plan);
        let (list, text, mode) = only(&installed);
        assert_eq!(Some(&text), wanted.get(&list), "{name}");
        assert_eq!(mode, 0o640, "{name}");
        assert_eq!(reconcile(&desired(None), &installed).actions, [], "{name}: a second time");
        let undone = after(installed.clone(), &undo(&installed));
        let value = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        let mut expected = value(&ConfList::of_file(&name, &before).expect("a list").text());
        expected["plugins"].as_array_mut().expect("a list").retain(|plugin| plugin["type"] != "detour");
        let (undone_name, text, mode) = only(&undone);
        assert_eq!((undone_name, value(&text), mode), (list, expected, 0o640), "{name}");
    }
}

#[test]
fn each_unusable_configuration_stays_and_its_note_has_the_reason() {
    let refused: BTreeMap<String, Value> = serde_json::from_slice(&file("golden/refused.json")).expect("JSON");
    for (name, file) in &refused {
        let plan = reconcile(&desired(None), &found(name, file["text"].as_str().expect("text")));
        assert_eq!(plan.actions, [], "{name}");
        assert!(plan.unmet().expect("nothing to put it into").contains("/etc/cni/net.d"));
        assert_eq!(json!(plan.notes), json!([file["note"]]), "{name}");
    }
}

#[test]
fn the_entry_moves_to_a_list_that_sorts_first() {
    let text = r#"{"name":"n","plugins":[{"type":"a"}]}"#;
    let late = found("20-x.conflist", text);
    let mut installed = after(late.clone(), &reconcile(&desired(None), &late));
    put(&mut installed, "10-y.conflist", text, 0o640);
    let moved = after(installed.clone(), &reconcile(&desired(None), &installed));
    let shown = |name: &str| moved.files[&dir().join(name)].text.clone().expect("text");
    assert!(shown("10-y.conflist").contains("detour"));
    assert!(!shown("20-x.conflist").contains("detour"));
    assert_eq!(moved.record.files.len(), 1);
}

/// A missing field has its default value.
#[test]
fn records_of_released_versions_are_read_and_a_newer_one_is_refused() {
    let golden = file("records/v0.2.0/install.json");
    let record: InstallRecord = format::parse(&golden).expect("0.2.0");
    assert_eq!((record.owner.as_deref(), record.files.len()), (Some("kube-system/detour-agent"), 3));
    let value = |text: &[u8]| serde_json::from_slice::<Value>(text).expect("JSON");
    let mut expected = value(&golden);
    // Earlier versions write it, and none reads it.
    expected.as_object_mut().expect("an object").remove("installer");
    assert_eq!(value(&format::print(&record).expect("printed")), expected);
    for key in ["owner", "platform", "files"] {
        let mut lacking = value(&golden);
        lacking.as_object_mut().expect("an object").remove(key);
        format::parse::<InstallRecord>(lacking.to_string().as_bytes()).expect("a default");
    }
    let mut newer = value(&golden);
    newer["version"] = json!(2);
    format::parse::<InstallRecord>(newer.to_string().as_bytes()).expect_err("newer");
}
