//! Configurations in files: those of `confDir`, and what `clusterNetwork` and `defaultNetworks` may
//! name.

use super::RunnableConfiguration;
use super::configuration::{json, with_plugins};
use crate::cni::{Code, Error};
use crate::trusted_file::{self, read_text};
use serde_json::Value;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// What the name of a configuration file ends with (libcni's `ConfFiles`, as Multus calls it).
const EXTENSIONS: [&str; 3] = ["conf", "json", "conflist"];

/// A configuration is larger only by mistake.
const LARGEST: u64 = 1 << 20;

/// The configuration called `name` in `dir`: the first one in the order of the files' names. A file
/// that can't be understood is a warning: it is another network's.
///
/// # Errors
/// [`Code::InvalidConfig`]: there is none, or it is wrong.
pub(super) fn named(dir: &Path, name: &str, warnings: &mut Vec<String>) -> Result<RunnableConfiguration, Error> {
    let (mut found, before) = (Vec::new(), warnings.len());
    let files = files(dir, &EXTENSIONS).map_err(|error| unread(dir, &error));
    for file in files? {
        let read = read_text(&file, LARGEST).map_err(|error| unread(&file, &error));
        match read.and_then(|text| Ok((json(&shown(&file), &text)?, text))) {
            Err(error) => warnings.push(format!("{error}; looking for the configuration called {name:?} elsewhere")),
            Ok((value, text)) if value["name"] == name => {
                let trusted = trusted_file::check(&file).is_ok();
                return Ok(RunnableConfiguration {
                    trusted,
                    ..RunnableConfiguration::parse(&shown(&file), &text, None)?
                });
            }
            Ok((value, _)) => found.extend(value["name"].as_str().map(str::to_owned)),
        }
    }
    let found = if found.is_empty() { "no other".to_owned() } else { found.join(", ") };
    let msg = format!(
        "{}: there is no configuration with \"name\": {name:?} (*.conf, *.json, *.conflist); found: {found}",
        dir.display()
    );
    // It may be in one of those.
    Err(Error::new(Code::InvalidConfig, msg).with_details(warnings[before..].join("; ")))
}

/// The configuration in the file `path` or, where it is a directory, in its first file. A list has
/// in addition the plugins of the files beside it in the directory of its name, unless it says
/// `loadOnlyInlinedPlugins` (libcni, `NetworkPluginConfsFromFiles`).
///
/// # Errors
/// [`Code::TryAgain`]: there is no file so far; [`Code::InvalidConfig`]: it is wrong.
pub(super) fn at(path: &Path) -> Result<RunnableConfiguration, Error> {
    let absent = |path: &Path| {
        let msg = format!(
            "{} is not there yet: the agent of the cluster's network writes it; see whether its pod runs on this node",
            path.display()
        );
        Error::new(Code::TryAgain, msg)
    };
    let file = if path.is_dir() {
        let files = files(path, &EXTENSIONS).map_err(|error| unread(path, &error))?;
        files.into_iter().next().ok_or_else(|| absent(&path.join("*.conf, *.json or *.conflist")))?
    } else {
        path.to_owned()
    };
    let text = read_text(&file, LARGEST).map_err(|error| match error.kind() {
        ErrorKind::NotFound => absent(&file),
        _ => unread(&file, &error),
    })?;
    let place = shown(&file);
    let configuration = match json(&place, &text)? {
        Value::Object(list) if list.get("type").is_none_or(|kind| kind == "") => {
            let name = list.get("name").and_then(Value::as_str).unwrap_or_default();
            let inline = list.get("loadOnlyInlinedPlugins") == Some(&Value::Bool(true));
            let more = if inline || !crate::cni::is_identifier(name) { Vec::new() } else { beside(&file, name)? };
            if more.is_empty() {
                RunnableConfiguration::parse(&place, &text, None)
            } else {
                RunnableConfiguration::parse(&place, &with_plugins(&list, more), None)
            }
        }
        _ => RunnableConfiguration::parse(&place, &text, None),
    }?;
    Ok(RunnableConfiguration { trusted: trusted_file::check(&file).is_ok(), ..configuration })
}

/// The plugins in the directory called `name` beside `file`.
fn beside(file: &Path, name: &str) -> Result<Vec<Value>, Error> {
    let dir = file.with_file_name(name);
    let files = match files(&dir, &["conf"]) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Vec::new()),
        files => files.map_err(|error| unread(&dir, &error))?,
    };
    let plugin = |file: &PathBuf| json(&shown(file), &read_text(file, LARGEST).map_err(|error| unread(file, &error))?);
    files.iter().map(plugin).collect()
}

/// The files with one of these extensions, sorted by name; subdirectories are left out.
fn files(dir: &Path, extensions: &[&str]) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let known = path.extension().is_some_and(|extension| extensions.iter().any(|known| extension == *known));
        if known && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn unread(path: &Path, error: &io::Error) -> Error {
    let code = if error.kind() == ErrorKind::NotFound { Code::InvalidConfig } else { Code::Io };
    Error::new(code, format!("{} can't be read: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Directory;

    /// A directory with these files.
    fn directory(test: &str, files: &[(&str, &str)]) -> Directory {
        let dir = Directory::new(&format!("networks-{test}"));
        for (name, text) in files {
            let path = dir.join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, text).expect("a file");
        }
        dir
    }

    #[test]
    fn the_first_of_that_name_is_found_whatever_stands_before_it() {
        let text = "{ \"name\": \"istio-cni\", \"type\": \"detour\" }";
        let dir = directory(
            "named",
            &[
                ("00-broken.conf", "{"),
                ("05-number.json", "7"),
                ("10-other.conf", "{\"name\":\"other\",\"type\":\"bridge\"}"),
                ("20-it.conf", text),
                ("30-again.conf", "{\"name\":\"istio-cni\",\"type\":\"second\"}"),
                ("40-list.conflist", "{\"name\":\"list\",\"plugins\":[{\"type\":\"a\"}]}"),
                ("50-none.txt", "{\"name\":\"txt\",\"type\":\"a\"}"),
                ("60-no-type.conf", "{\"name\":\"no-type\"}"),
                ("deep.conf/x.conf", "{\"name\":\"deep\",\"type\":\"a\"}"),
            ],
        );
        let mut warnings = Vec::new();
        let found = named(&dir, "istio-cni", &mut warnings).expect("found");
        assert_eq!(found.text, text);
        assert!(warnings.len() == 1 && warnings[0].contains("00-broken.conf: it is not JSON"), "{warnings:?}");
        assert_eq!(named(&dir, "list", &mut warnings).expect("found").plugins.len(), 1);
        let error = named(&dir, "no-type", &mut warnings).expect_err("wrong");
        assert!(error.msg.contains("60-no-type.conf: it has neither type nor plugins"), "{error}");
        for name in ["txt", "deep", "absent"] {
            let error = named(&dir, name, &mut warnings).expect_err("none");
            assert_eq!(error.code, Code::InvalidConfig);
            let wanted = format!(
                "\"name\": {name:?} (*.conf, *.json, *.conflist); found: other, istio-cni, istio-cni, list, no-type"
            );
            assert!(error.msg.starts_with(&format!("{}: ", dir.display())) && error.msg.ends_with(&wanted), "{error}");
        }
        let error = named(&dir.join("absent"), "x", &mut warnings).expect_err("no directory");
        assert!(error.code == Code::InvalidConfig && error.msg.contains("can't be read"), "{error}");
    }

    #[test]
    fn a_path_is_a_file_or_the_first_file_of_a_directory() {
        let one = "{\"name\":\"one\",\"type\":\"a\"}";
        let dir = directory("at", &[("b.conf", one), ("c.conf", "{"), ("a.txt", "{")]);
        assert_eq!(at(&dir).expect("the first").text, one);
        assert_eq!(at(&dir.join("b.conf")).expect("the file").text, one);
        let error = at(&dir.join("c.conf")).expect_err("broken");
        assert!(error.code == Code::InvalidConfig && error.msg.contains("c.conf: it is not JSON"), "{error}");
        let empty = directory("at-empty", &[("a.txt", "")]);
        for absent in [&dir.join("absent.conf"), &*empty] {
            let error = at(absent).expect_err("absent");
            assert!(error.code == Code::TryAgain && error.msg.contains("is not there yet"), "{error}");
        }
    }

    #[test]
    fn a_list_has_the_plugins_of_the_directory_of_its_name() {
        let list = |more: &str| format!("{{\"name\":\"net\",{more}\"plugins\":[{{\"type\":\"a\"}}]}}");
        let (inline, both) = (list("\"loadOnlyInlinedPlugins\":true,"), list(""));
        let dir = directory(
            "beside",
            &[
                ("l.conflist", &both),
                ("inline.conflist", &inline),
                ("net/20.conf", "{\"type\":\"c\"}"),
                ("net/10.conf", "{\"type\":\"b\"}"),
                ("net/30.json", "{\"type\":\"d\"}"),
            ],
        );
        let types = |file: &str| at(&dir.join(file)).expect("a list").types().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(types("l.conflist"), ["a", "b", "c"]);
        assert_eq!(types("inline.conflist"), ["a"]);
        let kept = at(&dir.join("l.conflist")).expect("a list");
        assert_eq!(
            RunnableConfiguration::parse("P", &kept.text, None).expect("accepted").types().count(),
            3,
            "kept as it runs"
        );
    }
}
