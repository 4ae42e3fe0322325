//! Checks of the configuration with which runtimes or Multus call the plugin, of the own list, of Multus's auxiliary
//! chain, and of the node configuration.

use super::checks::{self, Findings};
use super::report::{CheckTarget, CheckVerdict, OwnList};
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

/// The configuration files of a node.
pub(super) struct ConfigurationFiles {
    /// The files that runtimes read (libcni, `ConfFiles`), in the order of their names, or the one that the user named.
    all: Result<Vec<RuntimeFile>, String>,
    /// The configurations of the installation; without one, those in the directory.
    ours: Vec<InstalledText>,
    /// Why the plugin rejects some of them.
    wrong: Vec<Error>,
}

impl ConfigurationFiles {
    /// Reads the files, and returns the valid configurations of this plugin, too.
    pub(super) fn read(target: &CheckTarget) -> (Self, Vec<AppliedConf>) {
        let all = runtime_files(target);
        // Runtimes skip a file that is not JSON.
        let is_json = |one: &&InstalledText| serde_json::from_str::<Value>(&one.text).is_ok();
        let of_file = |file: &RuntimeFile| InstalledText {
            path: file.path.clone(),
            text: file.text.clone(),
            for_every_pod: target.chained && file.json.as_ref().is_ok_and(|json| json["plugins"].is_array()),
        };
        let ours: Vec<InstalledText> = match &all {
            Err(_) => Vec::new(),
            Ok(files) if target.installed.is_empty() => {
                files.iter().filter(|file| file.is_ours()).map(of_file).collect()
            }
            Ok(_) => target.installed.iter().filter(is_json).cloned().collect(),
        };
        let node = read_node_configuration(target).ok().flatten().map(|(node, _)| node);
        let (mut valid, mut wrong) = (Vec::new(), Vec::new());
        for text in &ours {
            let applied = AppliedConf::installed(text, node.as_ref());
            match applied.and_then(|applied| accepted(target, &applied.conf).map(|()| applied)) {
                Ok(applied) => valid.push(applied),
                Err(error) => wrong.push(error),
            }
        }
        (Self { all, ours, wrong }, valid)
    }
}

pub(super) fn present(Findings { target, files, .. }: &Findings<'_>) -> CheckVerdict {
    let all = match &files.all {
        Ok(all) => all,
        Err(why) => return CheckVerdict::fail(format!("can't read {}: {why}", target.conf), INSTALL),
    };
    let is_missing = |path: &&HostPath| !all.iter().any(|file| file.path == **path);
    // Without it, runtimes use the cluster network's list, which does not call the plugin.
    if let Some(path) = target.own_lists.iter().map(|list| &list.path).find(is_missing) {
        return CheckVerdict::fail(format!("{path} not found"), OWN_LIST);
    }
    if !files.ours.is_empty() {
        return CheckVerdict::pass(joined(files.ours.iter().map(|conf| &conf.path)));
    }
    let name = |file: &RuntimeFile| match &file.json {
        Ok(_) => file.path.name(),
        Err(why) => format!("{} ({why})", file.path.name()),
    };
    let names = joined(all.iter().map(name));
    let names = if names.is_empty() { "no configuration" } else { &names };
    let kinds = OWN_TYPES.join(" or ");
    CheckVerdict::fail(format!("{}: expected a plugin of type {kinds}, got {names}", target.conf), INSTALL)
}

pub(super) fn valid(Findings { files, configurations, .. }: &Findings<'_>) -> CheckVerdict {
    let next = "correct the named key, or run detour install again";
    let wrong = files.wrong.iter().map(|error| CheckVerdict::fail(error.to_string(), next));
    CheckVerdict::merged(wrong.chain(configurations.iter().map(supported)))
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

/// Checks whether runtimes use the configuration: they take the first file by name (libcni, `LoadConfList` of
/// `ConfFiles`). Multus finds an attachment by its network's name.
pub(super) fn picked(Findings { target, files, configurations, .. }: &Findings<'_>) -> CheckVerdict {
    let is_primary = configurations.iter().any(|applied| applied.conf.primary.is_some());
    if !target.chained && !is_primary {
        let names = joined(configurations.iter().map(|applied| &applied.conf.name));
        return CheckVerdict::pass(format!("Multus finds it by its network name, {names}"));
    }
    let Some(first) = files.all.iter().flatten().find(|file| !file.cluster_network().is_empty()) else {
        return CheckVerdict::not_checked("the directory has no configuration of a cluster network");
    };
    let (name, types) = (first.path.name(), first.cluster_network());
    if types.iter().any(|kind| OWN_TYPES.contains(kind)) {
        return CheckVerdict::pass(format!("{name} is the first file"));
    }
    let own = joined(configurations.iter().map(file_of));
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

/// Checks the own lists: copies of the cluster network's configuration list with the plugin's entry, which runtimes use
/// instead of it. Nodes without an own list have no such check.
pub(super) fn own_list(findings: &Findings<'_>) -> Option<CheckVerdict> {
    if findings.target.own_lists.is_empty() {
        return None;
    }
    let needed = [checks::CONFIGURATION_PRESENT, checks::CONFIGURATION_VALID, checks::CONFIGURATION_PICKED];
    if let Some(why) = findings.obstacle(&needed) {
        return Some(CheckVerdict::not_checked(why));
    }
    let verdict = |OwnList { path, source, difference }: &OwnList| match difference {
        None => CheckVerdict::pass(format!("{} is a copy of {source}", path.name())),
        Some(why) => CheckVerdict::fail(format!("{} is no copy of {source}: {why}", path.name()), OWN_LIST),
    };
    Some(CheckVerdict::merged(findings.target.own_lists.iter().map(verdict)))
}

/// Checks the files of other tools in the directory of Multus's auxiliary chain. Nodes on which the plugin has no file
/// there have no such check.
pub(super) fn multus_chain(findings: &Findings<'_>) -> Option<CheckVerdict> {
    let (directory, invalid) = findings.target.multus_chain.as_ref()?;
    Some(match invalid.as_slice() {
        [] => CheckVerdict::pass(format!("all files in {directory} are valid")),
        files => CheckVerdict::fail(
            format!("Multus skips all plugins of {directory} for every pod: {}", files.join("; ")),
            "correct or remove the file; its tool writes it",
        ),
    })
}

/// Checks the node configuration, which the plugin reads at each call.
pub(super) fn node_configuration(findings: &Findings<'_>) -> CheckVerdict {
    match read_node_configuration(findings.target) {
        Ok(Some((node, warnings))) => {
            let stated = format!("{NODE_CONFIGURATION} sets {}", node.summary());
            CheckVerdict::pass([vec![stated], warnings].concat().join("; "))
        }
        Ok(None) => CheckVerdict::to_do(
            format!("{NODE_CONFIGURATION} not found: each attachment sets the node's keys"),
            "run detour install, which writes it",
        ),
        Err(why) => CheckVerdict::fail(why, "correct it, or remove it and run detour install again"),
    }
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
