//! Selects the configuration file that gets the plugin's entry.

use super::conflist::{self, UnusableList};
use super::state::ConfFile;
use crate::cni::{OWN_LIST, is_configuration_file};
use std::collections::BTreeSet;

/// The selected file and its configuration list.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ConfTarget<'a> {
    pub(super) file: &'a ConfFile,
    /// The name of the list's file: the name of `file`, or of the `.conflist` file that replaces it.
    pub(super) list_name: String,
    pub(super) list: String,
}

const LIST_SUFFIX: &str = ".conflist";

/// Returns the first file by name that configures a pod network, as runtimes do, or the file `desired`. A `desired`
/// single-plugin configuration is also found as the list that an earlier installation made of it. The second part of
/// the result are the files that were skipped before it. A list that is `copied` replaces no file. Files after one that
/// only runtimes can use are not chosen.
pub(super) fn choose<'a>(
    files: &[&'a ConfFile],
    desired: Option<&str>,
    kind: &str,
    copied: bool,
) -> (Option<ConfTarget<'a>>, Vec<(&'a str, UnusableList)>) {
    let mut candidates: Vec<&ConfFile> = match desired {
        Some(name) => {
            let named = |name: &str| files.iter().copied().find(|file| file.name == name);
            named(name).or_else(|| named(&list_name(name))).into_iter().collect()
        }
        None => files.iter().copied().filter(|file| is_configuration_file(&file.name)).collect(),
    };
    candidates.sort_by(|a, b| a.name.cmp(&b.name));
    let mut skipped = Vec::new();
    for file in candidates {
        let usable = list(file).and_then(|list| if desired.is_none() { pod_network(list) } else { Ok(list) });
        let usable = usable.and_then(|list| extensible(file, list, copied));
        match usable.and_then(|list| if copied { Ok(list) } else { replaceable(file, list, files, kind) }) {
            Ok(list) => return (Some(ConfTarget { file, list_name: list_name(&file.name), list }), skipped),
            Err(error) => {
                let may_be_used = error.may_be_used();
                skipped.push((file.name.as_str(), error));
                if may_be_used {
                    break;
                }
            }
        }
    }
    (None, skipped)
}

/// Returns the names of the files that configure a pod network, except the own list's.
pub(super) fn usable(files: &[ConfFile]) -> BTreeSet<String> {
    let is_usable = |file: &&ConfFile| {
        is_configuration_file(&file.name) && file.name != OWN_LIST && list(file).and_then(pod_network).is_ok()
    };
    files.iter().filter(is_usable).map(|file| file.name.clone()).collect()
}

/// Returns the name of the list that is made of a file: `10-x.conflist` for `10-x.conf` and `10-x.json`.
fn list_name(name: &str) -> String {
    let stem = name.strip_suffix(".conf").or_else(|| name.strip_suffix(".json"));
    stem.map_or_else(|| name.to_owned(), |stem| format!("{stem}{LIST_SUFFIX}"))
}

/// Returns the configuration list in a file, or the one that is made of its single plugin.
///
/// # Errors
/// A runtime would reject the file.
pub(super) fn list(file: &ConfFile) -> Result<String, UnusableList> {
    let text = str::from_utf8(&file.contents).map_err(|_| UnusableList::NotText)?;
    if !file.name.ends_with(LIST_SUFFIX) {
        return conflist::list_of(text);
    }
    match conflist::types(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(UnusableList::NotInlined) if !file.has_directory => Err(UnusableList::NoPlugins),
        Err(error) => Err(error),
    }
}

/// Refuses a list in which the plugin would not work, and one that another user can change: the copy, or the list that
/// replaces a single plugin, would be root's.
///
/// # Errors
/// [`UnusableList::Version`] or [`UnusableList::Untrusted`].
pub(super) fn extensible(file: &ConfFile, list: String, copied: bool) -> Result<String, UnusableList> {
    conflist::check_version(&list)?;
    let is_new_file = copied || !file.name.ends_with(LIST_SUFFIX);
    match file.untrusted.as_ref().filter(|_| is_new_file) {
        Some(why) => Err(UnusableList::Untrusted(why.clone())),
        None => Ok(list),
    }
}

/// Refuses a list that is made of a single plugin if another tool has a list of that name.
fn replaceable(file: &ConfFile, list: String, files: &[&ConfFile], kind: &str) -> Result<String, UnusableList> {
    let name = list_name(&file.name);
    // A list that has the plugin's entry was made of this file by an earlier installation.
    let foreign = |other: &ConfFile| {
        let text = String::from_utf8_lossy(&other.contents);
        other.name == name && conflist::of_type(&text, kind).is_ok_and(|own| own.is_empty())
    };
    let is_foreign = name != file.name && files.iter().any(|other| foreign(other));
    if is_foreign { Err(UnusableList::Twice(name)) } else { Ok(list) }
}

/// Refuses lists that may come first in the directory and are not the cluster network.
///
/// # Errors
/// [`UnusableList::Multus`], [`UnusableList::Loopback`], or a runtime would reject the list.
pub(super) fn pod_network(list: String) -> Result<String, UnusableList> {
    let types = conflist::types(&list)?;
    if matches!(types.first().map(String::as_str), Some("multus" | "multus-shim")) {
        return Err(UnusableList::Multus);
    }
    if types.iter().all(|kind| kind == "loopback") { Err(UnusableList::Loopback) } else { Ok(list) }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(
            chosen(&[("10-a.conf", SINGLE), ("10-a.conflist", ours)], None),
            names("10-a.conf", "10-a.conflist")
        );
    }
}
