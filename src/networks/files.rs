//! Configurations in files: those in `confDir`, and those that `clusterNetwork` and `defaultNetworks` name by path.

use super::configuration::{RunnableConfiguration, json};
use crate::cni::version::UNSTATED;
use crate::cni::{Block, Code, Error, has_only_inlined, is_identifier, wrong_type};
use crate::trusted_file::{self, read_text};
use serde_json::Value;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Extensions of configuration files (libcni's `ConfFiles`, as Multus calls it).
const EXTENSIONS: [&str; 3] = ["conf", "json", "conflist"];

/// The keys of a plugin that libcni itself reads (`pkg/types`, `PluginConf`).
const CHAINED_KEYS: &str =
    "cniVersion name type capabilities ipam dns runtimeConfig prevResult cni.dev/valid-attachments";

/// Limit of a configuration file, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Returns the first configuration with this `name` in `dir`, in the order of file names. An invalid file causes only a
/// warning, because it may belong to another network.
///
/// # Errors
/// [`Code::InvalidConfig`]: it is missing or invalid.
pub(super) fn named(dir: &Path, name: &str, warnings: &mut Vec<String>) -> Result<RunnableConfiguration, Error> {
    let (mut found, before) = (Vec::new(), warnings.len());
    for file in files(dir, &EXTENSIONS).map_err(|error| unread(dir, &error))? {
        let read = read_text(&file, MAX_BYTES).map_err(|error| unread(&file, &error));
        match read.and_then(|text| Ok((json(&shown(&file), &text)?, text))) {
            Err(error) => warnings.push(format!("{error}; skipped in the search for configuration {name:?}")),
            Ok((value, text)) if value["name"] == name => {
                return RunnableConfiguration::parse(&shown(&file), &text, None).map(|found| of_file(found, &file));
            }
            Ok((value, _)) => found.extend(value["name"].as_str().map(str::to_owned)),
        }
    }
    let found = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
    let msg = format!(
        "{}: no configuration with \"name\": {name:?} (*.conf, *.json, *.conflist); found: {found}",
        dir.display()
    );
    // One of the skipped files may contain it.
    Err(Error::new(Code::InvalidConfig, msg).with_details(warnings[before..].join("; ")))
}

/// Returns the configuration in the file `path` or, if it is a directory, in its first file. A configuration list is
/// extended with the files in the directory of its name beside it, unless `loadOnlyInlinedPlugins` is set (libcni,
/// `NetworkPluginConfsFromFiles`).
///
/// # Errors
/// [`Code::TryAgain`]: the file does not exist yet; [`Code::InvalidConfig`]: it is invalid.
pub(super) fn at(path: &Path) -> Result<RunnableConfiguration, Error> {
    let absent = |path: &Path| {
        let next = beside(path).map_or_else(
            || "the agent of the cluster's network writes it; check that its pod runs on this node".to_owned(),
            |list| format!("{} is beside it; name this file instead", list.display()),
        );
        Error::new(Code::TryAgain, format!("{} does not exist yet: {next}", path.display()))
    };
    let file = if path.is_dir() {
        let files = files(path, &EXTENSIONS).map_err(|error| unread(path, &error))?;
        files.into_iter().next().ok_or_else(|| absent(&path.join("*.conf, *.json or *.conflist")))?
    } else {
        path.to_owned()
    };
    let mut text = read_text(&file, MAX_BYTES).map_err(|error| match error.kind() {
        ErrorKind::NotFound => absent(&file),
        _ => unread(&file, &error),
    })?;
    let place = shown(&file);
    let mut value = json(&place, &text)?;
    if let Value::Object(list) = &mut value
        && list.get("type").is_none_or(|kind| kind == "")
        && !has_only_inlined(list)
        && let Some(name) = list.get("name").and_then(Value::as_str).filter(|name| is_identifier(name))
    {
        let more = plugins_in(&file.with_file_name(name))?;
        if !more.is_empty()
            && let Value::Array(plugins) = list.entry("plugins").or_insert_with(|| Value::Array(Vec::new()))
        {
            plugins.extend(more.into_iter().map(|(_, plugin)| plugin));
            text = value.to_string();
        }
    }
    Ok(of_file(RunnableConfiguration::parse(&place, &text, None)?, &file))
}

/// Returns the configuration list beside a single configuration that does not exist: a tool that chains its plugin replaces
/// one by the other.
#[must_use]
pub fn beside(path: &Path) -> Option<PathBuf> {
    let is_single = path.extension().is_some_and(|extension| extension == "conf" || extension == "json");
    Some(path.with_extension("conflist")).filter(|list| is_single && list.is_file())
}

/// Returns the plugins of Multus's auxiliary chain, each with its file and as a configuration of a single plugin with the
/// chain's name and `version`; none if the directory does not exist. Multus skips the whole chain if one file is invalid.
///
/// # Errors
/// [`Code::InvalidConfig`] or [`Code::Io`]: a file is invalid or can't be read.
pub fn auxiliary_chain(directory: &Path, version: &str) -> Result<Vec<(PathBuf, RunnableConfiguration)>, Error> {
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    let place = |error: Error| error.at("auxiliaryCNIChainName");
    let configuration = |(file, plugin): (PathBuf, Value)| {
        let configuration = chained_plugin(&shown(&file), &plugin, &name, version)?;
        Ok((file.clone(), of_file(configuration, &file)))
    };
    plugins_in(directory).map_err(place)?.into_iter().map(|plugin| configuration(plugin).map_err(place)).collect()
}

/// Checks a file of an auxiliary chain as libcni does (`libcni/conf.go`, `NetworkPluginConfFromBytes`).
///
/// # Errors
/// [`Code::InvalidConfig`]: Multus skips the whole chain because of this file.
pub fn check_chained_plugin(place: &str, text: &[u8]) -> Result<(), Error> {
    chained_plugin(place, &chained_json(place, text)?, "chain", UNSTATED).map(drop)
}

/// Parses a file of an auxiliary chain as Go's JSON parser, with which Multus reads it: invalid UTF-8 is replaced, and a
/// key in another case means the same. Of several, the last one counts.
fn chained_json(place: &str, text: &[u8]) -> Result<Value, Error> {
    let plugin = json(place, &String::from_utf8_lossy(text))?;
    let Value::Object(keys) = plugin else { return Ok(plugin) };
    let in_its_case = |key: String| {
        let known = CHAINED_KEYS.split(' ').find(|known| known.eq_ignore_ascii_case(&key));
        known.map(str::to_owned).unwrap_or(key)
    };
    Ok(keys.into_iter().map(|(key, value)| (in_its_case(key), value)).collect())
}

/// Returns a plugin of an auxiliary chain with the chain's name and version.
fn chained_plugin(place: &str, plugin: &Value, name: &str, version: &str) -> Result<RunnableConfiguration, Error> {
    let Some(keys) = plugin.as_object().filter(|keys| keys.get("type").is_some_and(|kind| kind != "")) else {
        let msg = format!("{place}: expected a JSON object with type: one plugin of the chain");
        return Err(Error::new(Code::InvalidConfig, msg));
    };
    let block = Block::new(place, plugin)?;
    for key in ["name", "cniVersion"] {
        block.reader().string(key)?;
    }
    let flag = |value: &Value| value.is_boolean() || value.is_null();
    let text = |value: &Value| value.is_string() || value.is_null();
    let texts = |value: &Value| value.is_null() || value.as_array().is_some_and(|all| all.iter().all(text));
    let attachment =
        |value: &Value| value.is_null() || (value.is_object() && text(&value["containerID"]) && text(&value["ifname"]));
    let capabilities = |value: &Value| value.as_object().is_some_and(|named| named.values().all(flag));
    let ipam = |value: &Value| value.is_object() && text(&value["type"]);
    let lists = ["nameservers", "search", "options"];
    let dns = |value: &Value| value.is_object() && text(&value["domain"]) && lists.iter().all(|key| texts(&value[key]));
    let attachments = |value: &Value| value.as_array().is_some_and(|all| all.iter().all(attachment));
    let checks = [
        ("capabilities", &capabilities as &dyn Fn(&Value) -> bool, "an object of true or false, by name"),
        ("ipam", &ipam, "an object whose type is a string"),
        ("dns", &dns, "an object with nameservers, search and options, lists of strings, and domain, a string"),
        ("prevResult", &Value::is_object, "an object"),
        ("cni.dev/valid-attachments", &attachments, "a list of objects with containerID and ifname, strings"),
    ];
    for (key, is_valid, expected) in checks {
        if let Some(other) = keys.get(key).filter(|value| !value.is_null() && !is_valid(value)) {
            return Err(wrong_type(&format!("{place}.{key}"), other, expected));
        }
    }
    let mut keys = keys.clone();
    keys.insert("name".to_owned(), name.into());
    keys.insert("cniVersion".to_owned(), version.into());
    keys.shift_remove("cniVersions");
    RunnableConfiguration::parse(place, &Value::Object(keys).to_string(), None)
}

/// Returns the plugins in a directory, each in a file `*.conf`, sorted by name.
fn plugins_in(dir: &Path) -> Result<Vec<(PathBuf, Value)>, Error> {
    let files = match files(dir, &["conf"]) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Vec::new()),
        files => files.map_err(|error| unread(dir, &error))?,
    };
    let plugin = |file: PathBuf| {
        let text = trusted_file::read(&file, MAX_BYTES).map_err(|error| unread(&file, &error))?;
        let plugin = chained_json(&shown(&file), &text)?;
        Ok((file, plugin))
    };
    files.into_iter().map(plugin).collect()
}

/// Returns the files with one of these extensions, sorted by name, without subdirectories. As in libcni (`ConfFiles`), a
/// symbolic link counts as a file, wherever it leads.
fn files(dir: &Path, extensions: &[&str]) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        let known = path.extension().is_some_and(|extension| extensions.iter().any(|known| extension == *known));
        if known && !entry.file_type()?.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the configuration, trusted as that of the node's administrator if only root can change its file.
fn of_file(configuration: RunnableConfiguration, file: &Path) -> RunnableConfiguration {
    RunnableConfiguration { trusted: trusted_file::check(file).is_ok(), ..configuration }
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

    /// Creates a directory with these files.
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
    fn the_first_configuration_of_that_name_is_found_after_invalid_files() {
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
        assert!(warnings.len() == 1 && warnings[0].contains("00-broken.conf: invalid JSON"), "{warnings:?}");
        assert_eq!(named(&dir, "list", &mut warnings).expect("found").plugins.len(), 1);
        let error = named(&dir, "no-type", &mut warnings).expect_err("wrong");
        assert!(error.msg.contains("60-no-type.conf: neither type nor plugins is set"), "{error}");
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
    fn a_path_is_a_file_or_a_directory_with_files() {
        let one = "{\"name\":\"one\",\"type\":\"a\"}";
        let dir = directory("at", &[("b.conf", one), ("c.conf", "{"), ("a.txt", "{")]);
        assert_eq!(at(&dir).expect("the first").text, one);
        assert_eq!(at(&dir.join("b.conf")).expect("the file").text, one);
        let error = at(&dir.join("c.conf")).expect_err("broken");
        assert!(error.code == Code::InvalidConfig && error.msg.contains("c.conf: invalid JSON"), "{error}");
        let empty = directory("at-empty", &[("a.txt", "")]);
        for absent in [&dir.join("absent.conf"), &*empty] {
            let error = at(absent).expect_err("absent");
            assert!(error.code == Code::TryAgain && error.msg.contains("does not exist yet"), "{error}");
        }
    }

    /// As Multus, which is written in Go, reads them.
    #[test]
    fn a_file_of_the_chain_with_keys_in_another_case_or_invalid_utf_8_is_accepted() {
        let dir = directory("chain", &[("10.conf", r#"{"TYPE": "upper", "Capabilities": {"dns": true}, "own": 1}"#)]);
        fs::write(dir.join("20.conf"), b"{\"type\": \"bytes\", \"x\": \"\xff\"}").expect("a file");
        let chain = auxiliary_chain(&dir, "1.0.0").expect("accepted");
        let types: Vec<&str> = chain.iter().flat_map(|(_, plugin)| plugin.types()).collect();
        assert_eq!(types, ["upper", "bytes"]);
        assert_eq!(chain[0].1.plugins[0].keys["capabilities"]["dns"], true);
        for (text, why) in [
            (&b"{\"TYPE\": 7}"[..], "f.type: invalid value 7"),
            (b"{\"type\": \"a\", \"IPAM\": 1}", "f.ipam: invalid value 1"),
            (b"{\"kind\": \"\xff\"}", "f: expected a JSON object with type: one plugin of the chain"),
        ] {
            assert!(check_chained_plugin("f", text).is_err_and(|error| error.msg.starts_with(why)), "{why}");
        }
    }

    #[test]
    fn a_list_is_extended_with_the_directory_of_its_name() {
        let list = |more: &str| format!("{{\"name\":\"net\",{more}\"plugins\":[{{\"type\":\"a\"}}]}}");
        let (inline, both) = (list("\"loadOnlyInlinedPlugins\":\"TRUE\","), list(""));
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
        let extended = at(&dir.join("l.conflist")).expect("a list");
        assert_eq!(
            RunnableConfiguration::parse("P", &extended.text, None).expect("accepted").types().count(),
            3,
            "its text has all plugins"
        );
    }
}
