use super::*;

const LISTED: &str = r#"{"name":"n","plugins":[{"type":"a"}]}"#;
const SINGLE: &str = r#"{"name":"n","type":"a"}"#;

fn files(files: &[(&str, &str)]) -> Vec<ConfFile> {
    let file = |(name, text): &(&str, &str)| ConfFile {
        name: (*name).to_owned(),
        contents: text.as_bytes().to_owned(),
        mode: 0o644,
        ..ConfFile::default()
    };
    files.iter().map(file).collect()
}

fn chosen(in_directory: &[(&str, &str)], desired: Option<&str>) -> Option<(String, String)> {
    let files = files(in_directory);
    let (target, _) = choose(&files.iter().collect::<Vec<_>>(), desired, "detour", false);
    target.map(|target| (target.file.name.clone(), target.list_name))
}

fn names(file: &str, list: &str) -> Option<(String, String)> {
    Some((file.to_owned(), list.to_owned()))
}

#[test]
fn the_first_usable_file_by_name_is_chosen() {
    let broken = [("05-x.conflist", "{"), ("20-b.conflist", LISTED), ("10-a.conf", SINGLE), ("00-readme", LISTED)];
    assert_eq!(chosen(&broken, None), names("10-a.conf", "10-a.conflist"));
    assert_eq!(chosen(&[("05-x.conflist", "{")], None), None);
    assert_eq!(chosen(&[("05-x.conflist", SINGLE)], None), None);
    assert_eq!(chosen(&[("05-x.json", SINGLE)], None), names("05-x.json", "05-x.conflist"));
}

/// Go ignores the case of keys, so runtimes use this file first.
#[test]
fn a_file_with_keys_in_another_case_is_not_passed_over() {
    let other_case = r#"{"NAME":"x","Type":"bridge"}"#;
    let all = files(&[("05-x.conf", other_case), ("10-a.conflist", LISTED)]);
    let (target, skipped) = choose(&all.iter().collect::<Vec<_>>(), None, "detour", false);
    assert_eq!(target, None);
    assert!(skipped[0].1.may_be_used() && skipped[0].1.to_string().contains("key \"NAME\""), "{skipped:?}");
}

#[test]
fn a_named_file_is_found_by_its_original_and_its_list_name() {
    let both = [("10-a.conflist", LISTED), ("20-b.conflist", LISTED)];
    assert_eq!(chosen(&both, Some("20-b.conflist")), names("20-b.conflist", "20-b.conflist"));
    assert_eq!(chosen(&both, Some("10-a.conf")), names("10-a.conflist", "10-a.conflist"));
    assert_eq!(chosen(&both, Some("30-c.conf")), None);
}

#[test]
fn multus_and_loopback_are_skipped_unless_named() {
    let multus = r#"{"name":"m","type":"multus-shim"}"#;
    let loopback = r#"{"name":"lo","type":"loopback"}"#;
    let all = [("00-multus.conf", multus), ("05-lo.conf", loopback), ("10-a.conflist", LISTED)];
    assert_eq!(chosen(&all, None), names("10-a.conflist", "10-a.conflist"));
    assert_eq!(chosen(&all, Some("00-multus.conf")), names("00-multus.conf", "00-multus.conflist"));
}

#[test]
fn a_list_of_the_same_name_is_replaced_only_if_it_has_our_entry() {
    let foreign = [("10-a.conf", SINGLE), ("10-a.conflist", LISTED)];
    assert_eq!(chosen(&foreign, None), names("10-a.conflist", "10-a.conflist"));
    let ours = r#"{"name":"n","plugins":[{"type":"a"},{"type":"detour"}]}"#;
    assert_eq!(chosen(&[("10-a.conf", SINGLE), ("10-a.conflist", ours)], None), names("10-a.conf", "10-a.conflist"));
}
