//! Configurations as they are in the wild: with the plugin in them, and those that it stays out of.

use detour_cni::agent::install::plan::undo;
use detour_cni::agent::install::{
    ConfFile, ConfigurationTarget, DesiredState, Digest, FileAction, FoundFile, FoundState, HostPath, InstallLog,
    InstallPlan, reconcile,
};
use detour_cni::state::format;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/conflist").join(name)
}

fn golden(name: &str) -> BTreeMap<String, String> {
    let entries = fs::read_dir(directory(name)).expect("readable");
    let read = entries.map(|entry| {
        let path = entry.expect("readable").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, fs::read_to_string(&path).expect("readable"))
    });
    read.collect()
}

fn dir() -> HostPath {
    "/etc/cni/net.d".parse().expect("a path")
}

/// With the plugin chained, and nothing else.
fn desired(file: Option<&str>) -> DesiredState {
    let entry = json!({
        "type": "detour",
        "kubernetes": { "kubeconfig": "/var/lib/cni/detour/kubeconfig", "exclude_namespaces": ["kube-system"] },
        "chain": [{ "type": "istio-redirect" }],
    });
    let configuration = ConfigurationTarget::Listed { dir: dir(), file: file.map(Into::into), entry };
    DesiredState {
        installer: "test".into(),
        program: Digest::of(b""),
        programs: Vec::new(),
        kubeconfig: None,
        node: None,
        configuration,
    }
}

fn found(name: &str, text: &str) -> FoundState {
    let file = ConfFile { name: name.to_owned(), contents: text.as_bytes().to_owned(), mode: 0o640 };
    FoundState { configurations: vec![file], ..FoundState::default() }
}

/// The directory and the log after a plan.
fn after(mut found: FoundState, plan: &InstallPlan) -> FoundState {
    for action in &plan.actions {
        match action {
            FileAction::Write { path, text, mode, .. } => {
                found.configurations.retain(|file| file.name != path.name());
                let contents = text.as_bytes().to_owned();
                found.configurations.push(ConfFile { name: path.name(), contents, mode: *mode });
                let digest = Digest::of(text.as_bytes());
                found
                    .files
                    .insert(path.clone(), FoundFile { digest, text: Some(text.clone()), mode: *mode, trusted: true });
            }
            FileAction::Remove { path, .. } => {
                found.configurations.retain(|file| file.name != path.name());
                found.files.remove(path);
            }
            other => panic!("{other}"),
        }
    }
    found.record = plan.record.clone();
    found
}

fn only(found: &FoundState) -> (&str, String, u32) {
    let [file] = &found.configurations[..] else { panic!("{:?}", found.configurations) };
    (&file.name, String::from_utf8(file.contents.clone()).expect("text"), file.mode)
}

#[test]
fn each_gets_the_plugin_and_keeps_all_else_and_gets_back_what_it_was() {
    let wanted = golden("after");
    for (name, before) in golden("before") {
        let found = found(&name, &before);
        let plan = reconcile(&desired(None), &found);
        assert_eq!((plan.waits_for.as_ref(), plan.notes.len()), (None, 0), "{name}");
        let installed = after(found, &plan);
        let (list, text, mode) = only(&installed);
        assert_eq!(Some(&text), wanted.get(list), "{name}");
        assert_eq!(mode, 0o640, "{name}");
        assert_eq!(reconcile(&desired(None), &installed).actions, [], "{name}: a second time");
        let undone = after(installed.clone(), &undo(&installed));
        if before.contains(r#""type": "detour","#) {
            continue;
        }
        assert_eq!(only(&undone), (name.as_str(), before, 0o640));
    }
}

#[test]
fn each_is_only_made_longer() {
    let after = golden("after");
    for (name, before) in golden("before").iter().filter(|(name, _)| name.ends_with(".conflist")) {
        if name.contains("older") {
            continue;
        }
        let same = before.bytes().zip(after[name].bytes()).take_while(|(a, b)| a == b).count();
        assert!(after[name].ends_with(&before[same..]), "{name}: only one piece is new");
    }
}

#[test]
fn each_of_the_others_stays_as_it_is_and_says_why() {
    let mut refused = golden("refused");
    let reasons = refused.remove("reasons").expect("the reasons");
    let mut seen = Vec::new();
    for (name, text) in &refused {
        let plan = reconcile(&desired(None), &found(name, text));
        assert_eq!(plan.actions, [], "{name}");
        assert!(plan.waits_for.expect("nothing to put it into").contains("/etc/cni/net.d"));
        seen.extend(plan.notes);
    }
    assert_eq!(seen.join("\n") + "\n", reasons);
}

#[test]
fn a_broken_one_does_not_keep_it_from_the_next() {
    let mut found = found("00-broken.conflist", "{");
    found.configurations.push(ConfFile {
        name: "10-x.conflist".into(),
        contents: br#"{"name":"n","plugins":[{"type":"a"}]}"#.to_vec(),
        mode: 0o600,
    });
    let plan = reconcile(&desired(None), &found);
    let [FileAction::Write { path, .. }] = &plan.actions[..] else { panic!("{plan:?}") };
    assert_eq!((path.name().as_str(), plan.notes.len()), ("10-x.conflist", 1));
}

#[test]
fn an_entry_that_somebody_changed_is_left_and_named() {
    let text = r#"{"name":"n","plugins":[{"type":"a"}]}"#;
    let found = found("10-x.conflist", text);
    let mut installed = after(found.clone(), &reconcile(&desired(None), &found));
    let file = installed.files.values_mut().next().expect("the list");
    file.text = file.text.as_ref().map(|text| text.replace("kube-system", "mine"));
    let plan = undo(&installed);
    assert_eq!(plan.actions, []);
    assert!(plan.notes[0].starts_with("/etc/cni/net.d/10-x.conflist is left: "), "{:?}", plan.notes);
    assert_eq!(plan.record.lists.len(), 1, "known for the next time");
}

#[test]
fn a_list_that_comes_to_stand_first_gets_the_plugin_and_the_other_loses_it() {
    let text = r#"{"name":"n","plugins":[{"type":"a"}]}"#;
    let late = found("20-x.conflist", text);
    let mut installed = after(late.clone(), &reconcile(&desired(None), &late));
    installed.configurations.extend(found("10-y.conflist", text).configurations);
    let moved = after(installed.clone(), &reconcile(&desired(None), &installed));
    let shown = |name: &str| {
        let file = moved.configurations.iter().find(|file| file.name == name).expect("there");
        String::from_utf8(file.contents.clone()).expect("text")
    };
    assert!(shown("10-y.conflist").contains("detour"));
    assert_eq!(shown("20-x.conflist"), text);
    assert_eq!(moved.record.lists.len(), 1);
}

/// The log of an installation by each released version: a field that it may lack has its default, and a
/// newer version's log is refused.
#[test]
fn the_log_of_another_version_is_read_or_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/records/v0.1.0/install.json");
    let golden = fs::read(path).expect("a record");
    let log: InstallLog = format::parse(&golden).expect("0.1.0");
    assert_eq!((log.files.len(), log.lists.len()), (1, 1));
    let printed = format::print(&log).expect("printed");
    assert_eq!(format::parse::<InstallLog>(&printed).expect("this version"), log);
    let value = |text: &[u8]| serde_json::from_slice::<serde_json::Value>(text).expect("JSON");
    for key in ["installer", "files", "lists"] {
        let mut lacking = value(&golden);
        lacking.as_object_mut().expect("an object").remove(key);
        format::parse::<InstallLog>(lacking.to_string().as_bytes()).expect("a default");
    }
    let mut newer = value(&printed);
    newer["version"] = json!(2);
    format::parse::<InstallLog>(newer.to_string().as_bytes()).expect_err("newer");
}
