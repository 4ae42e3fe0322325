//! The plugin's entry in the cluster network's configuration list: in the list itself, or in a copy that runtimes use
//! instead, the own list.

use super::conflist::{ConfList, UnusableList, list_name};
use super::plan::{Change, ConfFile, Content, DesiredFile, FileAction, FoundState, InstallPlan, ListEntry, OWN_LIST};
use super::record::{Digest, FileRecord, Role, with_newest};
use crate::cni::CNI_CONF_DIR;
use crate::host_path::HostPath;
use serde_json::Value;
use std::collections::BTreeSet;
use std::{iter, slice};

/// The programs of Multus: of its daemon's client, and without a daemon.
const MULTUS: [&str; 2] = ["multus-shim", "multus"];
/// The types of this program's configurations.
const OWN_TYPES: [&str; 3] = ["detour", "istio-cni", "excludedns"];
/// The types of other plugins that redirect traffic to a mesh.
const MESHES: [&str; 4] = ["istio-cni", "linkerd-cni", "kuma-cni", "consul-cni"];

/// The names of the configurations in the directory, and their lists.
type Sources<'a> = Vec<(&'a str, &'a ConfFile)>;
/// Files that were skipped, and the reasons.
type Skipped<'a> = Vec<(&'a str, UnusableList)>;

/// The cluster network's configuration list, and the entry that it gets.
pub(super) struct ClusterList<'a> {
    pub(super) desired: &'a ListEntry,
    /// The directory of the program.
    pub(super) bin_dir: Option<HostPath>,
    pub(super) found: &'a FoundState,
}

impl<'a> ClusterList<'a> {
    fn kind(&self) -> &'a str {
        self.desired.value["type"].as_str().unwrap_or_default()
    }

    fn path(&self, name: &str) -> HostPath {
        self.desired.dir.join(name)
    }

    fn text(&self, name: &str) -> &'a str {
        self.found.files.get(&self.path(name)).and_then(|file| file.text.as_deref()).unwrap_or_default()
    }

    /// Adds the entry to a copy of the list, if that is desired and runtimes would use the copy; otherwise to the list.
    pub(super) fn plan(&self, plan: &mut InstallPlan) {
        let sources = self.sources();
        match self.obstacle(&sources).filter(|_| self.desired.own_list) {
            None if self.desired.own_list => self.copy(&sources, plan),
            obstacle => {
                plan.notes.extend(obstacle.map(|obstacle| {
                    let path = self.path(OWN_LIST);
                    format!(
                        "{path}: not written, the plugin's entry is in the cluster network's list instead: {obstacle}"
                    )
                }));
                self.edit(&sources, plan);
            }
        }
    }

    /// Returns the files in the directory except the own list. A file of that name is one if the record lists it, or if it
    /// has the key that only an own list has.
    fn sources(&self) -> Sources<'a> {
        let is_recorded = self.found.record.files.contains_key(&self.path(OWN_LIST));
        let is_own = |(name, file): &(&str, &ConfFile)| {
            *name == OWN_LIST && (is_recorded || file.list.as_ref().is_ok_and(ConfList::is_own))
        };
        let files = self.found.configurations.iter().map(|(name, file)| (name.as_str(), file));
        files.filter(|file| !is_own(file)).collect()
    }

    /// Returns why runtimes would not use the own list, or must not.
    fn obstacle(&self, sources: &Sources<'_>) -> Option<String> {
        for (name, file) in sources {
            match pod_network(file) {
                // Multus invalidates its file when it ends, and truncates it when it starts.
                Err(error) if error == UnusableList::Multus || name.contains("multus") => {
                    let is_named = self.text(name).contains(OWN_LIST);
                    let restart =
                        if is_named { "; restart Multus on this node: its file names the own list" } else { "" };
                    return Some(format!("runtimes would bypass Multus ({name}){restart}"));
                }
                Err(UnusableList::Invalid(_)) => {}
                _ if *name < OWN_LIST => return Some(format!("runtimes may use {name} before it")),
                _ => {}
            }
        }
        // Multus removes its file when it ends, and later generates it from the first file in the directory.
        let program = self.multus_program()?;
        Some(format!("runtimes would bypass Multus ({program}); if it is not used, remove its program"))
    }

    /// Adds the entry to a copy of the list. The last copy stays if its source is missing or unusable.
    fn copy(&self, sources: &Sources<'a>, plan: &mut InstallPlan) {
        let mut entry = self.desired.value.clone();
        entry[CNI_CONF_DIR] = self.desired.dir.to_string().into();
        let last = ConfList::parse(self.text(OWN_LIST)).ok();
        let recorded = self.found.record.files.get(&self.path(OWN_LIST)).and_then(|file| file.source.as_deref());
        let last = last.zip(recorded);
        let (target, skipped) = self.choose(sources, self.desired.file.as_deref(), true);
        self.note_skipped(&skipped, plan);
        // Another process may just be writing the list that was copied: a later one does not take its place.
        match target.filter(|(name, _)| last.as_ref().is_none_or(|(_, source)| name <= source)) {
            Some((name, list)) => {
                if !self.has_other_programs(name, list, plan) {
                    self.note_other_meshes(name, list, plan);
                    // An earlier installation may have added its entry to the list itself.
                    self.write_copy(&list.without(self.kind()).with(&entry), name, plan);
                }
            }
            None => {
                plan.waits_for = Some(self.missing("copied", &skipped, recorded.filter(|_| last.is_some())));
                if let Some((list, source)) = last {
                    self.write_copy(&list.with(&entry), source, plan);
                }
            }
        }
    }

    fn write_copy(&self, list: &ConfList, source: &str, plan: &mut InstallPlan) {
        let path = self.path(OWN_LIST);
        let content = Content::Text(list.text());
        plan.write(&DesiredFile { path: path.clone(), role: Role::OwnList, content }, self.found);
        if let Some(record) = plan.record.files.get_mut(&path) {
            (record.plugin, record.source) = (Some(self.kind().to_owned()), Some(source.to_owned()));
        }
    }

    /// Adds the entry to the list that is really called.
    fn edit(&self, sources: &Sources<'a>, plan: &mut InstallPlan) {
        let multus = self.multus(sources);
        let called = match &multus {
            Some((_, MultusCall::File(name))) => Some(name.as_str()),
            Some((file, MultusCall::Elsewhere(list))) if self.desired.file.is_none() => {
                self.note_skipped(&vec![(*file, UnusableList::Multus)], plan);
                let (dir, file) = (&self.desired.dir, self.path(file));
                plan.waits_for = Some(format!(
                    "the cluster network's list in {dir}: {file} calls {list}; set --conf-dir (cniConfDir) to its \
                     directory, or use an attachment (--chained=false)"
                ));
                return;
            }
            _ => None,
        };
        let (target, skipped) = self.choose(sources, self.desired.file.as_deref().or(called), false);
        self.note_skipped(&skipped, plan);
        let Some((name, list)) = target else {
            plan.waits_for = Some(self.missing("extended", &skipped, None));
            return;
        };
        if self.has_other_programs(name, list, plan) {
            return;
        }
        self.note_other_meshes(name, list, plan);
        self.write_entry(name, list, multus.is_some(), plan);
        if let Some((file, MultusCall::Embedded(false))) = multus {
            let (file, path) = (self.path(file), self.path(&list_name(name)));
            plan.waits_for = Some(format!(
                "the plugin's entry in the key delegates of {file}: Multus calls this copy of the cluster network's list, \
                 which lacks the plugin, so pods start without rules; restart Multus, which then copies {path}, or \
                 replace delegates by \"clusterNetwork\": \"{path}\""
            ));
        }
    }

    /// Writes the list with the entry if it differs. A list that is made of a single configuration replaces that; runtimes
    /// use the single configuration until it is removed: its name sorts first.
    fn write_entry(&self, name: &str, list: &ConfList, beside_multus: bool, plan: &mut InstallPlan) {
        let (single, path) = (self.path(name), self.path(&list_name(name)));
        let earlier = self.found.record.files.get(&path);
        let current = self.found.files.get(&path);
        if single != path {
            if beside_multus || self.multus_program().is_some() {
                plan.refused = Some(format!(
                    "can't add the plugin to {single}: it is a single configuration, which a list would replace, and Multus \
                     may name it; make it a list ({path}) with the tool that writes it, or use an attachment \
                     (--chained=false)"
                ));
                return;
            }
            if let Some(file) = current.filter(|_| earlier.is_none()) {
                return plan.refuse(&path, Role::Entry, file);
            }
        }
        let (kind, desired) = (self.kind(), Digest::of_value(&self.desired.value));
        let is_ours = |digest: &Digest| earlier.is_some_and(|record| record.sha256.contains(digest));
        let existing = self.found.configurations.get(&path.name()).and_then(|file| file.list.as_ref().ok());
        let entries = existing.map(|list| list.digests(kind)).unwrap_or_default();
        let action = |path: &HostPath, change| {
            let before = self.found.files.get(path).and_then(|file| file.text.clone());
            FileAction { path: path.clone(), role: Role::Entry, change, before }
        };
        if entries != slice::from_ref(&desired) || single != path {
            let mode = self.found.files.get(&single).map_or(Role::Entry.mode(), |file| file.mode);
            plan.actions.push(action(&path, Change::Text(list.with(&self.desired.value).text(), mode)));
        }
        if single != path {
            plan.actions.push(action(&single, Change::Remove));
        }
        let sha256 = with_newest(entries.into_iter().filter(is_ours), desired);
        let record = FileRecord { role: Role::Entry, sha256, plugin: Some(kind.to_owned()), source: None };
        plan.record.files.insert(path, record);
    }

    /// Returns the program of Multus, if it is beside the program.
    fn multus_program(&self) -> Option<HostPath> {
        let (own, names) = self.found.programs.get_key_value(self.bin_dir.as_ref()?)?;
        MULTUS.into_iter().find(|name| names.contains(*name)).map(|name| own.join(name))
    }

    /// Returns the configuration of Multus that runtimes use, and how Multus calls the cluster network.
    fn multus(&self, sources: &Sources<'a>) -> Option<(&'a str, MultusCall)> {
        let used = |(_, file): &&(&str, &ConfFile)| matches!(pod_network(file), Ok(_) | Err(UnusableList::Multus));
        let (file, _) = sources.iter().find(used).filter(|(_, file)| pod_network(file).is_err())?;
        let conf: Value = serde_json::from_str(self.text(file)).ok()?;
        let conf = if conf["plugins"].is_array() { &conf["plugins"][0] } else { &conf };
        let network = conf["clusterNetwork"].as_str().unwrap_or_default();
        let call = if network.contains('/') {
            let on_node = network.strip_prefix("/host").filter(|path| path.starts_with('/'));
            let mut paths = [Some(network), on_node].into_iter().flatten().filter_map(HostPath::new);
            match paths.find(|path| path.parent() == self.desired.dir || *path == self.desired.dir) {
                // The directory stands for its first list. The own list is removed here, and Multus must be restarted.
                Some(path) if path == self.desired.dir || path.name() == OWN_LIST => return None,
                Some(path) => MultusCall::File(path.name()),
                None => MultusCall::Elsewhere(network.to_owned()),
            }
        } else if network.is_empty() {
            let delegate = &conf["delegates"][0];
            let plugins = delegate["plugins"].as_array().into_iter().flatten().chain(iter::once(delegate));
            MultusCall::Embedded(plugins.into_iter().any(|plugin| plugin["type"] == self.kind()))
        } else {
            let named = |(_, file): &&(&str, &ConfFile)| file.list.as_ref().is_ok_and(|list| list.name() == network);
            sources.iter().find(named).map_or_else(
                || MultusCall::Elsewhere(format!("the network {network:?}")),
                |(name, _)| MultusCall::File((*name).to_owned()),
            )
        };
        Some((*file, call))
    }

    /// Refuses the plan if the runtime can't use the directory of the program: the list's plugins are in another one. A
    /// directory without plugins is no evidence: the installation may have created it.
    fn has_other_programs(&self, name: &str, list: &ConfList, plan: &mut InstallPlan) -> bool {
        let (Some(own), list_path) = (&self.bin_dir, self.path(name)) else { return false };
        let others: Vec<_> = list.types().filter(|kind| !OWN_TYPES.contains(kind)).collect();
        let has_one = |names: &BTreeSet<String>| others.iter().any(|kind| names.contains(*kind));
        let is_own = |name: &str| OWN_TYPES.contains(&name) || MULTUS.contains(&name) || name.starts_with('.');
        let here = self.found.programs.get(own).cloned().unwrap_or_default();
        if others.is_empty() || has_one(&here) {
            return false;
        }
        plan.refused = match self.found.programs.iter().find(|(_, names)| has_one(names)) {
            Some((directory, _)) => Some(format!(
                "can't install the program: the runtime has the plugins of {list_path} in {directory}; select this \
                 directory (--bin-dir {directory}, cniBinDir)"
            )),
            None if here.iter().any(|name| !is_own(name)) => Some(format!(
                "can't install the program: {own} has other plugins, but none of {list_path} ({}); select the directory \
                 in which the runtime finds them (--bin-dir, cniBinDir)",
                others.join(", ")
            )),
            None => None,
        };
        plan.refused.is_some()
    }

    /// Returns the first file by name that configures a pod network, as runtimes do, or the file `named`, and the files that
    /// were skipped before it. A `named` single configuration is also found as the list that an earlier installation made
    /// of it. Files after one that only runtimes can use are not chosen.
    fn choose(
        &self,
        sources: &Sources<'a>,
        named: Option<&str>,
        copied: bool,
    ) -> (Option<(&'a str, &'a ConfList)>, Skipped<'a>) {
        let find = |name: &str| sources.iter().copied().find(|(file, _)| *file == name);
        let candidates = match named {
            Some(name) => find(name).or_else(|| find(&list_name(name))).into_iter().collect(),
            None => sources.clone(),
        };
        let mut skipped = Vec::new();
        for (name, file) in candidates {
            let network = if named.is_some() { file.list.as_ref().map_err(Clone::clone) } else { pod_network(file) };
            // A copy, and the list that replaces a single configuration, would be root's.
            let is_new_file = copied || list_name(name) != name;
            let usable = network.and_then(|list| match file.untrusted.as_ref().filter(|_| is_new_file) {
                Some(why) => Err(UnusableList::Unsupported(format!("another user can change the file: {why}"))),
                None => list.check_version().map(|()| list),
            });
            match usable {
                Ok(list) => return (Some((name, list)), skipped),
                Err(error) => {
                    let may_be_used = matches!(error, UnusableList::Unsupported(_));
                    skipped.push((name, error));
                    if may_be_used {
                        break;
                    }
                }
            }
        }
        (None, skipped)
    }

    fn note_skipped(&self, skipped: &Skipped<'_>, plan: &mut InstallPlan) {
        let note = |(name, reason): &(&str, UnusableList)| format!("{}: skipped: {reason}", self.path(name));
        plan.notes.extend(skipped.iter().map(note));
    }

    /// Returns what the installation waits for if no list can be `changed` (copied or extended), with the next step.
    /// `copied` is the source of the last copy, which pods start with.
    fn missing(&self, changed: &str, skipped: &Skipped<'_>, copied: Option<&str>) -> String {
        let last = if copied.is_some() { "; pods start with the last copy" } else { "" };
        if let Some((name, reason @ UnusableList::Unsupported(_))) = skipped.last() {
            let path = self.path(name);
            return format!(
                "a list that can be {changed}: runtimes may use {path} ({reason}){last}; change or remove this file"
            );
        }
        let (dir, own) = (&self.desired.dir, self.path(OWN_LIST));
        let check = "check the pods of the cluster network on this node";
        match (self.desired.file.as_deref().or(copied), copied) {
            (Some(name), Some(_)) => {
                format!("a valid {name} in {dir}{last} of it; {check}; to copy another list now, delete {own}")
            }
            (Some(name), None) => format!("a valid {name} in {dir}; {check}"),
            (None, _) => format!("the cluster network's configuration in {dir}; {check}"),
        }
    }

    /// Notes the other plugins in the list that redirect traffic to a mesh.
    fn note_other_meshes(&self, name: &str, list: &ConfList, plan: &mut InstallPlan) {
        let path = self.path(&list_name(name));
        let others = list.types().filter(|other| *other != self.kind() && MESHES.contains(other));
        plan.notes.extend(others.map(|other| {
            format!(
                "{path}: plugin {other:?} in the same list also redirects traffic; uninstall it with the tool that added \
                 it"
            )
        }));
    }
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

/// Returns the list of a pod network.
fn pod_network(file: &ConfFile) -> Result<&ConfList, UnusableList> {
    let list = file.list.as_ref().map_err(Clone::clone)?;
    list.check_pod_network().map(|()| list)
}

#[cfg(test)]
mod tests;
