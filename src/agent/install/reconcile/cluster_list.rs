//! The plugin's entry in the cluster network's configuration list: in the list itself, or in a copy that runtimes use
//! instead, the own list.

use super::own_file::add_text;
use crate::agent::install::conflist::{self, UnusableList};
use crate::agent::install::digest::Digest;
use crate::agent::install::plan::{FileAction, InstallPlan};
use crate::agent::install::state::{
    ConfFile, CopiedList, EditedList, FoundFile, FoundState, OWN_LIST, OriginalList, PRIVATE_MODE, PreviousContent,
    Role, with_newest,
};
use crate::agent::install::target::{self, ConfTarget};
use crate::cni::CNI_CONF_DIR;
use crate::host_path::HostPath;
use serde_json::Value;
use std::time::Duration;

/// How long the source of an own list must be unusable before another file may replace it: a process that writes it in
/// place truncates it first.
pub(super) const SOURCE_TIMEOUT: Duration = Duration::from_millis(500);

/// A file that was skipped, and the reason.
type Skipped<'a> = (&'a str, UnusableList);
/// A list with entries of earlier installations, which must be reverted.
type Stale = Option<(HostPath, EditedList)>;

/// The text of the own list, and the list of which it is a copy.
struct Copy {
    text: String,
    copy_of: Option<CopiedList>,
}

/// The cluster network's configuration list, and the entry that it gets.
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

    /// Returns the files in the directory except the own list. A file of that name is one if it has the key that only an
    /// own list has, or if the record lists it. An installation that `edits` lists ignores a recorded file that another
    /// process replaced.
    fn sources(&self, edits: bool) -> Vec<&'a ConfFile> {
        let found = self.found;
        let is_recorded = found.record.files.contains_key(&self.own_list()) && !edits;
        let is_own = |file: &&ConfFile| {
            file.name == OWN_LIST && (is_recorded || conflist::is_own_list(&String::from_utf8_lossy(&file.contents)))
        };
        found.configurations.iter().filter(|file| !is_own(file)).collect()
    }

    /// Returns why runtimes would not use the own list, or must not.
    fn obstacle(&self, sources: &[&ConfFile]) -> Option<String> {
        let (mut names, mut is_chained) = (Vec::new(), false);
        for file in sources {
            let name = &file.name;
            match target::list(file).and_then(target::pod_network) {
                // Multus invalidates its file when it ends, and truncates it when it starts.
                Err(error) if error == UnusableList::Multus || name.contains("multus") => {
                    let is_named = String::from_utf8_lossy(&file.contents).contains(OWN_LIST);
                    let restart =
                        if is_named { "; restart Multus on this node: its file names the own list" } else { "" };
                    return Some(format!("runtimes would bypass Multus ({name}){restart}"));
                }
                Ok(_) if name == OWN_LIST => {
                    return Some(
                        "the file belongs to another tool, and runtimes use it; rename or remove it".to_owned(),
                    );
                }
                Ok(_) if name.as_str() < OWN_LIST => return Some(format!("runtimes use {name} before it")),
                Ok(list) => {
                    let entries = conflist::of_type(&list, "cilium-cni").unwrap_or_default();
                    is_chained |= entries.iter().any(|entry| entry.get("chaining-mode").is_some());
                    names.extend(conflist::name(&list));
                }
                Err(error) if error.may_be_used() && name.as_str() < OWN_LIST => {
                    return Some(format!("runtimes may use {name} before it"));
                }
                Err(_) => {}
            }
        }
        // Multus removes its file when it ends, and later generates it from the first file in the directory.
        if let Some(program) = &self.found.multus {
            return Some(format!("runtimes would bypass Multus ({program}); if it is not used, remove its program"));
        }
        // Cilium finds the list to which it adds itself by the name of the network.
        names.sort();
        let is_target = is_chained && names.windows(2).any(|pair| pair[0] == pair[1]);
        is_target.then(|| "Cilium (cni.chainingTarget) would add itself to the own list".to_owned())
    }

    /// Adds the entry to a copy of the list. If runtimes would not use the copy, the list itself gets the entry. Returns
    /// the list itself if it has entries of earlier installations.
    pub(super) fn copy(&self, plan: &mut InstallPlan) -> Stale {
        let sources = self.sources(false);
        if let Some(obstacle) = self.obstacle(&sources) {
            plan.notes.push(format!(
                "{}: not written, the plugin's entry is in the cluster network's list instead: {obstacle}",
                self.own_list()
            ));
            return self.edit(plan);
        }
        let mut entry = self.entry.clone();
        entry[CNI_CONF_DIR] = self.dir.to_string().into();
        let last = self.last_copy(&entry);
        let (next, skipped) = self.next_copy(&sources, &entry);
        if self.may_be_writing(&sources, last.as_ref(), next.is_some(), &skipped) {
            plan.source_timeout = Some(SOURCE_TIMEOUT);
            if !self.found.source_expired {
                match last {
                    Some(last) => self.write_copy(last, plan),
                    // Entries of earlier installations stay until then.
                    None => plan.waits_for = Some(self.missing(false)),
                }
                return None;
            }
        }
        plan.notes.extend(skipped.iter().map(|(name, reason)| self.skipped(name, reason)));
        let Some((target, copy)) = next else {
            plan.waits_for = Some(self.unusable("copied", &skipped, last.is_some()));
            last.into_iter().for_each(|last| self.write_copy(last, plan));
            return None;
        };
        let source = self.dir.join(&target.file.name);
        let stale = self.stale_entries(&source, &target.list, plan);
        plan.notes.extend(self.other_meshes(&source, &target.list));
        self.write_copy(copy, plan);
        stale
    }

    /// Returns the own list as it is, with `entry`; `None` if it is missing or damaged.
    fn last_copy(&self, entry: &Value) -> Option<Copy> {
        let text = self.found.files.get(&self.own_list())?.text.as_deref()?;
        let owned = self.found.record.files.get(&self.own_list());
        let copy_of = owned.and_then(|owned| owned.copy_of.clone());
        Some(Copy { text: conflist::rewrite(text, entry).ok()?, copy_of })
    }

    /// Returns the list that is copied now, its copy with `entry`, and the files that were skipped.
    fn next_copy(&self, sources: &[&'a ConfFile], entry: &Value) -> (Option<(ConfTarget<'a>, Copy)>, Vec<Skipped<'a>>) {
        let (target, mut skipped) = target::choose(sources, self.file, self.kind(), true);
        let Some(target) = target else { return (None, skipped) };
        // An earlier installation may have added its entry to the list itself.
        let others = conflist::without(&target.list, self.kind());
        match others.and_then(|others| conflist::rewrite(others.as_ref().unwrap_or(&target.list), entry)) {
            Ok(text) => {
                let copy_of = CopiedList { source: target.file.name.clone(), kind: self.kind().to_owned() };
                (Some((target, Copy { text, copy_of: Some(copy_of) })), skipped)
            }
            Err(reason) => {
                skipped.push((&target.file.name, reason));
                (None, skipped)
            }
        }
    }

    /// Whether another process may just be writing the source, or the first list that runtimes would use.
    fn may_be_writing(&self, sources: &[&ConfFile], last: Option<&Copy>, has_next: bool, skipped: &[Skipped]) -> bool {
        match last.and_then(|last| last.copy_of.as_ref()) {
            Some(copied) => !sources.iter().any(|file| is_usable_source(file, copied)),
            None => has_next && skipped.iter().any(|(_, reason)| reason.may_be_partial()),
        }
    }

    fn write_copy(&self, Copy { text, copy_of }: Copy, plan: &mut InstallPlan) {
        let (found, path) = (self.found, self.own_list());
        let file = found.files.get(&path);
        plan.notes.extend(file.and_then(|file| self.added(&path, file.text.as_deref()?, &text)));
        let is_intact = |file: &FoundFile| file.mode == PRIVATE_MODE && file.trusted && found.is_ours(&path);
        let before = plan.actions.len();
        add_text(&path, Role::Configuration, &text, PreviousContent::Nothing, found, plan);
        plan.follows = plan.actions.len() > before && file.is_some_and(is_intact);
        if let Some(owned) = plan.record.files.get_mut(&path) {
            owned.copy_of = copy_of;
        }
    }

    /// Returns the source if it has entries of earlier installations in the list itself, which must be reverted. If
    /// another tool made the source of the own list, records the entries, so that the uninstallation removes them.
    fn stale_entries(&self, source: &HostPath, list: &str, plan: &mut InstallPlan) -> Stale {
        let entries = conflist::of_type(list, self.kind()).unwrap_or_default();
        let latest = entries.last()?;
        let earlier = self.found.record.lists.get(source);
        let listed = EditedList {
            kind: self.kind().to_owned(),
            ours: entries.iter().map(Digest::of_value).collect(),
            original: earlier.and_then(|listed| listed.original.clone()),
        };
        if latest.get(CNI_CONF_DIR).is_none() {
            return Some((source.clone(), listed));
        }
        plan.record.lists.insert(source.clone(), listed);
        None
    }

    /// Adds the entry to the list.
    pub(super) fn edit(&self, plan: &mut InstallPlan) -> Stale {
        let (found, dir, entry, kind) = (self.found, self.dir, self.entry, self.kind());
        let (target, skipped) = target::choose(&self.sources(true), self.file, kind, false);
        plan.notes.extend(skipped.iter().map(|(name, reason)| self.skipped(name, reason)));
        let Some(target) = target else {
            plan.waits_for = Some(self.unusable("extended", &skipped, false));
            return None;
        };
        let path = dir.join(&target.list_name);
        plan.notes.extend(self.other_meshes(&path, &target.list));
        let earlier = found.record.lists.get(&path);
        let ours = with_newest(&own_entries(earlier, &target.list, kind), Digest::of_value(entry));
        let mut listed = EditedList { kind: kind.to_owned(), ours, original: None };
        match conflist::rewrite(&target.list, entry) {
            Ok(text) => {
                listed.original = self.original(&target, earlier, &text);
                write_list(&path, &dir.join(&target.file.name), target.file, text, found, plan);
            }
            Err(reason) => plan.notes.push(self.skipped(&target.file.name, &reason)),
        }
        plan.record.lists.insert(path, listed);
        None
    }

    /// Returns what an uninstallation restores instead of the list `text` that is written now; `None` if it only removes
    /// the entry, because another process changed the list with the entry.
    fn original(&self, target: &ConfTarget<'_>, earlier: Option<&EditedList>, text: &str) -> Option<OriginalList> {
        let (file, written) = (target.file, Digest::of(text.as_bytes()));
        let current = Digest::of(&file.contents);
        if let Some(earlier) = earlier.and_then(|listed| listed.original.as_ref())
            && earlier.edited.contains(&current)
        {
            return Some(OriginalList { edited: with_newest(&[current], written), ..earlier.clone() });
        }
        let has_entry = conflist::of_type(&target.list, self.kind()).is_ok_and(|entries| !entries.is_empty());
        (!has_entry).then(|| OriginalList {
            path: self.dir.join(&file.name),
            text: String::from_utf8_lossy(&file.contents).into_owned(),
            mode: file.mode,
            edited: vec![written],
        })
    }

    /// Returns a note if another tool added plugins to the own list: some add theirs to the first file.
    fn added(&self, path: &HostPath, current: &str, text: &str) -> Option<String> {
        let types = |text: &str| conflist::types(text).unwrap_or_default();
        let known = types(text);
        let added: Vec<_> = types(current).into_iter().filter(|kind| !known.contains(kind)).collect();
        let is_ours = self.found.is_ours(path);
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

    /// Returns what the installation waits for, with the next step.
    fn missing(&self, is_copied: bool) -> String {
        let name = self
            .file
            .map_or_else(|| "the cluster network's configuration".to_owned(), |name| format!("a valid {name}"));
        let copy = if is_copied { "; pods start with the last copy of it" } else { "" };
        format!("{name} in {}{copy}; check the pods of the cluster network on this node", self.dir)
    }

    /// Returns what the installation waits for if no list can be `changed` (copied or extended): one that runtimes may
    /// use is not passed over.
    fn unusable(&self, changed: &str, skipped: &[Skipped<'_>], is_copied: bool) -> String {
        let Some((name, reason)) = skipped.iter().find(|(_, reason)| reason.may_be_used()) else {
            return self.missing(is_copied);
        };
        let (path, copy) = (self.dir.join(name), if is_copied { "; pods start with the last copy" } else { "" });
        format!("a list that can be {changed}: runtimes may use {path} ({reason}){copy}; change or remove this file")
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

fn is_usable_source(file: &ConfFile, copied: &CopiedList) -> bool {
    file.name == copied.source && target::list(file).and_then(|list| target::extensible(file, list, true)).is_ok()
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

#[cfg(test)]
mod tests;
