//! The configurations on a node: the files that runtimes read, those of the plugin, and whether it accepts them.

use super::report::CheckTarget;
use crate::cni::{Error, GROUP_FILE, NODE_CONFIGURATION, NetConf, NodeConf, OWN_TYPES, is_configuration_file};
use crate::host_path::HostPath;
use crate::inspect::subject::AppliedConf;
use crate::inspect::validate::is_program;
use crate::plugin::node::{self, InstalledText};
use crate::plugin::{TargetNode, validate};
use crate::sub_plugins::SubPlugin;
use crate::trusted_file::{names_in, read_nofollow};
use serde_json::Value;
use std::path::Path;

/// The maximum size of a configuration file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// A configuration file that runtimes read.
pub(super) struct RuntimeFile {
    pub(super) path: HostPath,
    text: String,
    pub(super) json: Result<Value, String>,
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
    pub(super) fn is_multus(&self) -> bool {
        types(&self.plugins()).first().is_some_and(|kind| ["multus", "multus-shim"].contains(kind))
    }

    /// Returns the types of the cluster network's plugins in the file; none if the file has no cluster network. Thin
    /// Multus copies the list of the cluster network into its own file.
    pub(super) fn cluster_network(&self) -> Vec<&str> {
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
    pub(super) all: Result<Vec<RuntimeFile>, String>,
    /// The configurations of the installation; without one, those in the directory.
    pub(super) ours: Vec<InstalledText>,
    /// Why the plugin rejects some of them.
    pub(super) wrong: Vec<Error>,
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

/// Reads the node configuration, with its warnings; `None` without one.
pub(super) fn read_node_configuration(target: &CheckTarget) -> Result<Option<(NodeConf, Vec<String>)>, String> {
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
