//! Which file of the node's configuration directory the plugin goes into.

use super::conflist::{self, UnusableList};

/// A file of the directory, as far as runtimes look at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfFile {
    /// Its name in the directory.
    pub name: String,
    /// What it holds.
    pub contents: Vec<u8>,
    /// Its permission bits.
    pub mode: u32,
}

/// The file that was chosen, and the list that it holds or stands for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ConfTarget<'a> {
    pub(super) file: &'a ConfFile,
    /// The name of the list: the file's own, or that of the `.conflist` that takes its place.
    pub(super) list_name: String,
    pub(super) list: String,
}

const LIST: &str = ".conflist";

/// Whether a runtime would look at a file of that name (libcni, `ConfFiles`).
pub(super) fn is_configuration(name: &str) -> bool {
    [LIST, ".conf", ".json"].iter().any(|suffix| name.ends_with(suffix))
}

/// The first file by name, as runtimes choose, that is the configuration of a pod's network; or
/// the one that is `wanted`, also under the name that it has since it was turned into a list.
/// Beside it why others that come before it are not the one.
pub(super) fn choose<'a>(
    files: &'a [ConfFile],
    wanted: Option<&str>,
    kind: &str,
) -> (Option<ConfTarget<'a>>, Vec<(&'a str, UnusableList)>) {
    let mut candidates: Vec<&ConfFile> = match wanted {
        Some(name) => {
            let named = |name: &str| files.iter().find(|file| file.name == name);
            named(name).or_else(|| named(&list_name(name))).into_iter().collect()
        }
        None => files.iter().filter(|file| is_configuration(&file.name)).collect(),
    };
    candidates.sort_by(|a, b| a.name.cmp(&b.name));
    let mut unfit = Vec::new();
    for file in candidates {
        match list(file, files, kind).and_then(|list| if wanted.is_none() { usual(list) } else { Ok(list) }) {
            Ok(list) => return (Some(ConfTarget { file, list_name: list_name(&file.name), list }), unfit),
            Err(why) => unfit.push((file.name.as_str(), why)),
        }
    }
    (None, unfit)
}

/// `10-x.conf` and `10-x.json` as a list are `10-x.conflist`.
fn list_name(name: &str) -> String {
    let stem = name.strip_suffix(".conf").or_else(|| name.strip_suffix(".json"));
    stem.map_or_else(|| name.to_owned(), |stem| format!("{stem}{LIST}"))
}

fn list(file: &ConfFile, files: &[ConfFile], kind: &str) -> Result<String, UnusableList> {
    let text = str::from_utf8(&file.contents).map_err(|_| UnusableList::NotJson("not UTF-8".into()))?;
    let name = list_name(&file.name);
    if name == file.name {
        return conflist::types(text).map(|_| text.to_owned());
    }
    let list = conflist::list_of(text)?;
    // One with our own plugin in it is an earlier conversion of this file.
    let foreign = |other: &&ConfFile| {
        let text = String::from_utf8_lossy(&other.contents);
        other.name == name && conflist::of_type(&text, kind).is_ok_and(|own| own.is_empty())
    };
    if files.iter().any(|other| foreign(&other)) { Err(UnusableList::Twice(name)) } else { Ok(list) }
}

/// Refuses what can stand first in the directory without being the cluster network.
fn usual(list: String) -> Result<String, UnusableList> {
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

    fn chosen(of: &[(&str, &str)], wanted: Option<&str>) -> Option<(String, String)> {
        let files = files(of);
        let (target, _) = choose(&files, wanted, "detour");
        target.map(|target| (target.file.name.clone(), target.list_name))
    }

    fn names(file: &str, list: &str) -> Option<(String, String)> {
        Some((file.to_owned(), list.to_owned()))
    }

    #[test]
    fn the_first_good_one_by_name() {
        let broken = [("05-x.conflist", "{"), ("20-b.conflist", LISTED), ("10-a.conf", SINGLE), ("00-readme", LISTED)];
        assert_eq!(chosen(&broken, None), names("10-a.conf", "10-a.conflist"));
        assert_eq!(chosen(&[("05-x.conflist", "{")], None), None);
        assert_eq!(chosen(&[("05-x.conflist", SINGLE)], None), None);
        assert_eq!(chosen(&[("05-x.json", SINGLE)], None), names("05-x.json", "05-x.conflist"));
    }

    #[test]
    fn the_one_that_is_named_by_its_later_name_too() {
        let both = [("10-a.conflist", LISTED), ("20-b.conflist", LISTED)];
        assert_eq!(chosen(&both, Some("20-b.conflist")), names("20-b.conflist", "20-b.conflist"));
        assert_eq!(chosen(&both, Some("10-a.conf")), names("10-a.conflist", "10-a.conflist"));
        assert_eq!(chosen(&both, Some("30-c.conf")), None);
    }

    #[test]
    fn neither_multus_nor_loopback_unless_named() {
        let multus = r#"{"name":"m","type":"multus-shim"}"#;
        let loopback = r#"{"name":"lo","type":"loopback"}"#;
        let all = [("00-multus.conf", multus), ("05-lo.conf", loopback), ("10-a.conflist", LISTED)];
        assert_eq!(chosen(&all, None), names("10-a.conflist", "10-a.conflist"));
        assert_eq!(chosen(&all, Some("00-multus.conf")), names("00-multus.conf", "00-multus.conflist"));
    }

    #[test]
    fn a_list_beside_a_single_one_is_only_replaced_where_it_is_ours() {
        let foreign = [("10-a.conf", SINGLE), ("10-a.conflist", LISTED)];
        assert_eq!(chosen(&foreign, None), names("10-a.conflist", "10-a.conflist"));
        let ours = r#"{"name":"n","plugins":[{"type":"a"},{"type":"detour"}]}"#;
        assert_eq!(
            chosen(&[("10-a.conf", SINGLE), ("10-a.conflist", ours)], None),
            names("10-a.conf", "10-a.conflist")
        );
    }
}
