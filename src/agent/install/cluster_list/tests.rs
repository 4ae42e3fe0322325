use super::*;
use crate::agent::install::plan::{DesiredState, FoundFile};
use crate::agent::install::reconcile::reconcile;
use serde_json::json;

const LISTED: &str = r#"{"name":"n","plugins":[{"type":"a"}]}"#;
const SINGLE: &str = r#"{"name":"n","type":"a"}"#;

fn dir() -> HostPath {
    "/net.d".parse().expect("a path")
}

/// Returns a directory with these files.
fn found(files: &[(&str, &str)]) -> FoundState {
    let mut found = FoundState::default();
    for (name, text) in files {
        let digest = Digest::of(text.as_bytes());
        let file = FoundFile { digest, text: Some((*text).to_owned()), mode: 0o644, trusted: true };
        found.files.insert(dir().join(name), file);
        let file = ConfFile { list: ConfList::of_file(name, text), untrusted: None };
        found.configurations.insert((*name).to_owned(), file);
    }
    found
}

fn desired(file: Option<&str>) -> ListEntry {
    ListEntry { dir: dir(), file: file.map(str::to_owned), value: json!({"type": "detour"}), own_list: false }
}

/// Returns the file that gets the entry, and the files that were skipped before it.
fn chosen(files: &[(&str, &str)], named: Option<&str>) -> (Option<String>, Vec<String>) {
    let (found, desired) = (found(files), desired(named));
    let list = ClusterList { desired: &desired, bin_dir: None, found: &found };
    let (target, skipped) = list.choose(&list.sources(), named, false);
    let reasons = skipped.iter().map(|(name, reason)| format!("{name}: {reason}")).collect();
    (target.map(|(name, _)| name.to_owned()), reasons)
}

fn first(files: &[(&str, &str)], named: Option<&str>) -> Option<String> {
    chosen(files, named).0
}

#[test]
fn the_first_usable_file_by_name_is_chosen() {
    let broken = [("05-x.conflist", "{"), ("20-b.conflist", LISTED), ("10-a.conf", SINGLE)];
    assert_eq!(first(&broken, None).as_deref(), Some("10-a.conf"));
    assert_eq!(first(&[("05-x.conflist", "{")], None), None);
    assert_eq!(first(&[("05-x.conflist", SINGLE)], None), None);
    assert_eq!(first(&[("05-x.json", SINGLE)], None).as_deref(), Some("05-x.json"));
    assert_eq!(list_name("05-x.json"), "05-x.conflist");
}

/// Go ignores the case of keys, so runtimes use this file first.
#[test]
fn a_file_with_keys_in_another_case_is_not_passed_over() {
    let other_case = r#"{"NAME":"x","Type":"bridge"}"#;
    let (target, skipped) = chosen(&[("05-x.conf", other_case), ("10-a.conflist", LISTED)], None);
    assert_eq!(target, None);
    assert!(skipped[0].contains("05-x.conf: expected the key \"type\", got \"Type\""), "{skipped:?}");
}

#[test]
fn a_named_file_is_found_by_its_original_and_its_list_name() {
    let both = [("10-a.conflist", LISTED), ("20-b.conflist", LISTED)];
    assert_eq!(first(&both, Some("20-b.conflist")).as_deref(), Some("20-b.conflist"));
    assert_eq!(first(&both, Some("10-a.conf")).as_deref(), Some("10-a.conflist"));
    assert_eq!(first(&both, Some("30-c.conf")), None);
}

#[test]
fn multus_and_loopback_are_skipped_unless_named() {
    let multus = r#"{"name":"m","type":"multus-shim"}"#;
    let loopback = r#"{"name":"lo","type":"loopback"}"#;
    let all = [("00-multus.conf", multus), ("05-lo.conf", loopback), ("10-a.conflist", LISTED)];
    assert_eq!(first(&all, None).as_deref(), Some("10-a.conflist"));
    assert_eq!(first(&all, Some("00-multus.conf")).as_deref(), Some("00-multus.conf"));
}

/// Runtimes use the single configuration, whose name sorts first.
#[test]
fn a_list_of_the_same_name_is_replaced_only_if_an_installation_made_it() {
    let ours = r#"{"name":"n","plugins":[{"type":"a"},{"type":"detour"}]}"#;
    let state = DesiredState { entry: Some(desired(None)), ..DesiredState::default() };
    let mut found = found(&[("10-a.conf", SINGLE), ("10-a.conflist", ours)]);
    let plan = reconcile(&state, &found).expect("a plan");
    let refused = plan.unmet().expect("refused");
    assert!(refused.starts_with("can't write /net.d/10-a.conflist: it belongs to another owner"), "{refused}");
    assert_eq!(plan.actions, []);
    let sha256 = vec![Digest::of_value(&json!({"type": "detour"}))];
    let record = FileRecord { role: Role::Entry, sha256, plugin: Some("detour".into()), source: None };
    found.record.files.insert(dir().join("10-a.conflist"), record);
    let plan = reconcile(&state, &found).expect("a plan");
    let actions: Vec<_> = plan.actions.iter().map(ToString::to_string).collect();
    assert_eq!(actions, ["write /net.d/10-a.conflist (mode 0644)", "remove /net.d/10-a.conf"]);
}
