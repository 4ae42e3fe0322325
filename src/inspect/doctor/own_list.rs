//! The check of the own list: the copy of the cluster network's configuration list with detour's entry, which runtimes
//! use instead of it. Nodes without an own list have no such check. Also the check of Multus's auxiliary chain.

use super::checks;
use super::configuration::{self, CILIUM, RuntimeFile, WRITE_OWN_LIST};
use super::report::{CheckTarget, CheckVerdict, MultusChain, OwnList, Results};
use crate::cni::ONLY_INLINED;
use crate::host_path::HostPath;
use crate::trusted_file;
use serde_json::{Value, json};
use std::time::Duration;

/// How long a difference must last to be a failure: the agent follows a change within this time.
const SETTLING: Duration = Duration::from_secs(2);

/// Checks each own list against the list of which it is a copy.
pub(super) fn examine(target: &CheckTarget, results: &mut Results) {
    for (path, list) in &target.installation.own_lists {
        results.run(checks::OWN_LIST, || CheckVerdict::settled(SETTLING, || verdict(target, path, list)));
    }
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

fn verdict(target: &CheckTarget, path: &HostPath, OwnList { source, kind }: &OwnList) -> CheckVerdict {
    let directory = path.parent();
    let files = match configuration::files(target, &directory) {
        Ok(files) => files,
        Err(why) => return CheckVerdict::not_checked(format!("can't read {directory}: {why}")),
    };
    let named = |name: &str| files.iter().find(|file| file.path.name() == name);
    let Some(own) = named(&path.name()) else {
        return CheckVerdict::fail(format!("{path} not found"), WRITE_OWN_LIST);
    };
    if let Some(multus) = files.iter().find(|file| file.is_multus()) {
        return CheckVerdict::fail(
            format!("{} is a configuration of Multus, which {} bypasses", multus.path.name(), path.name()),
            "check why the agent on this node does not replace the own list by an entry in the cluster network's list, or \
             run detour install again",
        );
    }
    let has_other = files.iter().any(|file| file.path != *path && file.json.is_ok() && !file.is_other());
    let Some(original) = named(source) else {
        return match has_other {
            true => CheckVerdict::fail(format!("{path} is a copy of {source}, which was removed"), WRITE_OWN_LIST),
            false => CheckVerdict::fail(
                format!("{path} is a copy of {source}, which was removed: the cluster network is not ready"),
                "check the pods of the cluster network on this node; until then, pods start with the last copy",
            ),
        };
    };
    let untrusted = target.reach(&original.path).ok().and_then(|reached| trusted_file::check(&reached).err());
    if let Some(error) = untrusted.filter(|error| !error.is_not_found()) {
        return CheckVerdict::fail(
            format!("{path} is a copy of {source}, which another user can change: {}", error.below(&target.mount)),
            "correct the owner or the mode; until then, the agent does not copy changes of that list",
        );
    }
    if original.is_only_beside() {
        return CheckVerdict::fail(
            format!("{path} is a copy of {source}, whose plugins are all in files of the directory with its name now"),
            "write these plugins into the list itself: the agent copies no others",
        );
    }
    match (contents(own, kind), contents(original, kind)) {
        (_, Err(why)) => CheckVerdict::fail(
            format!("{path} is a copy of {source}, which is invalid now: {why}"),
            "check the pods of the cluster network, which writes this file; until then, pods start with the last copy",
        ),
        (Err(why), _) => CheckVerdict::fail(format!("{path}: {why}"), WRITE_OWN_LIST),
        (Ok(copied), Ok(current)) if copied != current => CheckVerdict::fail(
            format!("{path} is an older copy of {source}: {}", difference(&copied, &current)),
            format!("{WRITE_OWN_LIST}; until then, pods start with the older network configuration"),
        ),
        _ => match configuration::renamed(target, path) {
            Some(renamed) => {
                CheckVerdict::warn(format!("another process renamed an earlier copy to {renamed}"), CILIUM)
            }
            None => CheckVerdict::pass(format!("{} is a copy of {source}", path.name())),
        },
    }
}

/// Returns a configuration list without the entries of type `kind`. A single plugin becomes a list, as in a copy
/// (`conflist::list_of`).
fn contents(file: &RuntimeFile, kind: &str) -> Result<Value, String> {
    let mut list = file.json.clone()?;
    if list.get("plugins").is_none() {
        let mut keys = list.as_object().cloned().ok_or("expected an object")?;
        keys.retain(|key, _| ["name", "cniVersion"].contains(&key.as_str()));
        keys.insert(ONLY_INLINED.to_owned(), true.into());
        keys.insert("plugins".to_owned(), json!([list]));
        list = keys.into();
    }
    let plugins = list["plugins"].as_array_mut().ok_or("plugins: expected an array")?;
    plugins.retain(|plugin| plugin["type"] != kind);
    Ok(list)
}

/// Returns the first key whose value differs.
fn difference(copied: &Value, current: &Value) -> String {
    let types = |list: &Value| {
        let plugins = list["plugins"].as_array().map(Vec::as_slice).unwrap_or_default();
        plugins.iter().map(|plugin| plugin["type"].as_str().unwrap_or("?").to_owned()).collect::<Vec<_>>()
    };
    let (old, new) = (types(copied), types(current));
    if old != new {
        return format!("its plugins are {}, those of the list are {}", old.join(", "), new.join(", "));
    }
    let differs = |key: &&String| copied.get(*key) != current.get(*key);
    let keys = [copied, current].into_iter().filter_map(Value::as_object).flat_map(|object| object.keys());
    let key = keys.into_iter().find(|key| *key != "plugins" && differs(key));
    if let Some(key) = key {
        return format!("key {key:?} differs");
    }
    let plugins = |list: &Value| list["plugins"].as_array().cloned().unwrap_or_default();
    let pairs = plugins(copied).into_iter().zip(plugins(current));
    let kind = pairs.filter(|(old, new)| old != new).find_map(|(old, _)| old["type"].as_str().map(str::to_owned));
    format!("the configuration of plugin {} differs", kind.unwrap_or_default())
}
