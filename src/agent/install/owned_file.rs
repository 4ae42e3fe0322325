//! Files that an installation writes, and files of another owner, which it never replaces.

use super::conflist;
use super::kubeconfig;
use super::plan::{FileAction, InstallPlan};
use super::record::{Digest, FileRecord, Role, with_newest};
use super::state::{FoundFile, FoundState, PRIVATE_MODE};
use crate::cni::PROGRAM;
use crate::host_path::HostPath;
use serde_json::Value;

/// Writes a text, unless the file has it already.
pub(super) fn add_text(path: &HostPath, role: Role, text: &str, found: &FoundState, plan: &mut InstallPlan) {
    let desired = Digest::of(text.as_bytes());
    let file = found.files.get(path);
    if let Some(file) = file.filter(|file| file.digest != desired)
        && is_foreign(path, role, file, found)
    {
        return refuse(path, role, file, plan);
    }
    if file.is_none_or(|file| file.digest != desired || file.mode != PRIVATE_MODE || !file.trusted) {
        plan.actions.push(FileAction::Write {
            path: path.clone(),
            text: text.to_owned(),
            mode: PRIVATE_MODE,
            before: file.and_then(|file| file.text.clone()),
            follow: false,
            secret: role == Role::Kubeconfig,
        });
    }
    plan.add(path, written(path, role, desired, found));
}

/// Returns the record of a file that is written, with its current digest if an installation wrote it.
pub(super) fn written(path: &HostPath, role: Role, desired: Digest, found: &FoundState) -> FileRecord {
    FileRecord { role, sha256: with_newest(found.own_digest(path), desired), plugin: None, source: None }
}

/// Whether another owner wrote the file. A file in the record that was edited is still the installation's, unless it has
/// become another configuration, or another program that is not named `detour`.
pub(super) fn is_foreign(path: &HostPath, role: Role, file: &FoundFile, found: &FoundState) -> bool {
    let text = file.text.as_deref().unwrap_or_default();
    let is_recorded = found.record.files.contains_key(path);
    let is_changed = found.own_digest(path).is_none();
    match role {
        Role::Program => is_changed && *path.name() != *PROGRAM,
        Role::OwnList => !is_recorded && !conflist::is_own_list(text),
        Role::Kubeconfig => !is_recorded && kubeconfig::token_in(text).is_none(),
        Role::Configuration if is_recorded => is_changed && plugin_of(text).is_some() && !has_own_key(text),
        Role::Configuration | Role::Node | Role::Entry => !is_recorded,
    }
}

/// Whether a configuration has a key that each one of an installation has, and none of another tool.
fn has_own_key(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|conf| conf["kubernetes"]["cni_bin_dir"].is_string())
}

fn plugin_of(text: &str) -> Option<String> {
    let conf: Value = serde_json::from_str(text).ok()?;
    let plugin = conf["type"].as_str().or_else(|| conf["plugins"].as_array()?.last()?["type"].as_str());
    plugin.map(str::to_owned)
}

/// Refuses the plan because of a file of another owner. The message names the owner as far as known, and two ways out.
pub(super) fn refuse(path: &HostPath, role: Role, file: &FoundFile, plan: &mut InstallPlan) {
    let name = path.name();
    let plugin = file.text.as_deref().and_then(plugin_of);
    let is_istio = name == "istio-cni" || plugin.as_deref() == Some("istio-cni");
    let owner = match (&plugin, role) {
        _ if is_istio => "probably of Istio's CNI plugin (its chart, or an IstioCNI of an operator)".to_owned(),
        (Some(plugin), _) => format!("a configuration of the plugin {plugin:?}"),
        (None, Role::Program) => "another program".to_owned(),
        (None, _) => "unknown".to_owned(),
    };
    let other = match role {
        Role::Program => format!("install without the name {name:?} (--name, or type in the configuration)"),
        Role::Configuration => {
            "select another file (--conf-name, cniConfFileName; attachments: another name)".to_owned()
        }
        Role::OwnList => "install with --own-list=false (cni.ownList=false)".to_owned(),
        _ => "move its settings to the file of --config".to_owned(),
    };
    let guide = if is_istio {
        "; docs/migrate.md describes both, docs/openshift.md for OpenShift Service Mesh and Sail"
    } else {
        ""
    };
    plan.refused.get_or_insert_with(|| {
        format!(
            "can't write {path}: it belongs to another owner: {owner}; uninstall that tool or remove the file, or \
             {other}{guide}"
        )
    });
}

/// Replaces the text of another owner's list, which keeps its owner and mode.
pub(super) fn write_list(path: &HostPath, text: String, file: &FoundFile) -> FileAction {
    let before = file.text.clone();
    FileAction::Write { path: path.clone(), text, mode: file.mode, before, follow: true, secret: false }
}
