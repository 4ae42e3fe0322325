//! The plugin's entry in the cluster network's configuration list: in the list itself, or in a copy that runtimes use
//! instead, the own list.

use super::conflist::{self, UnusableList};
use super::plan::{
    ConfFile, FileAction, FoundFile, FoundState, InstallPlan, MissingPrograms, OWN_LIST, add_text, write_list,
};
use super::record::{Digest, FileRecord, Role, with_newest};
use crate::cni::{CNI_CONF_DIR, is_configuration_file};
use crate::host_path::HostPath;
use serde_json::Value;

/// The suffix of the names of configuration lists.
const LIST_SUFFIX: &str = ".conflist";

/// A file that was skipped, and the reason.
type Skipped<'a> = (&'a str, UnusableList);

/// The cluster network's configuration list, and the entry that it gets.
pub(super) struct ClusterList<'a> {
    pub(super) dir: &'a HostPath,
    /// The name of the list's file; `None` for the one that runtimes would use.
    pub(super) file: Option<&'a str>,
    pub(super) entry: &'a Value,
    pub(super) found: &'a FoundState,
}

/// How Multus calls the cluster network.
enum MultusCall {
    /// The file of this name, in the same directory.
    File(String),
    /// Another list, as Multus's configuration names it.
    Elsewhere(String),
    /// The copy of a list in Multus's configuration; whether it has the plugin's entry.
    Embedded(bool),
}

impl<'a> ClusterList<'a> {
    fn kind(&self) -> &'a str {
        self.entry["type"].as_str().unwrap_or_default()
    }

    fn own_list(&self) -> HostPath {
        self.dir.join(OWN_LIST)
    }

    /// Returns the files in the directory except the own list. A file of that name is one if the record lists it, or if it
    /// has the key that only an own list has.
    fn sources(&self) -> Vec<&'a ConfFile> {
        let is_recorded = self.found.record.files.contains_key(&self.own_list());
        let is_own = |file: &&ConfFile| {
            file.name == OWN_LIST && (is_recorded || conflist::is_own_list(&String::from_utf8_lossy(&file.contents)))
        };
        self.found.configurations.iter().filter(|file| !is_own(file)).collect()
    }

    /// Returns why runtimes would not use the own list, or must not.
    fn obstacle(&self, sources: &[&ConfFile]) -> Option<String> {
        for file in sources {
            let name = &file.name;
            match list(file).and_then(pod_network) {
                // Multus invalidates its file when it ends, and truncates it when it starts.
                Err(error) if error == UnusableList::Multus || name.contains("multus") => {
                    let is_named = String::from_utf8_lossy(&file.contents).contains(OWN_LIST);
                    let restart =
                        if is_named { "; restart Multus on this node: its file names the own list" } else { "" };
                    return Some(format!("runtimes would bypass Multus ({name}){restart}"));
                }
                Ok(_) if name.as_str() < OWN_LIST => return Some(format!("runtimes use {name} before it")),
                Err(error) if error.may_be_used() && name.as_str() < OWN_LIST => {
                    return Some(format!("runtimes may use {name} before it"));
                }
                _ => {}
            }
        }
        // Multus removes its file when it ends, and later generates it from the first file in the directory.
        let program = self.found.multus.as_ref()?;
        Some(format!("runtimes would bypass Multus ({program}); if it is not used, remove its program"))
    }

    /// Adds the entry to a copy of the list. If runtimes would not use the copy, the list itself gets the entry.
    pub(super) fn copy(&self, plan: &mut InstallPlan) {
        let sources = self.sources();
        if let Some(obstacle) = self.obstacle(&sources) {
            plan.notes.push(format!(
                "{}: not written, the plugin's entry is in the cluster network's list instead: {obstacle}",
                self.own_list()
            ));
            return self.edit(plan);
        }
        let mut entry = self.entry.clone();
        entry[CNI_CONF_DIR] = self.dir.to_string().into();
        let (target, skipped) = choose(&sources, self.file, self.kind(), true);
        plan.notes.extend(skipped.iter().map(|(name, reason)| self.skipped(name, reason)));
        let last = self.last_copy(&entry);
        let copied = last.as_ref().map(|(_, source)| source.as_str());
        // Another process may just be writing the list that was copied: a later one does not take its place.
        let is_replaced = |copied: &str| {
            let is_missing = !sources.iter().any(|file| file.name == copied);
            is_missing && self.found.is_settled
        };
        let takes_over = |name: &str| copied.is_none_or(|copied| name <= copied || is_replaced(copied));
        let next = target.filter(|target| takes_over(&target.file.name));
        let Some(target) = next else {
            let may_be_used = skipped.iter().any(|(_, reason)| reason.may_be_used());
            plan.is_settling = last.is_some() && !self.found.is_settled && !may_be_used;
            plan.waits_for = (!plan.is_settling).then(|| self.missing("copied", &skipped, copied));
            if let Some((text, source)) = last {
                self.write_copy(&text, &source, plan);
            }
            return;
        };
        if self.has_other_programs(target.file, plan) {
            return;
        }
        // An earlier installation may have added its entry to the list itself.
        let others = conflist::without(&target.list, self.kind());
        match others.and_then(|others| conflist::rewrite(others.as_ref().unwrap_or(&target.list), &entry)) {
            Ok(text) => {
                plan.notes.extend(self.other_meshes(&self.dir.join(&target.file.name), &target.list));
                self.write_copy(&text, &target.file.name, plan);
            }
            Err(reason) => plan.waits_for = Some(self.missing("copied", &[(&target.file.name, reason)], copied)),
        }
    }

    /// Returns the own list as it is, with `entry`, and the name of its source; `None` if it is missing, damaged, or not in
    /// the record.
    fn last_copy(&self, entry: &Value) -> Option<(String, String)> {
        let text = self.found.files.get(&self.own_list())?.text.as_deref()?;
        let source = self.found.record.files.get(&self.own_list())?.source.clone()?;
        Some((conflist::rewrite(text, entry).ok()?, source))
    }

    fn write_copy(&self, text: &str, source: &str, plan: &mut InstallPlan) {
        let path = self.own_list();
        let file = self.found.files.get(&path);
        plan.notes.extend(file.and_then(|file| self.added(&path, file.text.as_deref()?, text)));
        add_text(&path, Role::OwnList, text, self.found, plan);
        if let Some(record) = plan.record.files.get_mut(&path) {
            (record.plugin, record.source) = (Some(self.kind().to_owned()), Some(source.to_owned()));
        }
    }

    /// Adds the entry to the list that is really called.
    pub(super) fn edit(&self, plan: &mut InstallPlan) {
        let (found, dir, kind) = (self.found, self.dir, self.kind());
        let multus = self.multus();
        let called = match &multus {
            Some((_, MultusCall::File(name))) => Some(name.as_str()),
            Some((file, MultusCall::Elsewhere(list))) if self.file.is_none() => {
                plan.notes.push(self.skipped(file, &UnusableList::Multus));
                plan.waits_for = Some(format!(
                    "the cluster network's list in {dir}: {} calls {list}; set --conf-dir (cniConfDir) to its directory, or \
                     use an attachment (--chained=false)",
                    dir.join(file)
                ));
                return;
            }
            _ => None,
        };
        let (target, skipped) = choose(&self.sources(), self.file.or(called), kind, false);
        plan.notes.extend(skipped.iter().map(|(name, reason)| self.skipped(name, reason)));
        let Some(target) = target else {
            plan.waits_for = Some(self.missing("extended", &skipped, None));
            return;
        };
        if self.has_other_programs(target.file, plan) {
            return;
        }
        let (path, single) = (dir.join(&target.list_name), dir.join(&target.file.name));
        if let Some(other) = found.named.get(&single).filter(|_| single != path) {
            plan.refused = Some(format!(
                "can't add the plugin to {single}: it is a single configuration, which a list would replace, and {other} \
                 names it; make it a list ({path}) with the tool that writes it, or use an attachment (--chained=false)"
            ));
            return;
        }
        plan.notes.extend(self.other_meshes(&path, &target.list));
        match conflist::rewrite(&target.list, self.entry) {
            Ok(text) => self.write_entry(&path, &single, target.file, text, plan),
            Err(reason) => {
                plan.waits_for = Some(self.missing("extended", &[(&target.file.name, reason)], None));
                return;
            }
        }
        if let Some((file, MultusCall::Embedded(false))) = multus {
            plan.waits_for = Some(format!(
                "the plugin's entry in the key delegates of {}: Multus calls this copy of the cluster network's list, which \
                 lacks the plugin, so pods start without rules; restart Multus, which then copies {path}, or replace \
                 delegates by \"clusterNetwork\": \"{path}\"",
                dir.join(&file)
            ));
        }
    }

    /// Writes the list with the entry if it differs, and then removes the single configuration from which it was made.
    /// Runtimes use that until it is removed: its name sorts first.
    fn write_entry(&self, path: &HostPath, single: &HostPath, file: &ConfFile, text: String, plan: &mut InstallPlan) {
        let earlier = self.found.record.files.get(path);
        let is_ours = |digest: &Digest| earlier.is_some_and(|record| record.sha256.contains(digest));
        let existing = self.found.configurations.iter().find(|other| other.name == path.name());
        let current = existing.map(|other| String::from_utf8_lossy(&other.contents).into_owned());
        let own = current.as_ref().and_then(|text| conflist::digests(text, self.kind()).ok()).unwrap_or_default();
        plan.add(
            path,
            FileRecord {
                role: Role::Entry,
                sha256: with_newest(own.into_iter().filter(is_ours), Digest::of_value(self.entry)),
                plugin: Some(self.kind().to_owned()),
                source: None,
            },
        );
        if current.as_ref() != Some(&text) {
            let digest = Digest::of(text.as_bytes());
            plan.actions.push(write_list(
                path,
                text,
                &FoundFile { digest, text: current, mode: file.mode, trusted: true },
            ));
        }
        if single != path {
            let before = Some(String::from_utf8_lossy(&file.contents).into_owned());
            plan.actions.push(FileAction::Remove { path: single.clone(), before });
        }
    }

    /// Returns the configuration of Multus that runtimes use, and how Multus calls the cluster network.
    fn multus(&self) -> Option<(String, MultusCall)> {
        let mut files = self.sources();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        let is_used = |file: &&&ConfFile| {
            is_configuration_file(&file.name)
                && !matches!(list(file).and_then(pod_network), Err(ref error) if *error != UnusableList::Multus)
        };
        let file = files.iter().find(is_used)?;
        let conf: Value = serde_json::from_slice(&file.contents).ok()?;
        if list(file).and_then(pod_network) != Err(UnusableList::Multus) {
            return None;
        }
        let conf = if conf["plugins"].is_array() { &conf["plugins"][0] } else { &conf };
        let network = conf["clusterNetwork"].as_str().unwrap_or_default();
        let call = if network.contains('/') {
            let on_node = network.strip_prefix("/host").filter(|path| path.starts_with('/'));
            let paths = [Some(network), on_node].into_iter().flatten().filter_map(HostPath::new);
            let here = paths.clone().find(|path| path.parent() == *self.dir);
            match here {
                // The own list is removed here, and Multus must be restarted.
                Some(path) if path.name() == OWN_LIST => return None,
                Some(path) => MultusCall::File(path.name()),
                None if paths.clone().any(|path| path == *self.dir) => return None,
                None => MultusCall::Elsewhere(network.to_owned()),
            }
        } else if network.is_empty() {
            let types = |delegate: &Value| {
                let plugins = delegate["plugins"].as_array().map_or(std::slice::from_ref(delegate), Vec::as_slice);
                plugins.iter().any(|plugin| plugin["type"] == self.entry["type"])
            };
            MultusCall::Embedded(types(&conf["delegates"][0]))
        } else {
            let is_named = |file: &&&ConfFile| {
                let text: Option<Value> = serde_json::from_slice(&file.contents).ok();
                text.is_some_and(|conf| conf["name"] == network)
            };
            match files.iter().find(is_named) {
                Some(file) => MultusCall::File(file.name.clone()),
                None => MultusCall::Elsewhere(format!("the network {network:?}")),
            }
        };
        Some((file.name.clone(), call))
    }

    /// Refuses the plan if the runtime can't use the directory of the desired programs: the list's other plugins are in
    /// another one.
    fn has_other_programs(&self, file: &ConfFile, plan: &mut InstallPlan) -> bool {
        let Some(MissingPrograms { types, own, elsewhere }) = &file.missing_programs else { return false };
        let list = self.dir.join(&file.name);
        plan.refused = Some(match elsewhere {
            Some(directory) => format!(
                "can't install the program: the runtime has the plugins of {list} in {directory}; select this directory \
                 (--bin-dir {directory}, cniBinDir)"
            ),
            None => format!(
                "can't install the program: {own} has other plugins, but none of {list} ({types}); select the directory \
                 in which the runtime finds them (--bin-dir, cniBinDir)"
            ),
        });
        true
    }

    /// Returns a note if another tool added plugins to the own list: some add theirs to the first file.
    fn added(&self, path: &HostPath, current: &str, text: &str) -> Option<String> {
        let types = |text: &str| conflist::types(text).unwrap_or_default();
        let known = types(text);
        let added: Vec<_> = types(current).into_iter().filter(|kind| !known.contains(kind)).collect();
        let is_ours = self.found.own_digest(path).is_some();
        (!added.is_empty() && !is_ours).then(|| {
            format!(
                "{path}: another tool added the plugin {:?}; configure it to add the plugin to the original list, or \
                 install without --own-list (cni.ownList=false in the chart)",
                added.join(", ")
            )
        })
    }

    fn skipped(&self, name: &str, reason: &UnusableList) -> String {
        format!("{}: skipped: {reason}", self.dir.join(name))
    }

    /// Returns what the installation waits for if no list can be `changed` (copied or extended), with the next step.
    /// `copied` is the source of the last copy, which pods start with.
    fn missing(&self, changed: &str, skipped: &[Skipped<'_>], copied: Option<&str>) -> String {
        let dir = self.dir;
        let last = if copied.is_some() { "; pods start with the last copy" } else { "" };
        if let Some((name, reason)) = skipped.iter().find(|(_, reason)| reason.may_be_used()) {
            let path = dir.join(name);
            return format!(
                "a list that can be {changed}: runtimes may use {path} ({reason}){last}; change or remove this file"
            );
        }
        let name = self.file.or(copied).map(|name| format!("a valid {name}"));
        let name = name.unwrap_or_else(|| "the cluster network's configuration".to_owned());
        let last = if copied.is_some() { "; pods start with the last copy of it" } else { "" };
        let other = match copied {
            Some(_) => format!("; to copy another list now, delete {}", self.own_list()),
            None => String::new(),
        };
        format!("{name} in {dir}{last}; check the pods of the cluster network on this node{other}")
    }

    /// Returns a note for each of the other plugins in the list that redirect traffic to a mesh.
    fn other_meshes(&self, path: &HostPath, list: &str) -> Vec<String> {
        const MESHES: [&str; 4] = ["istio-cni", "linkerd-cni", "kuma-cni", "consul-cni"];
        let types = conflist::types(list).into_iter().flatten();
        let others = types.filter(|other| other != self.kind() && MESHES.contains(&other.as_str()));
        let note = |other: String| {
            format!(
                "{path}: plugin {other:?} in the same list also redirects traffic; uninstall it with the tool that added \
                 it"
            )
        };
        others.map(note).collect()
    }
}

/// The selected file and its configuration list.
#[derive(Debug, PartialEq, Eq)]
struct ConfTarget<'a> {
    file: &'a ConfFile,
    /// The name of the list's file: the name of `file`, or of the `.conflist` file that replaces it.
    list_name: String,
    list: String,
}

/// Returns the first file by name that configures a pod network, as runtimes do, or the file `desired`. A `desired`
/// single-plugin configuration is also found as the list that an earlier installation made of it. The second part of
/// the result are the files that were skipped before it. A list that is `copied` replaces no file. Files after one that
/// only runtimes can use are not chosen.
fn choose<'a>(
    files: &[&'a ConfFile],
    desired: Option<&str>,
    kind: &str,
    copied: bool,
) -> (Option<ConfTarget<'a>>, Vec<(&'a str, UnusableList)>) {
    let mut candidates: Vec<&ConfFile> = match desired {
        Some(name) => {
            let named = |name: &str| files.iter().copied().find(|file| file.name == name);
            named(name).or_else(|| named(&list_name(name))).into_iter().collect()
        }
        None => files.iter().copied().filter(|file| is_configuration_file(&file.name)).collect(),
    };
    candidates.sort_by(|a, b| a.name.cmp(&b.name));
    let mut skipped = Vec::new();
    for file in candidates {
        let usable = list(file).and_then(|list| if desired.is_none() { pod_network(list) } else { Ok(list) });
        let usable = usable.and_then(|list| extensible(file, list, copied));
        match usable.and_then(|list| if copied { Ok(list) } else { replaceable(file, list, files, kind) }) {
            Ok(list) => return (Some(ConfTarget { file, list_name: list_name(&file.name), list }), skipped),
            Err(error) => {
                let may_be_used = error.may_be_used();
                skipped.push((file.name.as_str(), error));
                if may_be_used {
                    break;
                }
            }
        }
    }
    (None, skipped)
}

/// Whether the file configures a pod network.
pub(super) fn is_pod_network(file: &ConfFile) -> bool {
    list(file).and_then(pod_network).is_ok()
}

/// Returns the name of the list that is made of a file: `10-x.conflist` for `10-x.conf` and `10-x.json`.
fn list_name(name: &str) -> String {
    let stem = name.strip_suffix(".conf").or_else(|| name.strip_suffix(".json"));
    stem.map_or_else(|| name.to_owned(), |stem| format!("{stem}{LIST_SUFFIX}"))
}

/// Returns the configuration list in a file, or the one that is made of its single plugin.
///
/// # Errors
/// A runtime would reject the file.
fn list(file: &ConfFile) -> Result<String, UnusableList> {
    let text = str::from_utf8(&file.contents).map_err(|_| UnusableList::NotText)?;
    if !file.name.ends_with(LIST_SUFFIX) {
        return conflist::list_of(text);
    }
    match conflist::types(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(UnusableList::NotInlined) if !file.has_directory => Err(UnusableList::NoPlugins),
        Err(error) => Err(error),
    }
}

/// Refuses a list in which the plugin would not work, and one that another user can change: the copy, or the list that
/// replaces a single plugin, would be root's.
///
/// # Errors
/// [`UnusableList::Version`] or [`UnusableList::Untrusted`].
fn extensible(file: &ConfFile, list: String, copied: bool) -> Result<String, UnusableList> {
    conflist::check_version(&list)?;
    let is_new_file = copied || !file.name.ends_with(LIST_SUFFIX);
    match file.untrusted.as_ref().filter(|_| is_new_file) {
        Some(why) => Err(UnusableList::Untrusted(why.clone())),
        None => Ok(list),
    }
}

/// Refuses a list that is made of a single plugin if another tool has a list of that name.
fn replaceable(file: &ConfFile, list: String, files: &[&ConfFile], kind: &str) -> Result<String, UnusableList> {
    let name = list_name(&file.name);
    // A list that has the plugin's entry was made of this file by an earlier installation.
    let foreign = |other: &ConfFile| {
        let text = String::from_utf8_lossy(&other.contents);
        other.name == name && conflist::of_type(&text, kind).is_ok_and(|own| own.is_empty())
    };
    let is_foreign = name != file.name && files.iter().any(|other| foreign(other));
    if is_foreign { Err(UnusableList::Twice(name)) } else { Ok(list) }
}

/// Refuses lists that may come first in the directory and are not the cluster network.
///
/// # Errors
/// [`UnusableList::Multus`], [`UnusableList::Loopback`], or a runtime would reject the list.
fn pod_network(list: String) -> Result<String, UnusableList> {
    let types = conflist::types(&list)?;
    if matches!(types.first().map(String::as_str), Some("multus" | "multus-shim")) {
        return Err(UnusableList::Multus);
    }
    if types.iter().all(|kind| kind == "loopback") { Err(UnusableList::Loopback) } else { Ok(list) }
}

#[cfg(test)]
mod tests;
