//! Checks of the configuration with which runtimes or Multus call the plugin, of the own list, of Multus's auxiliary
//! chain, and of the node configuration.

use super::checks;
use super::report::{CheckTarget, CheckVerdict, OwnList, Results};
use crate::cni::{Error, GROUP_FILE, NODE_CONFIGURATION, NetConf, NodeConf, OWN_TYPES, is_configuration_file};
use crate::host_path::HostPath;
use crate::inspect::subject::AppliedConf;
use crate::inspect::terminal::joined;
use crate::inspect::validate::is_program;
use crate::plugin::node::{self, InstalledText};
use crate::plugin::{TargetNode, validate};
use crate::sub_plugins::SubPlugin;
use crate::trusted_file::{names_in, read_nofollow};
use serde_json::Value;
use std::path::Path;

/// The maximum size of a configuration file, in bytes.
const MAX_FILE: u64 = 1 << 20;
const INSTALL: &str =
    "run detour install (see detour install --help), or check why the agent on this node does not write it";
/// The next step if an own list is missing or no copy of its source.
const OWN_LIST: &str = "check why the agent on this node does not write the own list again, or run detour install \
    again; if its name ends with .cilium_bak, set the Helm value cni.exclusive of Cilium to false";

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

    fn is_ours(&self) -> bool {
        types(&self.plugins()).iter().any(|kind| OWN_TYPES.contains(kind))
    }

    /// Whether the file configures Multus, which runs the cluster network itself.
    fn is_multus(&self) -> bool {
        types(&self.plugins()).first().is_some_and(|kind| ["multus", "multus-shim"].contains(kind))
    }

    /// Returns the types of the cluster network's plugins in the file; none if the file has no cluster network. Thin
    /// Multus copies the list of the cluster network into its own file.
    fn cluster_network(&self) -> Vec<&str> {
        let plugins = self.plugins();
        let copy = || plugins.first().map_or(&Value::Null, |multus| &multus["delegates"][0]);
        let types = match self.is_multus() {
            true => {
                types(&copy()["plugins"].as_array().map_or_else(|| vec![copy()], |plugins| plugins.iter().collect()))
            }
            false => types(&plugins),
        };
        if types.iter().all(|kind| *kind == "loopback") { Vec::new() } else { types }
    }
}

fn types<'a>(plugins: &[&'a Value]) -> Vec<&'a str> {
    plugins.iter().filter_map(|plugin| plugin["type"].as_str()).collect()
}

/// Runs the checks. Returns the valid configurations of this plugin.
pub(super) fn examine(target: &CheckTarget, results: &mut Results) -> Vec<AppliedConf> {
    let files = runtime_files(target);
    let ours = match &files {
        Ok(files) => installed(target, files),
        Err(_) => Vec::new(),
    };
    let present = match &files {
        Ok(files) => present(target, files, &ours),
        Err(why) => CheckVerdict::fail(format!("can't read {}: {why}", target.conf), INSTALL),
    };
    results.add(checks::CONFIGURATION_PRESENT, present);
    let (mut valid, mut wrong) = (Vec::new(), Vec::new());
    let node = read_node_configuration(target).ok().flatten().map(|(node, _)| node);
    for text in &ours {
        let applied = AppliedConf::installed(text, node.as_ref());
        match applied.and_then(|applied| accepted(target, &applied.conf).map(|()| applied)) {
            Ok(applied) => valid.push(applied),
            Err(error) => {
                wrong.push(CheckVerdict::fail(error.to_string(), "correct the named key, or run detour install again"))
            }
        }
    }
    results.run(checks::CONFIGURATION_VALID, || {
        CheckVerdict::merged(wrong.into_iter().chain(valid.iter().map(supported)))
    });
    results.run(checks::CONFIGURATION_PICKED, || picked(target, &files.unwrap_or_default(), &valid));
    valid
}

/// Returns the configurations of the installation; without one, those in the directory.
fn installed(target: &CheckTarget, files: &[RuntimeFile]) -> Vec<InstalledText> {
    let is_installed = !target.installed.is_empty();
    let in_directory = files.iter().filter(|file| !is_installed && file.is_ours()).map(|file| InstalledText {
        path: file.path.clone(),
        text: file.text.clone(),
        for_every_pod: target.chained && file.json.as_ref().is_ok_and(|json| json["plugins"].is_array()),
    });
    // Runtimes skip a file that is not JSON.
    let installed = target.installed.iter().filter(|one| serde_json::from_str::<Value>(&one.text).is_ok());
    installed.cloned().chain(in_directory).collect()
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

fn supported(applied: &AppliedConf) -> CheckVerdict {
    let (path, conf) = (file_of(applied), &applied.conf);
    if conf.redirects_ambient {
        return CheckVerdict::fail(
            format!("{path}: ambient_enabled is true, but detour does not redirect pods of the ambient mesh"),
            "run istio-cni for these pods, and remove ambient_enabled or istio-redirect from this configuration",
        );
    }
    let chain: Vec<&str> = conf.chain.iter().filter_map(|block| block.keys.get("type")?.as_str()).collect();
    let role = if conf.primary.is_some() { ", as the primary plugin" } else { "" };
    CheckVerdict::pass(format!("network {}, type {} in {}{role}: {}", conf.name, conf.kind, path, chain.join(", ")))
}

/// Returns the name of the file with a configuration.
fn file_of(applied: &AppliedConf) -> &str {
    applied.origin.places.first().and_then(|place| place.rsplit('/').next()).unwrap_or_default()
}

fn present(target: &CheckTarget, files: &[RuntimeFile], ours: &[InstalledText]) -> CheckVerdict {
    let is_missing = |path: &&HostPath| !files.iter().any(|file| file.path == **path);
    // Without it, runtimes use the cluster network's list, which does not call the plugin.
    if let Some(path) = target.own_list.as_ref().map(|list| &list.path).filter(is_missing) {
        return CheckVerdict::fail(format!("{path} not found"), OWN_LIST);
    }
    if !ours.is_empty() {
        return CheckVerdict::pass(joined(ours.iter().map(|conf| &conf.path)));
    }
    let name = |file: &RuntimeFile| match &file.json {
        Ok(_) => file.path.name(),
        Err(why) => format!("{} ({why})", file.path.name()),
    };
    let names = joined(files.iter().map(name));
    let names = if names.is_empty() { "no configuration" } else { &names };
    CheckVerdict::fail(
        format!("{}: expected a plugin of type {}, got {names}", target.conf, OWN_TYPES.join(" or ")),
        INSTALL,
    )
}

/// Checks whether runtimes use the configuration: they take the first file by name (libcni, `LoadConfList` of
/// `ConfFiles`). Multus finds an attachment by its network's name.
fn picked(target: &CheckTarget, files: &[RuntimeFile], ours: &[AppliedConf]) -> CheckVerdict {
    let is_primary = ours.iter().any(|applied| applied.conf.primary.is_some());
    if !target.chained && !is_primary {
        let names = joined(ours.iter().map(|applied| &applied.conf.name));
        return CheckVerdict::pass(format!("Multus finds it by its network name, {names}"));
    }
    let Some(first) = files.iter().find(|file| !file.cluster_network().is_empty()) else {
        return CheckVerdict::not_checked("the directory has no configuration of a cluster network");
    };
    let (name, types) = (first.path.name(), first.cluster_network());
    if types.iter().any(|kind| OWN_TYPES.contains(kind)) {
        return CheckVerdict::pass(format!("{name} is the first file"));
    }
    let own = joined(ours.iter().map(file_of));
    CheckVerdict::fail(
        format!("runtimes use {name}, whose plugins are {}; detour is in {own}", joined(types)),
        match first.is_multus() {
            true => "restart Multus, which then copies the cluster network's list with detour into its file".to_owned(),
            false => format!(
                "check why the agent on this node does not add detour to that list, or run detour install --chained=true \
                 --conf-name {name}"
            ),
        },
    )
}

/// Returns the files that runtimes read (libcni, `ConfFiles`), in the order of their names, or the one that the user
/// named.
fn runtime_files(target: &CheckTarget) -> Result<Vec<RuntimeFile>, String> {
    let conf = &target.conf;
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

/// Checks the own list: the copy of the cluster network's configuration list with the plugin's entry, which runtimes use
/// instead of it. Nodes without an own list have no such check.
pub(super) fn examine_own_list(target: &CheckTarget, results: &mut Results) {
    let Some(OwnList { path, source, difference }) = &target.own_list else { return };
    let name = path.name();
    results.run(checks::OWN_LIST, || match difference {
        None => CheckVerdict::pass(format!("{name} is a copy of {source}")),
        Some(why) => CheckVerdict::fail(format!("{name} is no copy of {source}: {why}"), OWN_LIST),
    });
}

/// Checks the files of other tools in the directory of Multus's auxiliary chain. Nodes on which the plugin has no file
/// there have no such check.
pub(super) fn examine_multus_chain(target: &CheckTarget, results: &mut Results) {
    let Some((directory, invalid)) = &target.multus_chain else { return };
    results.run(checks::MULTUS_CHAIN, || match invalid.as_slice() {
        [] => CheckVerdict::pass(format!("all files in {directory} are valid")),
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

/// Returns the configuration that stands for the node: the first one that redirects, or else the first.
pub(super) fn foremost(configurations: &[AppliedConf]) -> Option<&NetConf> {
    let redirects = |applied: &&AppliedConf| has_sub_plugin(&applied.conf, SubPlugin::IstioRedirect);
    configurations.iter().find(redirects).or(configurations.first()).map(|applied| &applied.conf)
}

pub(super) fn has_sub_plugin(conf: &NetConf, wanted: SubPlugin) -> bool {
    conf.chain.iter().any(|block| SubPlugin::of(block) == Some(wanted))
}
