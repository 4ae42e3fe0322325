//! The plugin's entry in the cluster network's configuration list: in the list itself, or in a copy that runtimes use
//! instead, the own list.

use super::conflist::{ConfList, UnusableList, list_name};
use super::plan::{Change, ConfFile, Content, DesiredFile, FoundState, InstallPlan, ListEntry, OWN_LIST, Obstacle};
use super::record::{Digest, FileRecord, Role, with_newest};
use crate::cni::{CNI_CONF_DIR, OWN_TYPES};
use crate::host_path::HostPath;
use serde_json::Value;
use std::collections::BTreeSet;
use std::{iter, slice};

/// The programs of Multus: of its daemon's client, and without a daemon.
const MULTUS: [&str; 2] = ["multus-shim", "multus"];
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

    /// Adds the entry to a copy of the list, if that is desired and runtimes would use the copy; otherwise to the list that
    /// is really called. The last copy stays if its source is missing or unusable.
    pub(super) fn plan(&self, plan: &mut InstallPlan) {
        let (sources, own) = (self.sources(), self.path(OWN_LIST));
        let obstacle = self.desired.own_list.then(|| self.obstacle(&sources)).flatten();
        let copies = self.desired.own_list && obstacle.is_none();
        plan.notes.extend(obstacle.map(|obstacle| {
            format!("{own}: not written, the plugin's entry is in the cluster network's list instead: {obstacle}")
        }));
        let recorded = self.found.record.files.get(&own).and_then(|file| file.source.as_deref());
        let last = recorded.filter(|_| copies).zip(ConfList::parse(self.found.text(&own)).ok());
        let multus = if copies { None } else { self.multus(&sources) };
        let called = match &multus {
            Some((_, MultusCall::File(name))) => Some(name.as_str()),
            Some((file, MultusCall::Elsewhere(list))) if self.desired.file.is_none() => {
                plan.notes.push(format!("{}: skipped: {}", self.path(file), UnusableList::Multus));
                let (dir, path) = (&self.desired.dir, self.path(file));
                let missing = format!(
                    "missing: the cluster network's list in {dir}: {path} calls {list}; set --conf-dir (cniConfDir) to its \
                     directory, or use an attachment (--chained=false)"
                );
                return plan.add(Obstacle::Waits, missing);
            }
            _ => None,
        };
        let (target, skipped) = self.choose(&sources, self.desired.file.as_deref().or(called), copies);
        plan.notes.extend(skipped.iter().map(|(name, why)| format!("{}: skipped: {why}", self.path(name))));
        // Another process may just be writing the list that was copied: a later one does not take its place.
        let target = target.filter(|(name, _)| last.as_ref().is_none_or(|(source, _)| name <= source));
        let Some((name, list)) = target else {
            let source = last.as_ref().map(|(source, _)| *source);
            plan.add(Obstacle::Waits, self.missing(copies, &skipped, source));
            if let Some((source, list)) = last {
                self.write_copy(&list, source, plan);
            }
            return;
        };
        if self.has_other_programs(name, list, plan) {
            return;
        }
        self.note_other_meshes(name, list, plan);
        if copies {
            // An earlier installation may have added its entry to the list itself.
            return self.write_copy(&list.without(self.kind()), name, plan);
        }
        self.write_entry(name, list, multus.is_some(), plan);
        if let Some((file, MultusCall::Embedded(false))) = multus {
            let (file, path) = (self.path(file), self.path(&list_name(name)));
            let missing = format!(
                "missing: the plugin's entry in the key delegates of {file}: Multus calls this copy of the cluster \
                 network's list, which lacks the plugin, so pods start without rules; restart Multus, which then copies \
                 {path}, or replace delegates by \"clusterNetwork\": \"{path}\""
            );
            plan.add(Obstacle::Waits, missing);
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
                    let is_named = self.found.text(&self.path(name)).contains(OWN_LIST);
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

    fn write_copy(&self, list: &ConfList, source: &str, plan: &mut InstallPlan) {
        let mut entry = self.desired.value.clone();
        entry[CNI_CONF_DIR] = self.desired.dir.to_string().into();
        let (path, content) = (self.path(OWN_LIST), Content::Text(list.with(&entry).text()));
        plan.write(&DesiredFile { path: path.clone(), role: Role::OwnList, content }, self.found);
        if let Some(record) = plan.record.files.get_mut(&path) {
            (record.plugin, record.source) = (Some(self.kind().to_owned()), Some(source.to_owned()));
        }
    }

    /// Writes the list with the entry if it differs. A list that is made of a single configuration replaces that; runtimes
    /// use the single configuration until it is removed: its name sorts first.
    fn write_entry(&self, name: &str, list: &ConfList, beside_multus: bool, plan: &mut InstallPlan) {
        let (single, path, kind) = (self.path(name), self.path(&list_name(name)), self.kind());
        let (earlier, is_single) = (self.found.record.files.get(&path), single != path);
        if is_single && (beside_multus || self.multus_program().is_some()) {
            let why = format!(
                "can't add the plugin to {single}: it is a single configuration, which a list would replace, and Multus \
                 may name it; make it a list ({path}) with the tool that writes it, or use an attachment (--chained=false)"
            );
            return plan.add(Obstacle::Failed, why);
        }
        if let Some(file) = self.found.files.get(&path).filter(|_| is_single && earlier.is_none()) {
            return plan.refuse(&path, Role::Entry, file);
        }
        let existing = self.found.configurations.get(&path.name()).and_then(|file| file.list.as_ref().ok());
        let entries = existing.map(|list| list.digests(kind)).unwrap_or_default();
        let desired = Digest::of_value(&self.desired.value);
        if is_single || entries != slice::from_ref(&desired) {
            let mode = self.found.files.get(&single).map_or(Role::Entry.mode(), |file| file.mode);
            let change = Change::Text(list.with(&self.desired.value).text(), mode);
            plan.actions.push(self.found.action(&path, Role::Entry, change));
        }
        if is_single {
            plan.actions.push(self.found.action(&single, Role::Entry, Change::Remove));
        }
        let is_ours = |digest: &Digest| earlier.is_some_and(|record| record.sha256.contains(digest));
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
        let conf: Value = serde_json::from_str(self.found.text(&self.path(file))).ok()?;
        let conf = if conf["plugins"].is_array() { &conf["plugins"][0] } else { &conf };
        let network = conf["clusterNetwork"].as_str().unwrap_or_default();
        let named = |(_, file): &&(&str, &ConfFile)| file.list.as_ref().is_ok_and(|list| list.name() == network);
        let call = if network.is_empty() {
            let delegate = &conf["delegates"][0];
            let plugins = delegate["plugins"].as_array().into_iter().flatten().chain(iter::once(delegate));
            MultusCall::Embedded(plugins.into_iter().any(|plugin| plugin["type"] == self.kind()))
        } else if let Some((name, _)) = sources.iter().find(named) {
            MultusCall::File((*name).to_owned())
        } else {
            // In the container of Multus, the node is below /host.
            let mut paths =
                [Some(network), network.strip_prefix("/host")].into_iter().flatten().filter_map(HostPath::new);
            let dir = &self.desired.dir;
            match paths.find(|path| path == dir || path.parent() == *dir) {
                // The directory stands for its first list. The own list is removed here, and Multus must be restarted.
                Some(path) if path == *dir || path.name() == OWN_LIST => return None,
                Some(path) => MultusCall::File(path.name()),
                None => MultusCall::Elsewhere(network.to_owned()),
            }
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
        let why = match self.found.programs.iter().find(|(_, names)| has_one(names)) {
            Some((directory, _)) => format!(
                "the runtime has the plugins of {list_path} in {directory}; select this directory (--bin-dir {directory}, \
                 cniBinDir)"
            ),
            None if here.iter().any(|name| !is_own(name)) => format!(
                "{own} has other plugins, but none of {list_path} ({}); select the directory in which the runtime finds \
                 them (--bin-dir, cniBinDir)",
                others.join(", ")
            ),
            None => return false,
        };
        plan.add(Obstacle::Failed, format!("can't install the program: {why}"));
        true
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
                Err(error) => skipped.push((name, error)),
            }
            if let Some((_, UnusableList::Unsupported(_))) = skipped.last() {
                break;
            }
        }
        (None, skipped)
    }

    /// Returns what the installation waits for if no list can be copied or extended, with the next step. `source` is that
    /// of the last copy, which pods start with.
    fn missing(&self, copies: bool, skipped: &Skipped<'_>, source: Option<&str>) -> String {
        let last = if source.is_some() { "; pods start with the last copy" } else { "" };
        if let Some((name, reason @ UnusableList::Unsupported(_))) = skipped.last() {
            let (changed, path) = (if copies { "copied" } else { "extended" }, self.path(name));
            return format!(
                "missing: a list that can be {changed}: runtimes may use {path} ({reason}){last}; change or remove this file"
            );
        }
        let named = self.desired.file.as_deref().or(source);
        let what =
            named.map_or_else(|| "the cluster network's configuration".to_owned(), |name| format!("a valid {name}"));
        let (dir, own) = (&self.desired.dir, self.path(OWN_LIST));
        let next = match source {
            Some(_) => format!(" of it; to copy another list now, delete {own}"),
            None => String::new(),
        };
        format!("missing: {what} in {dir}{last}{next}; check the pods of the cluster network on this node")
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
pub(super) fn pod_network(file: &ConfFile) -> Result<&ConfList, UnusableList> {
    let list = file.list.as_ref().map_err(Clone::clone)?;
    match list.types().next() {
        Some(first) if MULTUS.contains(&first) => Err(UnusableList::Multus),
        _ if list.types().all(|kind| kind == "loopback") => {
            Err(UnusableList::Invalid("configuration of the loopback interface".into()))
        }
        _ => Ok(list),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::install::plan::{DesiredState, FoundFile};
    use crate::agent::install::reconcile::reconcile;
    use serde_json::json;

    const LISTED: &str = r#"{"name":"n","plugins":[{"type":"a"}]}"#;
    const SINGLE: &str = r#"{"name":"n","type":"a"}"#;

    fn dir() -> HostPath {
        "/net.d".parse().expect("a path")
    }

    /// Returns a directory with these files.
    fn found(files: &[(&str, &str)]) -> FoundState {
        let mut found = FoundState::default();
        for (name, text) in files {
            let digest = Digest::of(text.as_bytes());
            let file = FoundFile { digest, text: Some((*text).to_owned()), mode: 0o644, trusted: true };
            found.files.insert(dir().join(name), file);
            let file = ConfFile { list: ConfList::of_file(name, text), untrusted: None };
            found.configurations.insert((*name).to_owned(), file);
        }
        found
    }

    fn desired(file: Option<&str>) -> ListEntry {
        ListEntry { dir: dir(), file: file.map(str::to_owned), value: json!({"type": "detour"}), own_list: false }
    }

    /// Returns the file that gets the entry, and the files that were skipped before it.
    fn chosen(files: &[(&str, &str)], named: Option<&str>) -> (Option<String>, Vec<String>) {
        let (found, desired) = (found(files), desired(named));
        let list = ClusterList { desired: &desired, bin_dir: None, found: &found };
        let (target, skipped) = list.choose(&list.sources(), named, false);
        let reasons = skipped.iter().map(|(name, reason)| format!("{name}: {reason}")).collect();
        (target.map(|(name, _)| name.to_owned()), reasons)
    }

    fn first(files: &[(&str, &str)], named: Option<&str>) -> Option<String> {
        chosen(files, named).0
    }

    #[test]
    fn the_first_usable_file_by_name_is_chosen() {
        let broken = [("05-x.conflist", "{"), ("20-b.conflist", LISTED), ("10-a.conf", SINGLE)];
        assert_eq!(first(&broken, None).as_deref(), Some("10-a.conf"));
        assert_eq!(first(&[("05-x.conflist", "{")], None), None);
        assert_eq!(first(&[("05-x.conflist", SINGLE)], None), None);
        assert_eq!(first(&[("05-x.json", SINGLE)], None).as_deref(), Some("05-x.json"));
        assert_eq!(list_name("05-x.json"), "05-x.conflist");
    }

    /// Go ignores the case of keys, so runtimes use this file first.
    #[test]
    fn a_file_with_keys_in_another_case_is_not_passed_over() {
        let other_case = r#"{"NAME":"x","Type":"bridge"}"#;
        let (target, skipped) = chosen(&[("05-x.conf", other_case), ("10-a.conflist", LISTED)], None);
        assert_eq!(target, None);
        assert!(skipped[0].contains("05-x.conf: expected the key \"type\", got \"Type\""), "{skipped:?}");
    }

    #[test]
    fn a_named_file_is_found_by_its_original_and_its_list_name() {
        let both = [("10-a.conflist", LISTED), ("20-b.conflist", LISTED)];
        assert_eq!(first(&both, Some("20-b.conflist")).as_deref(), Some("20-b.conflist"));
        assert_eq!(first(&both, Some("10-a.conf")).as_deref(), Some("10-a.conflist"));
        assert_eq!(first(&both, Some("30-c.conf")), None);
    }

    #[test]
    fn multus_and_loopback_are_skipped_unless_named() {
        let multus = r#"{"name":"m","type":"multus-shim"}"#;
        let loopback = r#"{"name":"lo","type":"loopback"}"#;
        let all = [("00-multus.conf", multus), ("05-lo.conf", loopback), ("10-a.conflist", LISTED)];
        assert_eq!(first(&all, None).as_deref(), Some("10-a.conflist"));
        assert_eq!(first(&all, Some("00-multus.conf")).as_deref(), Some("00-multus.conf"));
    }

    /// Runtimes use the single configuration, whose name sorts first.
    #[test]
    fn a_list_of_the_same_name_is_replaced_only_if_an_installation_made_it() {
        let ours = r#"{"name":"n","plugins":[{"type":"a"},{"type":"detour"}]}"#;
        let state = DesiredState { entry: Some(desired(None)), ..DesiredState::default() };
        let mut found = found(&[("10-a.conf", SINGLE), ("10-a.conflist", ours)]);
        let plan = reconcile(&state, &found).expect("a plan");
        let refused = plan.unmet().expect("refused");
        assert!(refused.starts_with("can't write /net.d/10-a.conflist: it belongs to another owner"), "{refused}");
        assert_eq!(plan.actions, []);
        let sha256 = vec![Digest::of_value(&json!({"type": "detour"}))];
        let record = FileRecord { role: Role::Entry, sha256, plugin: Some("detour".into()), source: None };
        found.record.files.insert(dir().join("10-a.conflist"), record);
        let plan = reconcile(&state, &found).expect("a plan");
        let actions: Vec<_> = plan.actions.iter().map(ToString::to_string).collect();
        assert_eq!(actions, ["write /net.d/10-a.conflist (mode 0644)", "remove /net.d/10-a.conf"]);
    }
}
