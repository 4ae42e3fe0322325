//! The plugin's entry in the cluster network's plugin list: in the list itself, or in a copy that runtimes use instead,
//! the own list.

use super::{add_text, with_newest};
use crate::agent::install::conflist::{self, UnusableList};
use crate::agent::install::digest::Digest;
use crate::agent::install::error::InstallError;
use crate::agent::install::plan::{FileAction, InstallPlan};
use crate::agent::install::state::{
    ConfFile, CopiedList, EditedList, FoundFile, FoundState, OWN_LIST, PRIVATE_MODE, PreviousContent, Role,
};
use crate::agent::install::target;
use crate::cni::CNI_CONF_DIR;
use crate::host_path::HostPath;
use serde_json::Value;
use std::time::Duration;

/// How long the source of an own list must be unusable before another file may replace it: a process that writes it in
/// place truncates it first.
pub(super) const SOURCE_TIMEOUT: Duration = Duration::from_millis(500);

/// The cluster network's plugin list, and the entry that it gets.
pub(super) struct ClusterList<'a> {
    pub(super) dir: &'a HostPath,
    /// The name of the list's file; `None` for the one that runtimes would use.
    pub(super) file: Option<&'a str>,
    pub(super) entry: &'a Value,
    pub(super) found: &'a FoundState,
}

impl<'a> ClusterList<'a> {
    fn kind(&self) -> &'a str {
        self.entry["type"].as_str().unwrap_or_default()
    }

    fn own_list(&self) -> HostPath {
        self.dir.join(OWN_LIST)
    }

    /// Returns the files in the directory except the own list of this or another release. A file of that name is one if
    /// a record lists it, or if it has the key that only an own list has.
    fn sources(&self) -> Vec<&'a ConfFile> {
        let (found, path) = (self.found, self.own_list());
        let is_recorded =
            found.record.files.contains_key(&path) || found.sharers(found.recorded_path(&path)).next().is_some();
        let is_own = |file: &&ConfFile| {
            let text = String::from_utf8_lossy(&file.contents);
            file.name == OWN_LIST && (is_recorded || conflist::is_own_list(&text))
        };
        found.configurations.iter().filter(|file| !is_own(file)).collect()
    }

    /// Returns why runtimes would not use the own list, or must not.
    fn obstacle(&self, sources: &[&ConfFile]) -> Option<String> {
        let obstacle = |file: &&ConfFile| match target::list(file).and_then(target::pod_network) {
            Err(UnusableList::Multus) => {
                Some(format!("{} is a configuration of Multus, which the own list would bypass", file.name))
            }
            Ok(_) if file.name.as_str() <= OWN_LIST => Some(format!("runtimes use {} before it", file.name)),
            _ => None,
        };
        sources.iter().find_map(obstacle)
    }

    /// Adds the entry to a copy of the list. If runtimes would not use the copy, the list itself gets the entry.
    ///
    /// # Errors
    /// The own list, or an entry of the same type in the list, belongs to another release.
    pub(super) fn copy(&self, plan: &mut InstallPlan) -> Result<(), InstallError> {
        let (found, path, kind) = (self.found, self.own_list(), self.kind());
        if let Some(owner) = found.owner(found.recorded_path(&path)) {
            return Err(InstallError::owned_list(&path, owner));
        }
        let sources = self.sources();
        if let Some(obstacle) = self.obstacle(&sources) {
            let note = format!("{path}: not used: {obstacle}; the plugin's entry is in the list itself instead");
            plan.notes.push(note);
            return self.edit(plan);
        }
        let mut entry = self.entry.clone();
        entry[CNI_CONF_DIR] = self.dir.to_string().into();
        let (target, mut skipped) = target::choose(&sources, self.file, kind, true);
        let written = target.and_then(|target| {
            // The entry of an earlier installation in the list itself.
            let list = conflist::without(&target.list, kind).map(|list| list.unwrap_or(target.list.clone()));
            match list.and_then(|list| conflist::rewrite(&list, &entry)) {
                Ok(text) => Some((target, text)),
                Err(reason) => {
                    skipped.push((&target.file.name, reason));
                    None
                }
            }
        });
        let copied = found.record.files.get(&path).and_then(|owned| owned.copy_of.clone());
        let current = found.files.get(&path).and_then(|file| file.text.as_deref());
        let kept = current.and_then(|text| conflist::rewrite(text, &entry).ok());
        let holds = copied.as_ref().filter(|_| kept.is_some()).is_some_and(|copied| {
            let is_usable = |file: &&&ConfFile| file.name == copied.source && target::list(file).is_ok();
            let is_source = written.as_ref().is_some_and(|(target, _)| target.file.name == copied.source);
            !is_source && !sources.iter().any(|file| is_usable(&file))
        });
        if holds {
            plan.source_timeout = Some(SOURCE_TIMEOUT);
        }
        // Another process may just be writing the source.
        let is_held = holds && !found.source_expired;
        if !is_held {
            plan.notes.extend(skipped.iter().map(|(name, reason)| self.skipped(name, reason)));
        }
        let (text, copy_of) = match written.filter(|_| !is_held) {
            Some((target, text)) => {
                let source = self.dir.join(&target.file.name);
                self.check_releases(&source)?;
                plan.notes.extend(self.other_meshes(&source, &target.list));
                (text, Some(CopiedList { source: target.file.name.clone(), kind: kind.to_owned() }))
            }
            None => {
                let stays = if kept.is_some() { "; until then, pods start with the last copy of it" } else { "" };
                if !is_held {
                    plan.waits_for = Some(self.missing(stays));
                }
                let Some(text) = kept else { return Ok(()) };
                (text, copied)
            }
        };
        let is_intact = |file: &FoundFile| file.mode == PRIVATE_MODE && file.trusted && found.is_ours(&path);
        let before = plan.actions.len();
        add_text(&path, Role::Configuration, &text, PreviousContent::Nothing, found, plan);
        plan.follows = plan.actions.len() > before && found.files.get(&path).is_some_and(is_intact);
        if let Some(owned) = plan.record.files.get_mut(&path) {
            owned.copy_of = copy_of;
        }
        Ok(())
    }

    /// Adds the entry to the list.
    ///
    /// # Errors
    /// Another release has an entry of the same type in the list.
    pub(super) fn edit(&self, plan: &mut InstallPlan) -> Result<(), InstallError> {
        let (found, dir, entry, kind) = (self.found, self.dir, self.entry, self.kind());
        let (target, skipped) = target::choose(&self.sources(), self.file, kind, false);
        plan.notes.extend(skipped.iter().map(|(name, reason)| self.skipped(name, reason)));
        let Some(target) = target else {
            plan.waits_for = Some(self.missing(""));
            return Ok(());
        };
        let (path, single) = (dir.join(&target.list_name), dir.join(&target.file.name));
        self.check_releases(&path)?;
        match conflist::rewrite(&target.list, entry) {
            Ok(text) => write_list(&path, &single, target.file, text, found, plan),
            Err(reason) => plan.notes.push(format!("{single}: skipped: {reason}")),
        }
        plan.notes.extend(self.other_meshes(&path, &target.list));
        let earlier = found.record.lists.get(&path);
        let ours = with_newest(&own_entries(earlier, &target.list, kind), Digest::of_value(entry));
        let text = || String::from_utf8_lossy(&target.file.contents).into_owned();
        let converted = (single != path).then(|| (single.clone(), text(), target.file.mode));
        let recorded = found.recorded_path(&path);
        let listed_by = found.others.values().filter_map(|record| record.lists.get(recorded));
        let earlier = earlier.into_iter().chain(listed_by);
        let single = converted.or_else(|| earlier.filter_map(|listed| listed.single.clone()).next());
        plan.record.lists.insert(path, EditedList { kind: kind.to_owned(), ours, single });
        Ok(())
    }

    /// Checks that no other release has an entry of the same type in the list at `path` or in its own list.
    fn check_releases(&self, path: &HostPath) -> Result<(), InstallError> {
        let (found, kind, own_list) = (self.found, self.kind(), self.own_list());
        let recorded = found.recorded_path(path);
        let mut listed_by =
            found.others.iter().filter_map(|(release, record)| Some((release, record.lists.get(recorded)?)));
        if let Some((owner, _)) = listed_by.find(|(_, listed)| listed.kind == kind) {
            return Err(InstallError::owned_entry(kind, path, owner));
        }
        let mut copied_by = found.sharers(found.recorded_path(&own_list));
        let has_kind = |copy: &CopiedList| copy.kind == kind;
        match copied_by.find(|(.., owned)| owned.copy_of.as_ref().is_some_and(has_kind)) {
            Some((owner, ..)) => Err(InstallError::owned_entry(kind, &own_list, owner)),
            None => Ok(()),
        }
    }

    fn skipped(&self, name: &str, reason: &UnusableList) -> String {
        format!("{}: skipped: {reason}", self.dir.join(name))
    }

    fn missing(&self, more: &str) -> String {
        let name = self
            .file
            .map_or_else(|| "the cluster network's configuration".to_owned(), |name| format!("a valid {name}"));
        format!("{name} in {}, to which the plugin is added{more}", self.dir)
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

/// Writes the list if it differs, and then removes the single-plugin configuration from which it was made. Runtimes use
/// that until it is removed: its name sorts first.
fn write_list(
    path: &HostPath,
    single: &HostPath,
    file: &ConfFile,
    text: String,
    found: &FoundState,
    plan: &mut InstallPlan,
) {
    let existing = found.configurations.iter().find(|other| other.name == path.name());
    let before = existing.map(|other| String::from_utf8_lossy(&other.contents).into_owned());
    if before.as_ref() != Some(&text) {
        plan.actions.push(FileAction::Write {
            path: path.clone(),
            text,
            mode: file.mode,
            before,
            follow: true,
            secret: false,
        });
    }
    if single != path {
        let before = Some(String::from_utf8_lossy(&file.contents).into_owned());
        plan.actions.push(FileAction::Remove { path: single.clone(), before });
    }
}

/// Returns the digests of the list's entries that the record attributes to the installation.
fn own_entries(earlier: Option<&EditedList>, list: &str, kind: &str) -> Vec<Digest> {
    let is_ours = |digest: &Digest| earlier.is_some_and(|listed| listed.ours.contains(digest));
    conflist::digests(list, kind).into_iter().flatten().filter(is_ours).collect()
}
