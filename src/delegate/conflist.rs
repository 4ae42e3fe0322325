//! A network as it is written down: one plugin's configuration, or a list of plugins, inline or
//! with a directory of further ones (SPEC.md, "Configuration format").

use super::{Network, Plugin};
use crate::cni::{Block, Code, Error, Reader, is_identifier, version, wrong_type};
use serde_json::{Map, Value};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const BOOLEAN: &str = "true or false";

impl Network {
    /// A network from a configuration with a `type`, or with `plugins`. `place` is where it stands,
    /// for messages; `unnamed` is its name where it has none of its own.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`] with the key's path and what is accepted; a version that is no
    /// numbers is [`Code::Decode`].
    pub fn parse(conf: &Value, place: &str, unnamed: Option<&str>) -> Result<Self, Error> {
        let block = Block::new(place, conf)?;
        let network = understand(&block, unnamed)?;
        if network.plugins.is_empty() {
            let msg =
                format!("{}: it is missing; accepted: a list of plugins, or type", block.reader().place("plugins"));
            return Err(Error::new(Code::InvalidConfig, msg));
        }
        Ok(network)
    }

    /// A network from a file. A list is followed by the `*.conf` files in the directory beside it
    /// that has the network's name, in the order of theirs, unless it has
    /// `loadOnlyInlinedPlugins`.
    ///
    /// # Errors
    /// As [`Self::parse`]; [`Code::Io`]: a file or the directory can't be read; [`Code::Decode`]: a
    /// file is not JSON.
    pub fn read(file: &Path) -> Result<Self, Error> {
        let place = file.display().to_string();
        let block = Block::new(&place, &json(file)?)?;
        let mut network = understand(&block, None)?;
        if !is_single(&block.reader())? && !only_inlined(&block.reader())? {
            let directory = file.with_file_name(&network.name);
            for more in conf_files(&directory)? {
                network.plugins.push(plugin(more.display().to_string(), &json(&more)?)?);
            }
        }
        if network.plugins.is_empty() {
            let directory = file.with_file_name(&network.name);
            let msg = format!("{place}: it has no plugins, and {} has no *.conf files", directory.display());
            return Err(Error::new(Code::InvalidConfig, msg));
        }
        Ok(network)
    }
}

/// A network with those of its plugins that are written in `block` itself.
fn understand(block: &Block, unnamed: Option<&str>) -> Result<Network, Error> {
    let keys = block.reader();
    let name = keys.string("name")?.filter(|name| !name.is_empty()).or(unnamed).unwrap_or_default().to_owned();
    if !is_identifier(&name) {
        return Err(wrong_type(
            &keys.place("name"),
            &name.into(),
            "letters, digits, _ . -, the first a letter or digit",
        ));
    }
    let network = Network { name, cni_version: text(&keys, "cniVersion")?.to_owned(), ..Network::default() };
    if is_single(&keys)? {
        let whole = Value::Object(block.keys.clone());
        return Ok(Network { plugins: vec![plugin(block.path.clone(), &whole)?], ..network });
    }
    Ok(Network {
        cni_version: highest_version(&keys, network.cni_version)?,
        plugins: inlined(&keys)?,
        disable_check: flag(&keys, "disableCheck")?,
        disable_gc: flag(&keys, "disableGC")?,
        ..network
    })
}

/// Where there is a `type`, it is one plugin's, whatever else there is (Multus does so).
fn is_single(keys: &Reader<'_>) -> Result<bool, Error> {
    Ok(!text(keys, "type")?.is_empty())
}

fn text<'a>(keys: &Reader<'a>, key: &'static str) -> Result<&'a str, Error> {
    Ok(keys.string(key)?.unwrap_or_default())
}

fn inlined(keys: &Reader<'_>) -> Result<Vec<Plugin>, Error> {
    let accepted = "a list of plugins, at least one";
    match keys.value("plugins") {
        None if only_inlined(keys)? => {
            let msg = format!("{}: it is missing; with loadOnlyInlinedPlugins it must be there", keys.place("plugins"));
            Err(Error::new(Code::InvalidConfig, msg))
        }
        None => Ok(Vec::new()),
        Some(Value::Array(items)) if !items.is_empty() => {
            let place = |index| format!("{}[{index}]", keys.place("plugins"));
            items.iter().enumerate().map(|(index, item)| plugin(place(index), item)).collect()
        }
        Some(other) => Err(wrong_type(&keys.place("plugins"), other, accepted)),
    }
}

fn plugin(path: String, conf: &Value) -> Result<Plugin, Error> {
    let block = Block::new(path, conf)?;
    let keys = block.reader();
    let kind = text(&keys, "type")?.to_owned();
    if kind.is_empty() {
        let msg = format!("{}: it is missing; accepted: the name of a plugin", keys.place("type"));
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    Ok(Plugin { kind, path: block.path, conf: block.keys })
}

/// The highest of `cniVersions` and `cniVersion` that is spoken here (SPEC.md, "Configuration
/// format": higher ones are for other runtimes).
fn highest_version(keys: &Reader<'_>, stated: String) -> Result<String, Error> {
    let listed = match keys.value("cniVersions") {
        None => return Ok(stated),
        Some(Value::Array(listed)) => listed,
        Some(other) => return Err(wrong_type(&keys.place("cniVersions"), other, "a list of versions")),
    };
    let newest = version::numbers(version::NEWEST)?;
    let mut spoken = Vec::new();
    for (index, item) in listed.iter().enumerate() {
        let place = || format!("{}[{index}]", keys.place("cniVersions"));
        let version = item.as_str().ok_or_else(|| wrong_type(&place(), item, "a version, as \"1.0.0\""))?;
        spoken.push((version::numbers(version)?, version));
    }
    if !stated.is_empty() {
        spoken.push((version::numbers(&stated)?, &stated));
    }
    let highest = spoken.into_iter().filter(|(numbers, _)| *numbers <= newest).max();
    Ok(highest.map_or_else(|| stated.clone(), |(_, version)| version.to_owned()))
}

fn only_inlined(keys: &Reader<'_>) -> Result<bool, Error> {
    flag(keys, "loadOnlyInlinedPlugins")
}

/// A boolean, or one in quotes (reference library, `libcni/conf.go`).
fn flag(keys: &Reader<'_>, key: &'static str) -> Result<bool, Error> {
    match keys.value(key) {
        None => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(Value::String(word)) if word.eq_ignore_ascii_case("true") => Ok(true),
        Some(Value::String(word)) if word.eq_ignore_ascii_case("false") => Ok(false),
        Some(other) => Err(wrong_type(&keys.place(key), other, BOOLEAN)),
    }
}

fn json(file: &Path) -> Result<Value, Error> {
    let text = fs::read(file)
        .map_err(|error| Error::new(Code::Io, format!("{}: it can't be read: {error}", file.display())))?;
    let keys: Map<String, Value> = serde_json::from_slice(&text)
        .map_err(|error| Error::new(Code::Decode, format!("{}: it is not a JSON object: {error}", file.display())))?;
    Ok(keys.into())
}

/// The `*.conf` files of a directory that may be missing, in the order of their names.
fn conf_files(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            return Err(Error::new(Code::Io, format!("{}: it can't be read: {error}", directory.display())));
        }
    };
    let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    let mut files: Vec<_> = paths.filter(|path| path.extension() == Some("conf".as_ref()) && !path.is_dir()).collect();
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(conf: &Value) -> Result<Network, Error> {
        Network::parse(conf, "delegates[0]", None)
    }

    fn kinds(network: &Network) -> Vec<&str> {
        network.plugins.iter().map(|plugin| plugin.kind.as_str()).collect()
    }

    #[test]
    fn one_plugin_or_a_list() {
        let single = json!({"cniVersion": "1.0.0", "name": "n", "type": "a", "x": 1});
        let network = parse(&single).expect("accepted");
        assert_eq!((network.name.as_str(), network.cni_version.as_str(), kinds(&network)), ("n", "1.0.0", vec!["a"]));
        assert_eq!(Value::Object(network.plugins[0].conf.clone()), single);
        let list = json!({"name": "n", "disableCheck": true, "disableGC": "True", "plugins": [{"type": "a"}, {"type": "b", "x": 1}]});
        let network = parse(&list).expect("accepted");
        assert_eq!((network.cni_version.as_str(), kinds(&network)), ("", vec!["a", "b"]));
        assert_eq!(Value::Object(network.plugins[1].conf.clone()), list["plugins"][1]);
        assert_eq!(network.plugins[1].path, "delegates[0].plugins[1]");
        assert!(network.disable_check && network.disable_gc);
    }

    #[test]
    fn a_name_of_its_own_wins() {
        let named = |conf: Value| Network::parse(&conf, "x", Some("nad")).expect("accepted").name;
        assert_eq!(named(json!({"name": "n", "type": "a"})), "n");
        assert_eq!(named(json!({"name": "", "type": "a"})), "nad");
        assert_eq!(named(json!({"type": "a"})), "nad");
    }

    #[test]
    fn the_highest_version_that_is_spoken_here() {
        let version = |stated: Value, listed: Value| {
            let conf = json!({"name": "n", "cniVersion": stated, "cniVersions": listed, "plugins": [{"type": "a"}]});
            parse(&conf).expect("accepted").cni_version
        };
        assert_eq!(version(json!("0.4.0"), json!(["0.3.1", "1.0.0", "9.0.0"])), "1.0.0");
        assert_eq!(version(json!("1.1.0"), json!(["9.0.0", "0.3.1"])), "1.1.0");
        assert_eq!(version(Value::Null, json!(["0.3.1", "9.0.0", "0.10.0"])), "0.10.0");
        assert_eq!(version(json!("9.0.0"), json!([])), "9.0.0");
        assert_eq!(version(json!("0.4.0"), Value::Null), "0.4.0");
    }

    #[test]
    fn errors_name_the_key() {
        for (conf, wanted) in [
            (json!([]), "delegates[0]: [] is not accepted"),
            (json!({"type": "a"}), r#"delegates[0].name: "" is not accepted"#),
            (json!({"name": "a/b", "type": "a"}), r#"delegates[0].name: "a/b" is not accepted"#),
            (json!({"name": "n"}), "delegates[0].plugins: it is missing; accepted: a list of plugins, or type"),
            (json!({"name": "n", "loadOnlyInlinedPlugins": true}), "delegates[0].plugins: it is missing; with"),
            (json!({"name": "n", "plugins": []}), "delegates[0].plugins: [] is not accepted"),
            (json!({"name": "n", "plugins": [{"type": "a"}, {}]}), "delegates[0].plugins[1].type: it is missing"),
            (json!({"name": "n", "plugins": ["a"]}), r#"delegates[0].plugins[0]: "a" is not accepted"#),
            (json!({"name": "n", "plugins": [{"type": 1}]}), "delegates[0].plugins[0].type: 1 is not accepted"),
            (json!({"name": "n", "disableGC": "no", "plugins": [{"type": "a"}]}), r#"delegates[0].disableGC: "no""#),
            (json!({"name": "n", "cniVersions": "1.0.0", "plugins": [{"type": "a"}]}), "delegates[0].cniVersions: "),
            (json!({"name": "n", "cniVersions": [1], "plugins": [{"type": "a"}]}), "delegates[0].cniVersions[0]: 1"),
        ] {
            let error = parse(&conf).expect_err("refused");
            assert_eq!(error.code, Code::InvalidConfig, "{error}");
            assert!(error.msg.starts_with(wanted), "{error}");
        }
    }

    #[test]
    fn files_of_the_networks_directory_follow() {
        let root = std::env::temp_dir().join(format!("detour-conflist-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        fs::create_dir_all(root.join("n").join("30.conf")).expect("a directory");
        let write = |name: &str, conf: Value| fs::write(root.join(name), conf.to_string()).expect("writable");
        let list = root.join("10-n.conflist");
        write("10-n.conflist", json!({"name": "n", "plugins": [{"type": "a"}]}));
        write("n/20.conf", json!({"type": "c"}));
        write("n/10.conf", json!({"type": "b"}));
        write("n/10.json", json!({"type": "x"}));
        assert_eq!(kinds(&Network::read(&list).expect("accepted")), ["a", "b", "c"]);
        write("10-n.conflist", json!({"name": "n"}));
        assert_eq!(kinds(&Network::read(&list).expect("accepted")), ["b", "c"]);
        write("10-n.conflist", json!({"name": "n", "loadOnlyInlinedPlugins": true, "plugins": [{"type": "a"}]}));
        assert_eq!(kinds(&Network::read(&list).expect("accepted")), ["a"]);
        write("10-n.conflist", json!({"name": "n", "type": "a"}));
        assert_eq!(kinds(&Network::read(&list).expect("accepted")), ["a"]);
        write("10-n.conflist", json!({"name": "m"}));
        assert_eq!(Network::read(&list).map_err(|error| error.code), Err(Code::InvalidConfig));
        fs::write(root.join("n/10.conf"), "{").expect("writable");
        write("10-n.conflist", json!({"name": "n"}));
        let error = Network::read(&list).expect_err("refused");
        assert!(error.code == Code::Decode && error.msg.contains("n/10.conf"), "{error}");
        assert_eq!(Network::read(&root.join("none")).map_err(|error| error.code), Err(Code::Io));
        fs::remove_dir_all(&root).expect("removable");
    }
}
