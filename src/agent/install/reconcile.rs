//! What is wanted on a node against what is there: the difference as a plan.

use super::conflist::{self, UnusableList};
use super::digest::Digest;
use super::plan::{FileAction, InstallPlan};
use super::record::{EditedList, InstallLog, Owned, PreviousContent, Role, known};
use super::target::{self, ConfFile};
use super::{HostPath, PROGRAM, plan};
use serde_json::Value;
use std::collections::BTreeMap;

/// What a node shall have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredState {
    /// Who installs.
    pub installer: String,
    /// The program's contents.
    pub program: Digest,
    /// Where copies of it go.
    pub programs: Vec<HostPath>,
    /// The kubeconfig, and its text; `None` where the plugin is to use another's.
    pub kubeconfig: Option<(HostPath, String)>,
    /// The node configuration, and its text; `None` if the plugin would not find it there.
    pub node: Option<(HostPath, String)>,
    /// What makes runtimes, or Multus, call the program.
    pub configuration: ConfigurationTarget,
}

/// Where the plugin's configuration goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigurationTarget {
    /// Into a file of its own.
    Own {
        /// The file.
        path: HostPath,
        /// All of it.
        text: String,
    },
    /// Into the cluster network's plugin list.
    Listed {
        /// The directory in which that is.
        dir: HostPath,
        /// The file, where it isn't the one that runtimes would take.
        file: Option<String>,
        /// The plugin's member of the list; has a `type`.
        entry: Value,
    },
}

/// What a node has, as far as it matters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundState {
    /// The log of earlier installations; empty where there was none.
    pub record: InstallLog,
    /// Files that are wanted or in the log, and are there.
    pub files: BTreeMap<HostPath, FoundFile>,
    /// The files of the directory with the cluster network's configuration.
    pub configurations: Vec<ConfFile>,
    /// What killed installations left behind.
    pub leftovers: Vec<HostPath>,
    /// What could not be understood; one line each.
    pub notes: Vec<String>,
}

/// A file that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFile {
    /// Of its contents.
    pub digest: Digest,
    /// Its contents, where they are a text of reasonable size.
    pub text: Option<String>,
    /// Permission bits.
    pub mode: u32,
    /// Whether root owns it: the plugin uses no other file of its own.
    pub trusted: bool,
}

pub(super) const PROGRAM_MODE: u32 = 0o755;
/// Configurations and kubeconfigs can name secrets or hold them (CIS Kubernetes Benchmark, 1.1.9).
pub(super) const PRIVATE: u32 = 0o600;

/// What must be done so that the node has what is wanted. Pure: the same values, the same plan; a
/// node that has everything, an empty one.
///
/// What the log says and is no longer wanted is taken back, as [`plan::undo`] would.
#[must_use]
pub fn reconcile(desired: &DesiredState, found: &FoundState) -> InstallPlan {
    let mut plan = InstallPlan { record: found.record.clone(), notes: found.notes.clone(), ..InstallPlan::default() };
    plan.record.installer.clone_from(&desired.installer);
    plan.actions.extend(found.leftovers.iter().map(|path| FileAction::Remove { path: path.clone(), before: None }));
    for path in &desired.programs {
        program(path, &desired.program, found, &mut plan);
    }
    if let Some((path, text)) = &desired.kubeconfig {
        own_text(path, Role::Kubeconfig, text, PreviousContent::Nothing, found, &mut plan);
    }
    if let Some((path, text)) = &desired.node {
        own_text(path, Role::Node, text, before(path, text, found, |text| text.to_owned()), found, &mut plan);
    }
    let mut lists = Vec::new();
    match &desired.configuration {
        ConfigurationTarget::Own { path, text } => {
            let kind = |text: &str| serde_json::from_str::<Value>(text).ok().map(|value| value["type"].clone());
            own_text(path, Role::Configuration, text, before(path, text, found, kind), found, &mut plan);
        }
        ConfigurationTarget::Listed { dir, file, entry } => {
            lists.extend(listed(dir, file.as_deref(), entry, found, &mut plan));
        }
    }
    // As long as it isn't known where the plugin goes, it stays where it is.
    if plan.waits_for.is_none() {
        take_back(desired, &lists, found, &mut plan);
    }
    plan
}

fn program(path: &HostPath, wanted: &Digest, found: &FoundState, plan: &mut InstallPlan) {
    let (there, owned) = (found.files.get(path), found.record.files.get(path));
    let foreign = there.is_some_and(|file| file.digest != *wanted) && path.name() != PROGRAM;
    let before = match owned {
        Some(owned) => owned.before.clone(),
        None if foreign => PreviousContent::Aside(path.sibling(&format!("{}.before-{PROGRAM}", path.name()))),
        None => PreviousContent::Nothing,
    };
    if let PreviousContent::Aside(aside) = &before
        && foreign
        && !is_ours(path, found)
        && !found.files.contains_key(aside)
    {
        plan.actions.push(FileAction::SetAside { path: path.clone(), aside: aside.clone() });
    }
    if there.is_none_or(|file| file.digest != *wanted || file.mode != PROGRAM_MODE || !file.trusted) {
        plan.actions.push(FileAction::CopyProgram { path: path.clone() });
    }
    own(path, Role::Program, wanted.clone(), before, found, plan);
}

fn own_text(
    path: &HostPath,
    role: Role,
    text: &str,
    before: PreviousContent,
    found: &FoundState,
    plan: &mut InstallPlan,
) {
    let wanted = Digest::of(text.as_bytes());
    let there = found.files.get(path);
    if there.is_none_or(|file| file.digest != wanted || file.mode != PRIVATE || !file.trusted) {
        plan.actions.push(FileAction::Write {
            path: path.clone(),
            text: text.to_owned(),
            mode: PRIVATE,
            before: there.and_then(|file| file.text.clone()),
            follow: false,
            secret: role == Role::Kubeconfig,
        });
    }
    own(path, role, wanted, before, found, plan);
}

/// What is remembered of a configuration that stands where ours goes, unless both are of the same kind: then it
/// is an older one of ours.
fn before<T: PartialEq>(path: &HostPath, text: &str, found: &FoundState, kind: impl Fn(&str) -> T) -> PreviousContent {
    match (found.record.files.get(path), found.files.get(path)) {
        (Some(owned), _) => owned.before.clone(),
        (None, Some(FoundFile { text: Some(there), mode, .. })) if kind(there) != kind(text) => {
            PreviousContent::Text(there.clone(), *mode)
        }
        (None, _) => PreviousContent::Nothing,
    }
}

fn is_ours(path: &HostPath, found: &FoundState) -> bool {
    let (there, owned) = (found.files.get(path), found.record.files.get(path));
    there.is_some_and(|file| owned.is_some_and(|owned| owned.ours.contains(&file.digest)))
}

/// Puts a file into the log, with what it may hold: what is found, if that is ours, or what is wanted.
fn own(
    path: &HostPath,
    role: Role,
    wanted: Digest,
    before: PreviousContent,
    found: &FoundState,
    plan: &mut InstallPlan,
) {
    let there = found.files.get(path).filter(|_| is_ours(path, found));
    let earlier: Vec<_> = there.map(|file| file.digest.clone()).into_iter().collect();
    plan.record.files.insert(path.clone(), Owned { role, ours: known(&earlier, wanted), before });
}

/// The list that has the plugin afterwards.
fn listed(
    dir: &HostPath,
    file: Option<&str>,
    entry: &Value,
    found: &FoundState,
    plan: &mut InstallPlan,
) -> Option<HostPath> {
    let kind = entry["type"].as_str().unwrap_or_default();
    let (target, unfit) = target::choose(&found.configurations, file, kind);
    plan.notes.extend(unfit.iter().map(|(name, why)| format!("{} is passed over: it {why}", dir.join(name))));
    let Some(target) = target else {
        let name =
            file.map_or_else(|| "the cluster network's configuration".to_owned(), |name| format!("a valid {name}"));
        plan.waits_for = Some(format!("{name} in {dir}, into which the plugin goes"));
        return None;
    };
    let (path, single) = (dir.join(&target.list_name), dir.join(&target.file.name));
    match conflist::rewrite(&target.list, entry) {
        Ok(text) => write_list(&path, &single, target.file, text, found, plan),
        Err(why) => plan.notes.push(format!("{single} is passed over: it {why}")),
    }
    for kind in other_meshes(&target.list, kind) {
        plan.notes.push(format!("{path} has the plugin {kind}, too: remove it, with whatever put it there"));
    }
    let earlier = found.record.lists.get(&path);
    let ours = known(&own_entries(earlier, &target.list, kind), Digest::of_value(entry));
    let text = || String::from_utf8_lossy(&target.file.contents).into_owned();
    let made_of = (single != path).then(|| (single.clone(), text(), target.file.mode));
    let single = made_of.or_else(|| earlier.and_then(|listed| listed.single.clone()));
    plan.record.lists.insert(path.clone(), EditedList { kind: kind.to_owned(), ours, single });
    Some(path)
}

/// Writes the list where it isn't so already, and then removes the single configuration that it
/// was made of. Until that is gone, runtimes go by it: its name comes first.
fn write_list(
    path: &HostPath,
    single: &HostPath,
    file: &ConfFile,
    text: String,
    found: &FoundState,
    plan: &mut InstallPlan,
) {
    let named = found.configurations.iter().find(|other| other.name == path.name());
    let before = named.map(|other| String::from_utf8_lossy(&other.contents).into_owned());
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

/// The list's entries of our type that are ours by the log.
fn own_entries(earlier: Option<&EditedList>, list: &str, kind: &str) -> Vec<Digest> {
    let ours = |digest: &Digest| earlier.is_some_and(|listed| listed.ours.contains(digest));
    conflist::digests(list, kind).into_iter().flatten().filter(ours).collect()
}

/// Plugins of meshes that redirect, too.
fn other_meshes(list: &str, kind: &str) -> Vec<String> {
    const MESHES: [&str; 4] = ["istio-cni", "linkerd-cni", "kuma-cni", "consul-cni"];
    let types: Result<Vec<String>, UnusableList> = conflist::types(list);
    types.into_iter().flatten().filter(|other| other != kind && MESHES.contains(&other.as_str())).collect()
}

/// Takes back what the log says and nobody wants any more.
fn take_back(desired: &DesiredState, lists: &[HostPath], found: &FoundState, plan: &mut InstallPlan) {
    let mut stale = InstallLog::default();
    let own_conf = match &desired.configuration {
        ConfigurationTarget::Own { path, .. } => Some(path),
        ConfigurationTarget::Listed { .. } => None,
    };
    let texts = [&desired.kubeconfig, &desired.node];
    let wanted = |path: &HostPath| {
        let is_text = texts.iter().any(|text| text.as_ref().is_some_and(|(own, _)| own == path));
        desired.programs.contains(path) || own_conf == Some(path) || is_text
    };
    stale.files.extend(found.record.files.clone().into_iter().filter(|(path, _)| !wanted(path)));
    stale.lists.extend(found.record.lists.clone().into_iter().filter(|(path, _)| !lists.contains(path)));
    let undone = plan::take_back(&stale, found);
    plan.record.files.retain(|path, _| wanted(path) || undone.record.files.contains_key(path));
    plan.record.lists.retain(|path, _| lists.contains(path) || undone.record.lists.contains_key(path));
    plan.actions.extend(undone.actions);
    plan.notes.extend(undone.notes);
}
