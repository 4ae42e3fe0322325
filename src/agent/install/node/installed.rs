//! What is installed on a node: the plugin's configurations, for repairs and reports, and programs: which exist, who may
//! change them, and which the runtime needs to delete running pods.

use super::NodeFiles;
use crate::agent::install::conflist::ConfList;
use crate::agent::install::error::InstallError;
use crate::agent::install::plan::{DesiredState, FoundState};
use crate::agent::install::record::{InstallRecord, Role};
use crate::cni::{NetConf, configuration};
use crate::host_path::HostPath;
use crate::netns::find::containers_by_type;
use crate::plugin::node::InstalledText;
use crate::plugin::running::guarded_pods;
use crate::state::{ROOT, Store};
use crate::sub_plugins::SubPlugin;
use crate::trusted_file;
use serde_json::json;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The plugin's configuration as it is installed on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// The configuration without the parts that only the runtime's calls use: executables in the sub-plugin chain,
    /// which may not tolerate a second ADD, and the networks of a primary plugin.
    pub conf: NetConf,
    /// Whether the plugin is called for every pod, not only for pods that select its network.
    pub for_every_pod: bool,
}

/// The texts of the installed configurations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InstalledTexts {
    /// The files that exist.
    pub texts: Vec<InstalledText>,
    /// The files of the installation records that do not exist here.
    pub missing: Vec<HostPath>,
}

impl NodeFiles {
    /// Returns the installed configurations, that of the cluster network first; none if the plugin is not
    /// installed.
    ///
    /// # Errors
    /// The installation record or a configuration can't be read or parsed.
    pub fn installed(&self) -> Result<Vec<Installed>, String> {
        let mut texts = self.installed_texts()?.texts;
        texts.sort_by_key(|found| !found.for_every_pod);
        texts.iter().map(|found| self.parsed(found)).collect()
    }

    fn parsed(&self, found: &InstalledText) -> Result<Installed, String> {
        let conf = configuration(found.path.as_path(), found.text.as_bytes());
        let mut conf = conf.map_err(|error| error.to_string())?;
        let for_every_pod = found.for_every_pod || conf.primary.is_some();
        conf.primary = None;
        conf.chain.retain(|block| SubPlugin::of(block).is_some());
        let source = &mut conf.kubernetes;
        let paths = [&mut source.agent_socket, &mut source.kubeconfig, &mut source.manifests_dir];
        for path in paths.into_iter().flatten() {
            *path = self.reach_path(path.clone()).map_err(|error| error.to_string())?;
        }
        conf.group_file = HostPath::new(&conf.group_file).map_or(conf.group_file, |path| self.root.find(&path));
        Ok(Installed { conf, for_every_pod })
    }

    /// Returns the texts of the installed configurations. In a configuration list, this is the entry of the installation's
    /// type: Istio's CNI plugin can have an entry there too.
    ///
    /// # Errors
    /// The installation record or a configuration can't be read or parsed.
    pub fn installed_texts(&self) -> Result<InstalledTexts, String> {
        let mut found = InstalledTexts::default();
        let record = self.record().map_err(|error| error.to_string())?.unwrap_or_default();
        for (path, kind, for_every_pod) in configurations(&record) {
            let Some(text) = self.text(path)? else {
                found.missing.push(path.clone());
                continue;
            };
            let text = kind.map_or(Ok(Some(text.clone())), |kind| only_entries(path, &text, kind))?;
            found.texts.extend(text.map(|text| InstalledText { path: path.clone(), text, for_every_pod }));
        }
        Ok(found)
    }

    fn text(&self, path: &HostPath) -> Result<Option<String>, String> {
        let file = self.file(path).map_err(|error| InstallError::file("read", path, &error).to_string())?;
        Ok(file.and_then(|file| file.text))
    }

    fn reach_path(&self, path: PathBuf) -> Result<PathBuf, InstallError> {
        HostPath::new(&path).map_or(Ok(path), |path| self.reach(&path))
    }
}

/// Returns the files of a record with one of the plugin's configurations, each with the type of the plugin's entry, if the
/// file is a configuration list, and whether its place makes it apply to every pod.
fn configurations(record: &InstallRecord) -> impl Iterator<Item = (&HostPath, Option<&str>, bool)> {
    let own = record.files.iter().filter(|(_, file)| file.role.is_configuration());
    own.map(|(path, file)| {
        let in_chain = record.multus_chain.as_ref() == Some(&path.parent());
        (path, file.plugin.as_deref(), file.plugin.is_some() || in_chain)
    })
}

/// Returns a configuration list with only its entries of type `kind`; `None` if it has none.
fn only_entries(path: &HostPath, text: &str, kind: &str) -> Result<Option<String>, String> {
    let list = ConfList::parse(text).map_err(|error| format!("{path}: {error}"))?;
    let entries: Vec<_> = list.entries(kind).collect();
    let list = json!({"cniVersion": list.version(), "name": list.name(), "plugins": entries});
    Ok((!entries.is_empty()).then(|| list.to_string()))
}

impl NodeFiles {
    /// Whether one of `directories` has the program `name`; `None` if it is not found and one of the directories does
    /// not exist here, as in a pod that mounts only some of them. The first is the installation's own directory, which
    /// is created if it does not exist.
    #[must_use]
    pub fn has_program(&self, name: &str, directories: &[HostPath]) -> Option<bool> {
        let is_file = |directory: &HostPath| self.root.reach(&directory.join(name)).is_ok_and(|path| path.is_file());
        match directories.iter().any(is_file) {
            true => Some(true),
            false => directories.iter().skip(1).all(|directory| self.has(directory)).then_some(false),
        }
    }

    /// Returns a warning for each program directory from which the plugin refuses to execute plugins.
    pub(super) fn untrusted(&self, desired: &DesiredState) -> Vec<String> {
        let directories: BTreeSet<_> = desired.programs().map(HostPath::parent).collect();
        let warning = |directory: &HostPath| {
            let why = self.untrusted_path(directory)?;
            let problem = format!("{directory}: plugins in this directory are not executed: {why}");
            Some(format!("{problem}; run on the node: chown -R root:root {directory}"))
        };
        directories.iter().filter_map(warning).collect()
    }

    /// Returns why another user than root can change an existing file or directory.
    pub(super) fn untrusted_path(&self, path: &HostPath) -> Option<String> {
        let error = trusted_file::check(&self.root.reach(path).ok()?).err()?;
        (!error.is_not_found()).then(|| error.below(self.root.mount()).to_string())
    }

    /// Finds the programs in the record that are not desired, and that the runtime needs to delete running pods: CRI-O
    /// deletes a pod with the configuration list with which it started, as Multus does with each attachment and with its
    /// auxiliary chain. containerd uses its current configuration list.
    pub(super) fn find_needed_programs(&self, desired: Option<&DesiredState>, found: &mut FoundState) {
        let is_desired =
            |path: &HostPath| desired.is_some_and(|desired| desired.programs().any(|program| program == path));
        let programs = found.record.with_role(Role::Program).map(|(path, _)| path);
        let programs: Vec<_> = programs.filter(|path| !is_desired(path)).cloned().collect();
        if programs.is_empty() {
            return;
        }
        let types = programs.iter().map(HostPath::name).map(|name| name.to_string()).collect();
        let records = self.records();
        let is_own = |container: &str, network: &str| {
            let attachments = records.as_ref().and_then(|records| records.attachments_of(container).ok());
            attachments.is_some_and(|found| found.iter().any(|attachment| attachment.network == network))
        };
        let (containers, problems) = containers_by_type(&self.root, &types, &is_own);
        let pods = |path: HostPath| containers.get(&*path.name()).map(BTreeSet::len).map(|pods| (path, pods));
        found.needed_programs = programs.into_iter().filter_map(pods).collect();
        found.unread_results = problems.iter().map(ToString::to_string).collect();
    }

    /// Returns the plugin's records of running pods.
    fn records(&self) -> Option<Store> {
        HostPath::new(ROOT).and_then(|path| self.root.reach(&path).ok()).map(Store::new)
    }

    /// Returns the pods that keep a guard.
    pub(super) fn guarded_pods(&self) -> Vec<String> {
        self.records().map(|records| guarded_pods(&records)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_path::HostRoot;
    use std::fs;

    #[test]
    fn the_entry_of_a_list_and_missing_files_are_found() {
        let directory = std::env::temp_dir().join(format!("detour-installed-{}", std::process::id()));
        let state = directory.join("var/lib/cni/detour");
        fs::create_dir_all(&state).expect("created");
        let list = r#"{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "a"}, {"type": "detour", "log_level": "info"}]}"#;
        let own = json!({"role": "configuration", "sha256": []});
        let list_record = json!({"role": "entry", "sha256": [], "plugin": "detour"});
        let files = json!({"/list": list_record, "/missing": own, "/own": own, "/chain/own": own});
        let record = json!({"installer": "i", "files": files, "multus_chain": "/chain"});
        fs::write(directory.join("list"), list).expect("written");
        fs::create_dir(directory.join("chain")).expect("created");
        for name in ["own", "chain/own"] {
            fs::write(directory.join(name), r#"{"name": "n", "type": "detour"}"#).expect("written");
        }
        fs::write(state.join("install.json"), record.to_string()).expect("written");
        let found = NodeFiles::new(HostRoot::new(&directory)).installed_texts().expect("readable");
        let entry = r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"detour","log_level":"info"}]}"#;
        let texts: Vec<_> = found.texts.iter().map(|it| (it.path.to_string(), &*it.text, it.for_every_pod)).collect();
        let own = r#"{"name": "n", "type": "detour"}"#;
        let wanted = [("/chain/own", own, true), ("/list", entry, true), ("/own", own, false)];
        assert_eq!(texts, wanted.map(|(path, text, every)| (path.to_owned(), text, every)));
        let installed = NodeFiles::new(HostRoot::new(&directory)).installed().expect("readable");
        assert_eq!(installed.iter().map(|it| it.for_every_pod).collect::<Vec<_>>(), [true, true, false]);
        assert_eq!(found.missing.iter().map(ToString::to_string).collect::<Vec<_>>(), ["/missing"]);
        fs::remove_dir_all(&directory).expect("removed");
    }
}
