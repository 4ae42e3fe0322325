//! Checks of the configuration with which runtimes or Multus call the plugin, of the own list, of Multus's auxiliary
//! chain, and of the node configuration.

use super::checks;
use super::report::{CheckTarget, CheckVerdict, MultusChain, OwnList, Results};
use crate::cni::{
    Error, GROUP_FILE, NODE_CONFIGURATION, NetConf, NodeConf, ONLY_INLINED, OWN_TYPES, is_configuration_file,
};
use crate::host_path::HostPath;
use crate::inspect::subject::AppliedConf;
use crate::inspect::terminal::joined;
use crate::inspect::validate::is_program;
use crate::plugin::{TargetNode, node, validate};
use crate::trusted_file::{self, names_in, read_nofollow};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// The maximum size of a configuration file, in bytes.
const MAX_FILE: u64 = 1 << 20;
const INSTALL: &str =
    "run detour install (see detour install --help), or check why the agent on this node does not write it";

/// The next step if an own list is missing, damaged or outdated.
const WRITE_OWN_LIST: &str =
    "check why the agent on this node does not write the own list again, or run detour install again";
/// What Cilium adds to the names of other configuration lists.
const RENAMED: &str = ".cilium_bak";
const CILIUM: &str = "set the Helm value cni.exclusive of Cilium to false: otherwise, Cilium renames the \
    configuration lists of other tools";
/// How long a difference must last to be a failure: the agent follows a change within this time.
const SETTLING: Duration = Duration::from_secs(2);

/// A valid configuration of this plugin.
#[derive(Debug, Clone)]
pub(super) struct Configured {
    pub(super) path: HostPath,
    pub(super) applied: AppliedConf,
    /// Whether it is an entry of a configuration list.
    pub(super) is_listed: bool,
}

impl Configured {
    /// Whether `place` is its file or its directory.
    pub(super) fn is_in(&self, place: &HostPath) -> bool {
        self.path == *place || self.path.parent() == *place
    }
}

/// A configuration file that runtimes read.
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
        self.plugins().into_iter().filter_map(|plugin| plugin["type"].as_str()).collect()
    }

    fn is_ours(&self) -> bool {
        self.plugins().iter().any(|plugin| plugin["type"].as_str().is_some_and(|kind| OWN_TYPES.contains(&kind)))
    }

    /// Returns the text of this plugin's configuration. In a configuration list with an entry of type `kind`, which the
    /// installation record names, only this entry is one: Istio's CNI plugin can have an entry there too.
    fn own_text(&self, kind: Option<&String>) -> String {
        let entry = |kind: &String| {
            let mut list = self.json.as_ref().ok()?.clone();
            let plugins = list.get_mut("plugins")?.as_array_mut()?;
            plugins.retain(|plugin| plugin["type"] == kind.as_str());
            (!plugins.is_empty()).then(|| list.to_string())
        };
        kind.and_then(entry).unwrap_or_else(|| self.text.clone())
    }

    /// Whether the file only has plugins that Multus and runtimes skip when they look for the cluster network.
    fn is_other(&self) -> bool {
        self.types().iter().all(|kind| ["loopback", "multus", "multus-shim"].contains(kind))
    }

    /// Returns the types of the plugins in Multus's copy of the cluster network; `None` without a copy.
    fn embedded_types(&self) -> Option<Vec<&str>> {
        let multus = self.plugins().first().copied().filter(|_| self.is_multus())?;
        let copy =
            multus["delegates"].get(0).filter(|_| multus["clusterNetwork"].as_str().is_none_or(str::is_empty))?;
        let plugins = copy["plugins"].as_array().map_or(std::slice::from_ref(copy), Vec::as_slice);
        Some(plugins.iter().filter_map(|plugin| plugin["type"].as_str()).collect())
    }

    /// Whether the file configures Multus, which runs the cluster network itself.
    fn is_multus(&self) -> bool {
        self.types().first().is_some_and(|kind| ["multus", "multus-shim"].contains(kind))
    }
}

/// Runs the checks. Returns the valid configurations of this plugin.
pub(super) fn examine(target: &CheckTarget, results: &mut Results) -> Vec<Configured> {
    let files = match runtime_files(target, &target.conf) {
        Ok(files) => files,
        Err(why) => {
            results.add(
                checks::CONFIGURATION_PRESENT,
                CheckVerdict::fail(format!("can't read {}: {why}", target.conf), INSTALL),
            );
            for check in [checks::CONFIGURATION_VALID, checks::CONFIGURATION_PICKED] {
                results.run(check, || CheckVerdict::not_checked("no configuration is known"));
            }
            return Vec::new();
        }
    };
    // They may be missing here.
    let elsewhere: Vec<_> = target
        .other_conf_dirs
        .iter()
        .flat_map(|directory| runtime_files(target, directory).unwrap_or_default())
        .collect();
    // Entries in the source of an own list are those of other tools.
    let is_source = |file: &RuntimeFile| {
        let mut own_lists = target.installation.own_lists.iter();
        own_lists.any(|(path, list)| file.path == path.parent().join(&list.source))
    };
    let is_ours = |file: &&RuntimeFile| file.is_ours() && !is_source(file);
    let ours: Vec<&RuntimeFile> = files.iter().chain(&elsewhere).filter(is_ours).collect();
    let (mut valid, mut wrong) = (Vec::new(), Vec::new());
    let node = read_node_configuration(target).ok().flatten().map(|(node, _)| node);
    for file in &ours {
        let path = &file.path;
        let text = file.own_text(target.installation.listed_types.get(path));
        let in_chain = target.is_in_multus_chain(path);
        let applied = AppliedConf::installed(&path.to_string(), &text, in_chain, node.as_ref());
        match applied.and_then(|applied| accepted(target, &applied.conf).map(|()| applied)) {
            Ok(applied) => {
                let is_listed = file.json.as_ref().is_ok_and(|json| json["plugins"].is_array());
                valid.push(Configured { path: path.clone(), applied, is_listed });
            }
            Err(error) => wrong.push(error.to_string()),
        }
    }
    results.add(checks::CONFIGURATION_PRESENT, present(target, &files, &ours));
    results.run(checks::CONFIGURATION_VALID, || {
        let wrong = wrong
            .iter()
            .map(|why| CheckVerdict::fail(why.as_str(), "correct the named key, or run detour install again"));
        CheckVerdict::merged(wrong.chain(valid.iter().map(supported)))
    });
    results.run(checks::CONFIGURATION_PICKED, || picked(target, &files, &valid));
    valid
}

/// Checks what an ADD would reject. The log file is no reason for a refusal.
fn accepted(target: &CheckTarget, conf: &NetConf) -> Result<(), Error> {
    let groups = target.reach_named(GROUP_FILE.as_ref()).ok().filter(|path| path.is_file());
    let is_installed = |conf: &NetConf, kind: &str| {
        let own = conf.kubernetes.cni_bin_dir.as_ref().map(|directory| target.reach_named(directory));
        let directories = target.bin_dirs.iter().map(|directory| target.reach(directory)).chain(own);
        is_program(directories.map(Result::unwrap_or_default), kind)
    };
    let node = TargetNode { is_installed: &is_installed, group_file: groups.as_deref(), may_name_source: false };
    validate(&NetConf { log_file: None, ..conf.clone() }, node).map(drop)
}

fn supported(configured: &Configured) -> CheckVerdict {
    match configured.applied.conf.redirects_ambient {
        true => CheckVerdict::fail(
            format!(
                "{}: ambient_enabled is true, but detour does not redirect pods of the ambient mesh",
                configured.path
            ),
            "run istio-cni for these pods, and remove ambient_enabled or istio-redirect from this configuration",
        ),
        false => CheckVerdict::pass(described(configured)),
    }
}

fn described(configured: &Configured) -> String {
    let (path, conf) = (&configured.path, &configured.applied.conf);
    let chain: Vec<&str> = conf.chain.iter().filter_map(|block| block.keys.get("type")?.as_str()).collect();
    let role = if conf.primary.is_some() { ", as the primary plugin" } else { "" };
    format!("network {}, type {} in {}{role}: {}", conf.name, conf.kind, path.name(), chain.join(", "))
}

fn present(target: &CheckTarget, files: &[RuntimeFile], ours: &[&RuntimeFile]) -> CheckVerdict {
    if !ours.is_empty() {
        return CheckVerdict::pass(joined(ours.iter().map(|file| &file.path)));
    }
    let missing = target.installation.own_lists.keys().find(|path| !files.iter().any(|file| file.path == **path));
    if let Some(path) = missing {
        return lost(target, path);
    }
    let broken = files.iter().filter_map(|file| Some(format!("{}: {}", file.path, file.json.as_ref().err()?)));
    let broken: Vec<String> = broken.collect();
    let own = OWN_TYPES.join(" or ");
    match broken.is_empty() {
        true => {
            let names = joined(files.iter().map(|file| file.path.name()));
            let names = if names.is_empty() { "no configuration" } else { &names };
            CheckVerdict::fail(format!("{}: expected a plugin of type {own}, got {names}", target.conf), INSTALL)
        }
        false => CheckVerdict::fail(
            format!("no plugin of type {own}; unusable files: {}", broken.join("; ")),
            "correct the file, or run detour install again",
        ),
    }
}

/// Returns the verdict about a missing own list: without it, runtimes use the cluster network's list, which does not call
/// the plugin.
fn lost(target: &CheckTarget, path: &HostPath) -> CheckVerdict {
    let renamed = format!("{}{RENAMED}", path.name());
    let reached = target.reach(&path.parent().join(&renamed));
    match reached.is_ok_and(|reached| fs::symlink_metadata(reached).is_ok()) {
        true => CheckVerdict::fail(format!("{path} not found; another process renamed it to {renamed}"), CILIUM),
        false => CheckVerdict::fail(format!("{path} not found"), WRITE_OWN_LIST),
    }
}

/// Checks whether runtimes use the configuration: they take the first file by name (libcni, `LoadConfList` of
/// `ConfFiles`). Multus finds an attachment by its network's name.
fn picked(target: &CheckTarget, files: &[RuntimeFile], ours: &[Configured]) -> CheckVerdict {
    let is_primary = ours.iter().any(|configured| configured.applied.conf.primary.is_some());
    if !target.chained && !is_primary {
        let names = joined(ours.iter().map(|configured| &configured.applied.conf.name));
        return CheckVerdict::pass(format!("Multus finds it by its network name, {names}"));
    }
    let used = files.iter().find(|file| file.json.is_ok());
    let embedded = used.and_then(|file| Some((&file.path, file.embedded_types()?)));
    if let Some((path, types)) = embedded.filter(|(_, types)| !types.iter().any(|kind| OWN_TYPES.contains(kind))) {
        return CheckVerdict::fail(
            format!(
                "Multus calls the copy of the cluster network's list in the key delegates of {}, whose plugins are {}",
                path.name(),
                joined(types)
            ),
            "restart Multus, which then copies the list with detour, or replace delegates by \"clusterNetwork\" and the \
             path of the list",
        );
    }
    let first = files.iter().find(|file| file.json.is_ok() && !file.is_other());
    match first {
        Some(file) if file.is_ours() => CheckVerdict::pass(format!("{} is the first file", file.path.name())),
        Some(file) => CheckVerdict::fail(
            format!(
                "runtimes use {}, whose plugins are {}; detour is in {}",
                file.path.name(),
                joined(file.types()),
                joined(ours.iter().map(|configured| configured.path.name()))
            ),
            match target.installation.own_lists.is_empty() {
                true => format!(
                    "add detour to that configuration list: detour install --chained=true --conf-name {}",
                    file.path.name()
                ),
                false => {
                    "check why the agent on this node does not add detour to that list, or run detour install again"
                        .to_owned()
                }
            },
        ),
        None => CheckVerdict::not_checked("the directory has no configuration of a cluster network"),
    }
}

/// Returns the files that runtimes read (libcni, `ConfFiles`), in the order of their names, or the one that the user
/// named.
fn runtime_files(target: &CheckTarget, conf: &HostPath) -> Result<Vec<RuntimeFile>, String> {
    let reached = target.reach(conf).map_err(|why| why.to_string())?;
    if reached.is_file() {
        return Ok(vec![read(conf.clone(), &reached)]);
    }
    let mut names = names_in(&reached).map_err(|why| why.to_string())?;
    names.retain(|name| is_configuration_file(name));
    let file = |name: &String| {
        let path = conf.join(name);
        let reached = target.reach(&path).map_err(|why| format!("{path}: {why}"))?;
        Ok(read(path, &reached))
    };
    names.iter().map(file).collect()
}

/// Reads a file. Runtimes skip a file that can't be read, or is not JSON.
fn read(path: HostPath, reached: &Path) -> RuntimeFile {
    let text = read_nofollow(reached, MAX_FILE).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let json = match &text {
        Ok(text) => serde_json::from_str(text).map_err(|why| format!("invalid JSON: {why}")),
        Err(why) => Err(format!("can't read the file: {why}")),
    };
    RuntimeFile { path, text: text.unwrap_or_default(), json }
}

/// Checks each own list: the copy of the cluster network's configuration list with the plugin's entry, which runtimes use
/// instead of it. Nodes without an own list have no such check.
pub(super) fn examine_own_lists(target: &CheckTarget, results: &mut Results) {
    for (path, list) in &target.installation.own_lists {
        results.run(checks::OWN_LIST, || CheckVerdict::settled(SETTLING, || own_list(target, path, list)));
    }
}

fn own_list(target: &CheckTarget, path: &HostPath, OwnList { source, kind }: &OwnList) -> CheckVerdict {
    const WAIT: &str = "check the pods of the cluster network on this node, which write that list; until then, pods start \
        with the last copy";
    let directory = path.parent();
    let files = match runtime_files(target, &directory) {
        Ok(files) => files,
        Err(why) => return CheckVerdict::not_checked(format!("can't read {directory}: {why}")),
    };
    let named = |name: &str| files.iter().find(|file| file.path.name() == name);
    let Some(own) = named(&path.name()) else { return lost(target, path) };
    if let Some(multus) = files.iter().find(|file| file.is_multus()) {
        return CheckVerdict::fail(
            format!("{} is a configuration of Multus, which {} bypasses", multus.path.name(), path.name()),
            "check why the agent on this node does not replace the own list by an entry in the cluster network's list, or \
             run detour install again",
        );
    }
    let Some(original) = named(source) else {
        return CheckVerdict::fail(format!("{path} is a copy of {source}, which was removed"), WAIT);
    };
    let untrusted = target.reach(&original.path).ok().and_then(|reached| trusted_file::check(&reached).err());
    if let Some(error) = untrusted.filter(|error| !error.is_not_found()) {
        return CheckVerdict::fail(
            format!("{path} is a copy of {source}, which another user can change: {}", error.below(&target.mount)),
            "correct the owner or the mode; until then, the agent does not copy changes of that list",
        );
    }
    match (contents(own, kind), contents(original, kind)) {
        (_, Err(why)) => CheckVerdict::fail(format!("{path} is a copy of {source}, which is invalid now: {why}"), WAIT),
        (Err(why), _) => CheckVerdict::fail(format!("{path}: {why}"), WRITE_OWN_LIST),
        (Ok(copied), Ok(current)) if copied != current => CheckVerdict::fail(
            format!("{path} is an older copy of {source}"),
            format!("{WRITE_OWN_LIST}; until then, pods start with the older network configuration"),
        ),
        _ => CheckVerdict::pass(format!("{} is a copy of {source}", path.name())),
    }
}

/// Returns a configuration list without the entries of type `kind`. A single plugin becomes a list, as in a copy
/// (`ConfList::of_file`).
fn contents(file: &RuntimeFile, kind: &str) -> Result<Value, String> {
    let mut list = file.json.clone()?;
    if list.get("plugins").is_none() {
        let mut keys = list.as_object().cloned().ok_or("expected an object")?;
        keys.retain(|key, _| ["name", "cniVersion"].contains(&key.as_str()));
        keys.extend([(ONLY_INLINED.to_owned(), true.into()), ("plugins".to_owned(), json!([list]))]);
        list = keys.into();
    }
    let plugins = list["plugins"].as_array_mut().ok_or("plugins: expected an array")?;
    plugins.retain(|plugin| plugin["type"] != kind);
    Ok(list)
}

/// Checks the files in the directory of Multus's auxiliary chain. Nodes on which the plugin has no file there have no such
/// check.
pub(super) fn examine_multus_chain(target: &CheckTarget, results: &mut Results) {
    let Some(MultusChain { directory, own_files, invalid_files }) = &target.installation.multus_chain else { return };
    let is_missing = |path: &&HostPath| !target.reach(path).is_ok_and(|reached| reached.is_file());
    let found = || match own_files.iter().find(is_missing) {
        Some(missing) => CheckVerdict::fail(
            format!("{missing} not found: Multus starts pods without the plugin, unless they select an attachment"),
            "check why the agent on this node does not write it, or run detour install again",
        ),
        None => CheckVerdict::pass(format!("all files in {directory} are valid")),
    };
    results.run(checks::MULTUS_CHAIN, || match invalid_files.as_slice() {
        [] => CheckVerdict::settled(SETTLING, found),
        files => CheckVerdict::fail(
            format!("Multus skips all plugins of {directory} for every pod: {}", files.join("; ")),
            "correct or remove the file; its tool writes it",
        ),
    });
}

/// Checks the node configuration, which the plugin reads at each call.
pub(super) fn examine_node_configuration(target: &CheckTarget, results: &mut Results) {
    let verdict = match read_node_configuration(target) {
        Ok(Some((node, warnings))) => {
            let stated = format!("{NODE_CONFIGURATION} sets {}", node.summary());
            CheckVerdict::pass([vec![stated], warnings].concat().join("; "))
        }
        Ok(None) => CheckVerdict::to_do(
            format!("{NODE_CONFIGURATION} not found: each attachment sets the node's keys"),
            "run detour install, which writes it",
        ),
        Err(why) => CheckVerdict::fail(why, "correct it, or remove it and run detour install again"),
    };
    results.add(checks::NODE_CONFIGURATION, verdict);
}

fn read_node_configuration(target: &CheckTarget) -> Result<Option<(NodeConf, Vec<String>)>, String> {
    let path =
        target.reach_named(NODE_CONFIGURATION.as_ref()).map_err(|error| format!("{NODE_CONFIGURATION}: {error}"))?;
    node::read(NODE_CONFIGURATION, &path).map_err(|error| error.msg)
}

/// Returns the effective configuration of an attachment on this node.
///
/// # Errors
/// As [`node::effective`].
pub(super) fn effective(target: &CheckTarget, place: &Path, text: &str) -> Result<NetConf, Error> {
    let node = read_node_configuration(target).ok().flatten().map(|(node, _)| node);
    node::effective(node.as_ref(), place, text)
}
