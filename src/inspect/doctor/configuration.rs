//! The configuration by which runtimes, or Multus, call the plugin.
//!
//! The node configuration, which the plugin reads at every call, and what it makes of other configurations.

use super::report::CheckGroup;
use super::report::CheckTarget;
use super::report::{Check, CheckVerdict, Results};
use crate::cni::{Error, NODE_CONFIGURATION, NetConf, NodeConf, OWN_TYPES, configuration};
use crate::host_path::HostPath;
use crate::plugin::{node, validate};
use crate::trusted_file::read_nofollow;
use serde_json::Value;
use std::fs;
use std::path::Path;

pub(super) const PRESENT: Check =
    Check::of(CheckGroup::Node, "configuration-present", "a configuration calls the program");
pub(super) const VALID: Check = Check::of(CheckGroup::Node, "configuration-valid", "the plugin accepts it");
pub(super) const PICKED: Check = Check::of(CheckGroup::Node, "configuration-picked", "runtimes find it");
pub(super) const AMBIENT: Check = Check::of(CheckGroup::Node, "ambient", "nothing is asked for that is not done");
/// All of them.
pub(super) const ALL: [&Check; 4] = [&PRESENT, &VALID, &PICKED, &AMBIENT];

/// A configuration is larger only by mistake.
const LARGEST: u64 = 1 << 20;
const INSTALL: &str =
    "detour install writes it (see detour install --help), or see why the agent on this node does not";

/// A configuration with a plugin of ours.
#[derive(Debug, Clone)]
pub(super) struct Configured {
    pub(super) path: HostPath,
    pub(super) text: String,
    pub(super) conf: NetConf,
}

/// A file that runtimes look at.
struct RuntimeFile {
    path: HostPath,
    text: String,
    json: Result<Value, String>,
}

impl RuntimeFile {
    fn plugins(&self) -> Vec<&Value> {
        let Ok(json) = &self.json else { return Vec::new() };
        json["plugins"].as_array().map_or_else(|| vec![json], |plugins| plugins.iter().collect())
    }

    fn types(&self) -> Vec<&str> {
        self.plugins().iter().filter_map(|plugin| plugin["type"].as_str()).collect()
    }

    fn is_ours(&self) -> bool {
        self.types().iter().any(|kind| OWN_TYPES.contains(kind))
    }

    /// What Multus and the runtime itself pass over when they look for the cluster network.
    fn is_other(&self) -> bool {
        self.types().iter().all(|kind| ["loopback", "multus", "multus-shim"].contains(kind))
    }
}

/// Looks for it, and at it. The configurations that are ours and valid.
pub(super) fn examine(case: &CheckTarget, checkup: &mut Results) -> Vec<Configured> {
    let files = match files(case) {
        Ok(files) => files,
        Err(why) => {
            checkup.add(&PRESENT, CheckVerdict::fail(format!("{} can't be read: {why}", case.conf), INSTALL));
            for check in [&VALID, &PICKED, &AMBIENT] {
                checkup.after(&[&PRESENT], check, || CheckVerdict::pass(""));
            }
            return Vec::new();
        }
    };
    let ours: Vec<&RuntimeFile> = files.iter().filter(|file| file.is_ours()).collect();
    let (mut valid, mut wrong) = (Vec::new(), Vec::new());
    for RuntimeFile { path, text, .. } in &ours {
        let effective = effective(case, path.as_path(), text);
        match effective.and_then(|conf| accepted(&conf).map(|()| conf)) {
            Ok(conf) => valid.push(Configured { path: path.clone(), text: text.clone(), conf }),
            Err(error) => wrong.push(error.to_string()),
        }
    }
    checkup.add(&PRESENT, present(case, &files, &ours));
    checkup.after(&[&PRESENT], &VALID, || match wrong.is_empty() {
        true => CheckVerdict::pass(valid.iter().map(described).collect::<Vec<_>>().join("; ")),
        false => {
            CheckVerdict::fail(wrong.join("; "), "correct the key that is named, or install again: detour install")
        }
    });
    checkup.after(&[&PRESENT, &VALID], &PICKED, || picked(case, &files, &valid));
    checkup.after(&[&PRESENT, &VALID], &AMBIENT, || {
        match valid.iter().find(|configured| configured.conf.ambient_enabled) {
            Some(Configured { path, .. }) => CheckVerdict::fail(
                format!("{path}: ambient_enabled is true, and pods without a sidecar get nothing"),
                "run istio-cni itself for ambient mode, and take ambient_enabled out of this configuration",
            ),
            None => CheckVerdict::pass("ambient mode is off"),
        }
    });
    valid
}

/// Whether an ADD would accept it. An ADD does not fail for the log file, and executables are another check.
fn accepted(conf: &NetConf) -> Result<(), Error> {
    validate(&NetConf { log_file: None, ..conf.clone() }, &|_| Some(true)).map(drop)
}

fn described(configured: &Configured) -> String {
    let Configured { path, conf, .. } = configured;
    let chain: Vec<&str> = conf.chain.iter().filter_map(|block| block.keys.get("type")?.as_str()).collect();
    let role = if conf.primary.is_some() { ", as the primary plugin" } else { "" };
    format!("network {}, type {} in {}{role}: {}", conf.name, conf.kind, path.name(), chain.join(", "))
}

fn present(case: &CheckTarget, files: &[RuntimeFile], ours: &[&RuntimeFile]) -> CheckVerdict {
    if !ours.is_empty() {
        return CheckVerdict::pass(ours.iter().map(|file| file.path.to_string()).collect::<Vec<_>>().join(", "));
    }
    let broken = files.iter().filter_map(|file| Some(format!("{}: {}", file.path, file.json.as_ref().err()?)));
    let broken: Vec<String> = broken.collect();
    let own = OWN_TYPES.join(", ");
    match broken.is_empty() {
        true => {
            let names: Vec<String> = files.iter().map(|file| file.path.name()).collect();
            let names = if names.is_empty() { "it has no configuration".to_owned() } else { names.join(", ") };
            CheckVerdict::fail(format!("{}: no plugin of type {own}; found: {names}", case.conf), INSTALL)
        }
        false => CheckVerdict::fail(
            format!("no plugin of type {own}, and what can't be read: {}", broken.join("; ")),
            "correct the file, or install again: detour install",
        ),
    }
}

/// Runtimes take the first file by name (libcni, `LoadConfList` of `ConfFiles`); an attachment is found
/// by its name.
fn picked(case: &CheckTarget, files: &[RuntimeFile], ours: &[Configured]) -> CheckVerdict {
    let is_primary = ours.iter().any(|configured| configured.conf.primary.is_some());
    if !case.chained && !is_primary {
        let names: Vec<&str> = ours.iter().map(|configured| configured.conf.name.as_str()).collect();
        return CheckVerdict::pass(format!("Multus finds it by its name, {}", names.join(", ")));
    }
    let first = files.iter().find(|file| file.json.is_ok() && !file.is_other());
    match first {
        Some(file) if file.is_ours() => CheckVerdict::pass(format!("{} is the first file", file.path.name())),
        Some(file) => CheckVerdict::fail(
            format!(
                "runtimes take {}, whose plugins are {}; ours is in {}",
                file.path.name(),
                file.types().join(", "),
                ours.iter().map(|configured| configured.path.name()).collect::<Vec<_>>().join(", ")
            ),
            format!("install into that list: detour install --chained=true --conf-name {}", file.path.name()),
        ),
        None => CheckVerdict::not_checked("no file of the directory is a configuration of pods' networks"),
    }
}

/// The files that runtimes look at (libcni, `ConfFiles`), in the order of their names, or the one
/// that was named.
fn files(case: &CheckTarget) -> Result<Vec<RuntimeFile>, String> {
    let reached = case.reach(&case.conf).map_err(|why| why.to_string())?;
    if reached.is_file() {
        return Ok(vec![read(case.conf.clone(), &reached)]);
    }
    let entries = fs::read_dir(&reached).map_err(|why| why.to_string())?;
    let mut names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| [".conf", ".conflist", ".json"].iter().any(|end| name.ends_with(end)));
    names.sort();
    let file = |name: &String| {
        let path = case.conf.join(name);
        let reached = case.reach(&path).map_err(|why| format!("{path}: {why}"))?;
        Ok(read(path, &reached))
    };
    names.iter().map(file).collect()
}

/// One that can't be read is passed over by runtimes as one is that is not JSON.
fn read(path: HostPath, reached: &Path) -> RuntimeFile {
    let (text, json) = match read_nofollow(reached, LARGEST) {
        Err(why) => (String::new(), Err(format!("it can't be read: {why}"))),
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let json = serde_json::from_str(&text).map_err(|why| format!("it is not JSON: {why}"));
            (text, json)
        }
    };
    RuntimeFile { path, text, json }
}

pub(super) const NODE_CONFIGURATION_VALID: Check =
    Check::of(CheckGroup::Node, "node-configuration", "only root can change it, and it is valid");

/// Reads it as the plugin does.
pub(super) fn examine_node_configuration(case: &CheckTarget, checkup: &mut Results) {
    let verdict = match read_node_configuration(case) {
        Ok(Some((node, warnings))) => {
            let stated = format!("{NODE_CONFIGURATION} states {}", node.summary());
            CheckVerdict::pass([vec![stated], warnings].concat().join("; "))
        }
        Ok(None) => CheckVerdict::NotChecked(
            format!("{NODE_CONFIGURATION} does not exist: attachments set the node's keys themselves"),
            Some("detour install writes it".to_owned()),
        ),
        Err(why) => CheckVerdict::fail(why, "correct it, or remove it and install again: detour install"),
    };
    checkup.add(&NODE_CONFIGURATION_VALID, verdict);
}

fn read_node_configuration(case: &CheckTarget) -> Result<Option<(NodeConf, Vec<String>)>, String> {
    let path =
        case.reach_named(NODE_CONFIGURATION.as_ref()).map_err(|error| format!("{NODE_CONFIGURATION}: {error}"))?;
    node::read(NODE_CONFIGURATION, &path).map_err(|error| error.msg)
}

/// An attachment's configuration as the plugin understands it on this node.
///
/// # Errors
/// As [`configuration`].
pub(super) fn effective(case: &CheckTarget, place: &Path, text: &str) -> Result<NetConf, Error> {
    let govern = || {
        let (node, _) = read_node_configuration(case).ok()??;
        let value = serde_json::from_str(text).ok()?;
        // The runtime's own configuration of a primary plugin stays as it is.
        let (value, _) = node.govern_all(&value, &|kind| OWN_TYPES.contains(&kind)).ok()??;
        Some(value.to_string())
    };
    configuration(place, govern().as_deref().unwrap_or(text).as_bytes())
}
