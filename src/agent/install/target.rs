//! Selects the configuration file that gets the plugin's entry.

use super::conflist::{self, UnusableList};
use super::state::ConfFile;

/// The selected file and its plugin list.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ConfTarget<'a> {
    pub(super) file: &'a ConfFile,
    /// The name of the list's file: the name of `file`, or of the `.conflist` file that replaces it.
    pub(super) list_name: String,
    pub(super) list: String,
}

const LIST_SUFFIX: &str = ".conflist";

/// Whether a runtime reads a file of this name (libcni, `ConfFiles`).
pub(super) fn is_configuration(name: &str) -> bool {
    [LIST_SUFFIX, ".conf", ".json"].iter().any(|suffix| name.ends_with(suffix))
}

/// Returns the first file by name that configures a pod network, as runtimes do, or the file `desired`. A `desired`
/// single-plugin configuration is also found as the list that an earlier installation made of it. The second part of
/// the result are the files that were skipped before it.
pub(super) fn choose<'a>(
    files: &'a [ConfFile],
    desired: Option<&str>,
    kind: &str,
) -> (Option<ConfTarget<'a>>, Vec<(&'a str, UnusableList)>) {
    let mut candidates: Vec<&ConfFile> = match desired {
        Some(name) => {
            let named = |name: &str| files.iter().find(|file| file.name == name);
            named(name).or_else(|| named(&list_name(name))).into_iter().collect()
        }
        None => files.iter().filter(|file| is_configuration(&file.name)).collect(),
    };
    candidates.sort_by(|a, b| a.name.cmp(&b.name));
    let mut skipped = Vec::new();
    for file in candidates {
        match list(file, files, kind).and_then(|list| if desired.is_none() { pod_network(list) } else { Ok(list) }) {
            Ok(list) => return (Some(ConfTarget { file, list_name: list_name(&file.name), list }), skipped),
            Err(error) => skipped.push((file.name.as_str(), error)),
        }
    }
    (None, skipped)
}

/// Returns the name of the list that is made of a file: `10-x.conflist` for `10-x.conf` and `10-x.json`.
fn list_name(name: &str) -> String {
    let stem = name.strip_suffix(".conf").or_else(|| name.strip_suffix(".json"));
    stem.map_or_else(|| name.to_owned(), |stem| format!("{stem}{LIST_SUFFIX}"))
}

fn list(file: &ConfFile, files: &[ConfFile], kind: &str) -> Result<String, UnusableList> {
    let text = str::from_utf8(&file.contents).map_err(|_| UnusableList::NotJson("expected UTF-8".into()))?;
    let name = list_name(&file.name);
    if name == file.name {
        return conflist::types(text).map(|_| text.to_owned());
    }
    let list = conflist::list_of(text)?;
    // A list that has the plugin's entry was made of this file by an earlier installation.
    let foreign = |other: &&ConfFile| {
        let text = String::from_utf8_lossy(&other.contents);
        other.name == name && conflist::of_type(&text, kind).is_ok_and(|own| own.is_empty())
    };
    if files.iter().any(|other| foreign(&other)) { Err(UnusableList::Twice(name)) } else { Ok(list) }
}

/// Refuses lists that may come first in the directory and are not the cluster network.
fn pod_network(list: String) -> Result<String, UnusableList> {
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
        };
        files.iter().map(file).collect()
    }

    fn chosen(in_directory: &[(&str, &str)], desired: Option<&str>) -> Option<(String, String)> {
        let files = files(in_directory);
        let (target, _) = choose(&files, desired, "detour");
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
