//! Checks of the configuration with which runtimes or Multus call the plugin, of the own list, of Multus's auxiliary
//! chain, and of the node configuration.

use super::findings::{Findings, RuntimeFile, read_node_configuration};
use super::node::INSTALL;
use super::report::{CheckVerdict, OwnList};
use crate::cni::{NODE_CONFIGURATION, OWN_TYPES};
use crate::host_path::HostPath;
use crate::inspect::subject::AppliedConf;
use crate::inspect::terminal::joined;
use crate::logging::check_log_file;

/// The next step if an own list is missing or no copy of its source.
const OWN_LIST: &str = "check why the agent on this node does not write the own list again, or run detour install \
    again; if its name ends with .cilium_bak, set the Helm value cni.exclusive of Cilium to false";

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

fn supported(applied: &AppliedConf) -> CheckVerdict {
    let (path, conf) = (file_of(applied), &applied.conf);
    if conf.redirects_ambient {
        return CheckVerdict::fail(
            format!("{path}: ambient_enabled is true, but detour does not redirect pods of the ambient mesh"),
            "run istio-cni for these pods, and remove ambient_enabled or istio-redirect from this configuration",
        );
    }
    if let Some(Err(why)) = conf.log_file.as_deref().map(check_log_file) {
        let next = "set log_file to a path such as /var/log/detour.log";
        return CheckVerdict::warn(format!("{path}: log_file: {why}; the plugin logs to stderr only"), next);
    }
    let chain: Vec<&str> = conf.chain.iter().filter_map(|block| block.keys.get("type")?.as_str()).collect();
    CheckVerdict::pass(format!("network {}, type {} in {path}: {}", conf.name, conf.kind, chain.join(", ")))
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
            true => "restart Multus, which then copies the cluster network's list with detour into its file",
            false => "check why the agent on this node does not add detour to that list, or run detour install again",
        },
    )
}

/// Checks the own lists: copies of the cluster network's configuration list with the plugin's entry, which runtimes use
/// instead of it. Nodes without an own list have no such check.
pub(super) fn own_list(findings: &Findings<'_>) -> Option<CheckVerdict> {
    if findings.target.own_lists.is_empty() {
        return None;
    }
    let obstacle = findings.obstacle(&["configuration-picked"]);
    if obstacle.is_some() {
        return obstacle;
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
    Some(CheckVerdict::unless(
        invalid.iter().map(|file| format!("Multus skips all plugins of {directory} for every pod: {file}")),
        format!("all files in {directory} are valid"),
        "correct or remove the file; its tool writes it",
    ))
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
