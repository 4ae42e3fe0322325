//! What is installed on a node: the plugin's configurations, for repairs and reports, and programs: which exist, who may
//! change them, and which the runtime needs to delete running pods.

use super::NodeFiles;
use crate::agent::install::InstallError;
use crate::agent::install::conflist::ConfList;
use crate::agent::install::plan::DesiredState;
use crate::agent::install::record::{FileRecord, InstallRecord, Role};
use crate::cni::{NetConf, configuration};
use crate::host_path::HostPath;
use crate::netns::find::containers_by_type;
use crate::plugin::node::InstalledText;
use crate::state::{ROOT, Store};
use crate::sub_plugins::SubPlugin;
use crate::trusted_file;
use std::collections::BTreeMap;

/// The plugin's configuration as it is installed on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// The configuration without the parts that only the runtime's calls use: executables in the sub-plugin chain,
    /// which may not tolerate a second ADD, and the networks of a primary plugin.
    pub conf: NetConf,
    /// Whether the plugin is called for every pod, not only for pods that select its network.
    pub for_every_pod: bool,
}

impl NodeFiles {
    /// Returns the installed configurations, that of the cluster network first; none if the plugin is not
    /// installed.
    ///
    /// # Errors
    /// The installation record or a configuration can't be read or parsed.
    pub fn installed(&self) -> Result<Vec<Installed>, String> {
        let mut texts = self.installed_texts()?.0;
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
            if let Some(named) = HostPath::new(&*path) {
                *path = self.reach(&named).map_err(|error| error.to_string())?;
            }
        }
        conf.group_file = HostPath::new(&conf.group_file).map_or(conf.group_file, |path| self.root.find(&path));
        Ok(Installed { conf, for_every_pod })
    }

    /// Returns the texts of the installed configurations, and the recorded files that do not exist. In a configuration list,
    /// the text is the entry of the installation's type: Istio's CNI plugin can have an entry there too.
    ///
    /// # Errors
    /// The installation record or a configuration can't be read or parsed.
    pub fn installed_texts(&self) -> Result<(Vec<InstalledText>, Vec<HostPath>), String> {
        let (mut texts, mut missing) = (Vec::new(), Vec::new());
        let record = self.record().map_err(|error| error.to_string())?.unwrap_or_default();
        for (path, FileRecord { plugin, .. }) in record.files.iter().filter(|(_, file)| file.role.is_configuration()) {
            let file = self.file(path).map_err(|error| InstallError::file("read", path, &error).to_string())?;
            let Some(text) = file.and_then(|file| file.text) else {
                missing.push(path.clone());
                continue;
            };
            let for_every_pod = plugin.is_some() || record.multus_chain.as_ref() == Some(&path.parent());
            let text = match plugin {
                Some(kind) => {
                    let list = ConfList::parse(&text).map_err(|error| format!("{path}: {error}"))?;
                    list.only(kind).map(|list| list.text())
                }
                None => Some(text),
            };
            texts.extend(text.map(|text| InstalledText { path: path.clone(), text, for_every_pod }));
        }
        Ok((texts, missing))
    }

    /// Returns a warning if the plugin refuses to execute plugins from the directory of the program.
    pub(super) fn untrusted(&self, desired: &DesiredState) -> Option<String> {
        let directory = desired.programs().next()?.parent();
        let why = self.untrusted_path(&directory)?;
        Some(format!(
            "{directory}: plugins in this directory are not executed: {why}; run on the node: chown -R root:root {directory}"
        ))
    }

    /// Returns why another user than root can change an existing file or directory.
    pub(super) fn untrusted_path(&self, path: &HostPath) -> Option<String> {
        let error = trusted_file::check(&self.root.reach(path).ok()?).err()?;
        (!error.is_not_found()).then(|| error.below(self.root.mount()).to_string())
    }

    /// Returns the programs in the record that are not desired, and that the runtime needs to delete running pods, each with
    /// the reason. CRI-O deletes a pod with the configuration list with which it started, as Multus does with each
    /// attachment and with its auxiliary chain. containerd uses its current configuration list. A program whose pods can't
    /// be counted stays too.
    pub(super) fn needed_programs(
        &self,
        record: &InstallRecord,
        desired: Option<&DesiredState>,
    ) -> BTreeMap<HostPath, String> {
        let is_desired = |path: &HostPath| desired.is_some_and(|desired| desired.programs().any(|it| it == path));
        let mut programs = record.with_role(Role::Program).map(|(path, _)| path.clone()).collect::<Vec<_>>();
        programs.retain(|path| !is_desired(path));
        if programs.is_empty() {
            return BTreeMap::new();
        }
        let types = programs.iter().map(HostPath::name).collect();
        let records = self.records();
        let is_own = |container: &str, network: &str| {
            let attachments = records.as_ref().and_then(|records| records.attachments_of(container).ok());
            attachments.is_some_and(|found| found.iter().any(|attachment| attachment.network == network))
        };
        let (containers, problems) = containers_by_type(&self.root, &types, &is_own);
        let reason = |path: HostPath| {
            let pods = containers.get(&path.name()).map(|pods| format!("pods: {}", pods.len()));
            let unknown = problems.iter().map(|problem| format!("there may be such pods: {problem}"));
            let reasons: Vec<_> = pods.into_iter().chain(unknown).collect();
            (!reasons.is_empty()).then(|| (path, reasons.join("; ")))
        };
        programs.into_iter().filter_map(reason).collect()
    }

    /// Returns the plugin's records of running pods.
    pub(super) fn records(&self) -> Option<Store> {
        HostPath::new(ROOT).and_then(|path| self.root.reach(&path).ok()).map(Store::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_path::HostRoot;
    use serde_json::{Value, json};
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
        let (texts, missing) = NodeFiles::new(HostRoot::new(&directory)).installed_texts().expect("readable");
        let entry = json!({"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "detour", "log_level": "info"}]});
        let json = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
        let texts: Vec<_> = texts.iter().map(|it| (it.path.to_string(), json(&it.text), it.for_every_pod)).collect();
        let own = || json!({"name": "n", "type": "detour"});
        let wanted = [("/chain/own", own(), true), ("/list", entry, true), ("/own", own(), false)];
        assert_eq!(texts, wanted.map(|(path, text, every)| (path.to_owned(), text, every)));
        let installed = NodeFiles::new(HostRoot::new(&directory)).installed().expect("readable");
        assert_eq!(installed.iter().map(|it| it.for_every_pod).collect::<Vec<_>>(), [true, true, false]);
        assert_eq!(missing.iter().map(ToString::to_string).collect::<Vec<_>>(), ["/missing"]);
        fs::remove_dir_all(&directory).expect("removed");
    }
}
