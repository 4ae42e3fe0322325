//! The call of a primary plugin, and what it runs for a pod: invocations, saved in `cniDir` until DEL. With them, DEL, CHECK
//! and GC need neither the cluster nor the current configuration. Also Multus's own record of a pod that it started before
//! this plugin replaced it, so that DEL calls the same plugins.

use crate::cni::result::AddResult;
use crate::cni::{CniCommand, Error, NetConf, Primary, Request};
use crate::delegate::{Call, Executables};
use crate::netns::NetNs;
use crate::networks::{PodNetwork, RunnableConfiguration, Selection};
use crate::plugin::{del, record};
use crate::state::{Attachment, ROOT, Store};
use crate::sub_plugins;
use crate::trusted_file::read_trusted;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The keys of `runtimeConfig` that Multus passes to every network.
const PASSED_TO_ALL: [&str; 7] = ["portMappings", "bandwidth", "ips", "mac", "infinibandGUID", "deviceID", DEVICE_INFO];
/// The key of the file that describes a device ("Device Information Specification" of the Network Plumbing Working
/// Group).
const DEVICE_INFO: &str = "CNIDeviceInfoFile";
/// The directory of these files (network-attachment-definition-client, `GetCNIDeviceInfoPath`).
const DEVICE_INFO_DIRECTORY: &str = "/var/run/k8s.cni.cncf.io/devinfo/cni";
/// The maximum size of such a file in bytes; one has about 200.
const MAX_DEVICE_INFO: u64 = 16 << 10;

/// One call, with the keys that make this process the primary plugin.
pub(in crate::plugin) struct PrimaryCall<'a> {
    pub(in crate::plugin) request: &'a Request,
    pub(in crate::plugin) conf: &'a NetConf,
    pub(in crate::plugin) primary: &'a Primary,
}

impl PrimaryCall<'_> {
    /// Returns the call as it is forwarded to delegates, before the changes for each of them.
    pub(super) fn delegate_call(&self) -> Call {
        Call::forward(self.request, self.conf)
    }

    /// Returns the store of the pod's saved state, in `cniDir`.
    pub(super) fn store(&self) -> Store {
        Store::durable(&self.primary.cni_dir)
    }

    /// Returns the attachment of the call.
    pub(super) fn attachment(&self) -> Attachment {
        record::attachment(self.request, &self.conf.name)
    }
}

/// How a network is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkRunner {
    /// By executables, with its own interface.
    Delegate,
    /// In this process.
    Here,
    /// By an executable, on the default network's result.
    Chain,
}

impl NetworkRunner {
    /// Returns how a network is run. Its type decides only if the network has a single plugin.
    pub(super) fn of(primary: &Primary, configuration: &RunnableConfiguration) -> Self {
        let has = |types: &[String], kind: &str| types.iter().any(|one| one == kind);
        match configuration.plugins.as_slice() {
            [plugin] if has(&primary.in_process_types, plugin.kind()) => Self::Here,
            [plugin] if has(&primary.chain_types, plugin.kind()) => Self::Chain,
            _ => Self::Delegate,
        }
    }
}

/// A network or configuration list to run, with everything that a later DEL, CHECK or GC needs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Invocation {
    /// Its name in messages.
    pub(super) name: String,
    /// `CNI_IFNAME`.
    pub(super) interface: String,
    /// Whether it runs on the default network's result and has no interface of its own.
    #[serde(default, rename = "in_chain")]
    pub(super) is_chained: bool,
    /// Whether it is Multus's auxiliary chain: its first plugin gets an empty result, as from Multus's `passthru`.
    #[serde(skip)]
    pub(super) is_auxiliary: bool,
    /// The pod's selection of the network.
    #[serde(skip)]
    pub(super) selection: Option<Selection>,
    /// Its configuration, unchanged.
    pub(super) conf: String,
    /// `runtimeConfig`; each plugin gets the keys that its `capabilities` list.
    #[serde(default)]
    pub(super) runtime_config: Map<String, Value>,
    /// Values for `args.cni` of its plugins.
    #[serde(default)]
    pub(super) args: Map<String, Value>,
    /// `CNI_ARGS`.
    #[serde(default)]
    pub(super) cni_args: String,
    /// The result of its ADD, in its own version; `None` before ADD.
    pub(super) result: Option<Value>,
}

impl Invocation {
    /// Returns the invocation of a network of the pod. `runtime_config` is that of the call. As in Multus, a secondary
    /// network gets only its [`PASSED_TO_ALL`] keys, and a network with a device gets the path of the file that
    /// describes it.
    pub(super) fn for_network(
        network: &PodNetwork,
        is_default: bool,
        runtime_config: &Map<String, Value>,
        request: &Request,
    ) -> Self {
        let is_passed = |key: &str| is_default || PASSED_TO_ALL.contains(&key);
        let passed = runtime_config.iter().filter(|(key, _)| is_passed(key));
        let mut runtime_config: Map<_, _> = passed.map(|(key, value)| (key.clone(), value.clone())).collect();
        let selection = network.selection.as_ref();
        runtime_config.extend(selection.map(|selection| selection.runtime_config.clone()).unwrap_or_default());
        if runtime_config.get("deviceID").and_then(Value::as_str).is_some_and(|id| !id.is_empty()) {
            let container = request.container_id.as_str();
            let file = format!("{}-{container}_{}", network.name, network.interface).replace('/', "-");
            runtime_config.insert(DEVICE_INFO.to_owned(), format!("{DEVICE_INFO_DIRECTORY}/{file}").into());
        }
        let cni_args = request.args_text.as_str();
        Self {
            name: network.name.clone(),
            interface: network.interface.clone(),
            selection: network.selection.clone(),
            conf: network.configuration.text.clone(),
            runtime_config,
            args: selection.map(|selection| selection.cni_args.clone()).unwrap_or_default(),
            cni_args: with_args(cni_args, &selection.map(Selection::args).unwrap_or_default()),
            ..Self::default()
        }
    }

    /// Reads the device information that a device plugin or the network's plugin wrote, for the network status. Logs a
    /// file that can't be used.
    pub(super) fn device_info(&self) -> Option<Value> {
        let file = Path::new(self.runtime_config.get(DEVICE_INFO)?.as_str()?);
        let info = match read_trusted(file, MAX_DEVICE_INFO) {
            Err(error) if error.is_not_found() => return None,
            text => text.map_err(|error| error.to_string()),
        };
        let parse = |text: Vec<u8>| serde_json::from_slice::<Map<_, _>>(&text).map_err(|error| error.to_string());
        let warn = |why: &String| {
            tracing::warn!("{}: no device-info in network-status: {}: {why}", self.label(), file.display())
        };
        info.and_then(parse).inspect_err(warn).ok().map(Value::Object)
    }

    /// Removes the file of [`Self::device_info`] as Multus does, if it is in [`DEVICE_INFO_DIRECTORY`].
    fn remove_device_info(&self) {
        let Some(file) = self.runtime_config.get(DEVICE_INFO).and_then(Value::as_str).map(Path::new) else { return };
        if file.parent() == Some(Path::new(DEVICE_INFO_DIRECTORY))
            && let Err(error) = fs::remove_file(file)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!("{}: file not removed: {}: {error}", self.label(), file.display());
        }
    }

    /// Returns the executables of a sub-plugin chain as a configuration list, chained to the default network; `None` if
    /// there are none.
    pub(super) fn for_executables(name: &str, interface: &str, conf: &NetConf, cni_args: &str) -> Option<Self> {
        let plugins: Vec<Value> =
            sub_plugins::executables(&conf.chain).map(|(_, block)| block.keys.clone().into()).collect();
        let list = json!({"cniVersion": conf.cni_version, "name": conf.name, "plugins": plugins});
        (!plugins.is_empty()).then(|| Self {
            name: name.to_owned(),
            interface: interface.to_owned(),
            is_chained: true,
            conf: list.to_string(),
            runtime_config: conf.runtime_config.clone(),
            args: conf.args.clone(),
            cni_args: cni_args.to_owned(),
            ..Self::default()
        })
    }

    /// Parses its configuration.
    ///
    /// # Errors
    /// The configuration is invalid. ADD checks it before saving it.
    pub(super) fn network(&self) -> Result<RunnableConfiguration, Error> {
        let configuration = RunnableConfiguration::parse(&self.label(), &self.conf, None)?;
        let (runtime_config, args) = (self.runtime_config.clone(), self.args.clone());
        Ok(RunnableConfiguration { runtime_config, args, ..configuration })
    }

    fn run<T>(
        &self,
        base: &Call,
        command: CniCommand,
        work: impl FnOnce(&RunnableConfiguration, &Call) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (ifname, args) = (self.interface.clone(), Some(self.cni_args.clone()));
        let call = Call { command, ifname, args, ..base.clone() };
        work(&self.network()?, &call).map_err(|error| self.about(error))
    }

    fn label(&self) -> String {
        let what = if self.is_chained { "chained plugin" } else { "network" };
        format!("{what} {} ({})", self.name, self.interface)
    }

    /// Checks that all its executables can be run.
    ///
    /// # Errors
    /// The first executable that is missing or not trusted.
    pub(super) fn find(&self, base: &Call) -> Result<(), Error> {
        self.run(base, CniCommand::Add, |network, call| network.find(&Executables, call))
    }

    /// Runs ADD; stores and returns the result.
    ///
    /// # Errors
    /// The plugin's error with its code and the name of the network. The ADD is undone.
    pub(super) fn add(&mut self, base: &Call, previous: Option<&AddResult>) -> Result<AddResult, Error> {
        let version = self.network()?.version().to_owned();
        let previous = previous.map(|result| result.to_json(&version)).transpose()?;
        let added = self.run(base, CniCommand::Add, |network, call| network.add(&Executables, call, previous))?;
        let result = self.result.insert(added.map_or_else(|| AddResult::default().to_json(&version), Ok)?);
        AddResult::read(result, &version)
    }

    /// Replaces the result of its ADD.
    ///
    /// # Errors
    /// The network's version can't express the result.
    pub(super) fn set_result(&mut self, result: &AddResult) -> Result<(), Error> {
        self.result = Some(result.to_json(self.network()?.version())?);
        Ok(())
    }

    /// Runs DEL. All plugins are run even if one fails.
    ///
    /// # Errors
    /// The plugins that failed.
    pub(super) fn del(&self, base: &Call) -> Result<(), Error> {
        let result = self.result.as_ref();
        let outcome = self.run(base, CniCommand::Del, |network, call| network.del(&Executables, call, result));
        self.remove_device_info();
        outcome
    }

    /// Runs CHECK with the result of its ADD.
    ///
    /// # Errors
    /// The first plugin that fails.
    pub(super) fn check(&self, base: &Call) -> Result<(), Error> {
        let result = self.result.as_ref();
        self.run(base, CniCommand::Check, |network, call| network.check(&Executables, call, result))
    }

    /// Returns the error with the name of this invocation.
    pub(super) fn about(&self, error: Error) -> Error {
        error.at(self.label())
    }
}

/// Returns `CNI_ARGS` with the keys that a network selection adds or replaces. `IgnoreUnknown` is set because plugins
/// refuse unknown keys otherwise.
fn with_args(cni_args: &str, more: &[(&str, String)]) -> String {
    if more.is_empty() {
        return cni_args.to_owned();
    }
    let is_replaced =
        |item: &&str| item.split_once('=').is_some_and(|(key, _)| more.iter().any(|(replaced, _)| key == *replaced));
    let mut items: Vec<String> =
        cni_args.split(';').filter(|item| !item.is_empty() && !is_replaced(item)).map(str::to_owned).collect();
    if !items.iter().any(|item| item.starts_with("IgnoreUnknown=")) {
        items.insert(0, "IgnoreUnknown=1".to_owned());
    }
    items.extend(more.iter().map(|(key, value)| format!("{key}={value}")));
    items.join(";")
}

/// The invocations of a pod: those that were run, and those that are about to be.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedState {
    /// In the order of ADD: the default network, the other networks, the chained plugins. Every version writes them: a
    /// default would hide damage.
    #[serde(rename = "members")]
    pub(super) invocations: Vec<Invocation>,
}

impl SavedState {
    /// Recovers what is readable of a damaged or newer record.
    pub(crate) fn recover(fields: &Map<String, Value>) -> Option<Self> {
        let invocations = fields.get("members")?.as_array()?;
        let invocations = invocations.iter().filter_map(|found| Invocation::deserialize(found).ok()).collect();
        Some(Self { invocations })
    }
}

impl PrimaryCall<'_> {
    /// Removes everything in `saved` in the reverse order of ADD: the chained plugins, the rules of the call's attachment and
    /// of `attachments`, the networks. All steps are tried even if one fails.
    ///
    /// # Errors
    /// The steps that failed.
    pub(super) fn remove(&self, saved: &SavedState, attachments: &[Attachment]) -> Result<(), Error> {
        let mut call = self.delegate_call();
        let netns = NetNs::open(&call.netns).ok().flatten();
        if del::is_late(&self.attachment(), &call.netns) {
            call.netns = PathBuf::new();
        }
        let store = Store::new(ROOT);
        let (chained, networks): (Vec<_>, Vec<_>) = saved.invocations.iter().rev().partition(|one| one.is_chained);
        let mut results: Vec<_> = chained.iter().map(|invocation| invocation.del(&call)).collect();
        results.extend(attachments.iter().map(|attachment| del::remove(&store, attachment, netns.as_ref())));
        results.push(del::run(self.request, self.conf));
        results.extend(networks.iter().map(|invocation| invocation.del(&call)));
        Error::all(results)
    }
}

/// The default of Multus's `cniDir` (pkg/types/conf.go, `defaultCNIDir`).
const DIRECTORY: &str = "/var/lib/cni/multus";
/// The maximum size of a record of Multus, in bytes: at most 32 networks, each with a definition as the API server stores
/// it.
const MAX_BYTES: u64 = 64 << 20;

/// A record of Multus: the networks of a pod in the order of their ADD, and the files from which they were read.
pub(super) struct MultusRecord {
    pub(super) saved: SavedState,
    /// The attachments for which Multus called this plugin, which has its own records of them.
    pub(super) attachments: Vec<Attachment>,
    files: Vec<PathBuf>,
}

/// An element of a record of Multus (pkg/types, `DelegateNetConf`).
#[derive(Deserialize)]
struct Delegate {
    /// The interface that the pod's annotation requests.
    #[serde(default, rename = "ifnameRequest")]
    interface: String,
    /// The configuration, unchanged.
    #[serde(rename = "Bytes")]
    configuration: String,
}

impl MultusRecord {
    /// Reads Multus's record of the call's pod in `cniDir`, or in Multus's default directory; `None` if it is missing or
    /// can't be used.
    pub(super) fn read(call: &PrimaryCall<'_>) -> Option<Self> {
        let directories = [call.primary.cni_dir.as_path(), Path::new(DIRECTORY)];
        let (directory, path) = directories
            .map(|directory| (directory, directory.join(&call.request.container_id)))
            .into_iter()
            .find(|(_, path)| path.is_file())?;
        let warn = |why: &dyn std::fmt::Display| {
            tracing::warn!(
                "DEL skips the networks in Multus's record {}: {why}; drain nodes before this plugin replaces Multus",
                path.display()
            );
        };
        let text = read_trusted(&path, MAX_BYTES).inspect_err(|error| warn(error)).ok()?;
        let delegates: Vec<Delegate> = serde_json::from_slice(&text).inspect_err(|error| warn(error)).ok()?;
        let mut record = Self { saved: SavedState::default(), attachments: Vec::new(), files: vec![path.clone()] };
        for (position, delegate) in delegates.iter().enumerate() {
            record.add(call, directory, position, delegate).unwrap_or_else(|why| warn(&why));
        }
        Some(record)
    }

    /// Adds the network at `position`.
    fn add(
        &mut self,
        call: &PrimaryCall<'_>,
        directory: &Path,
        position: usize,
        delegate: &Delegate,
    ) -> Result<(), String> {
        let text = BASE64_STANDARD.decode(&delegate.configuration).map_err(|error| error.to_string())?;
        let text = String::from_utf8(text).map_err(|error| error.to_string())?;
        let place = format!("network {position}");
        let configuration = RunnableConfiguration::parse(&place, &text, None).map_err(|error| error.msg)?;
        let (container_id, network) = (&call.request.container_id, configuration.name.clone());
        let ifname = match (delegate.interface.as_str(), position) {
            ("", 0) => call.request.ifname.clone(),
            ("", _) => format!("net{position}"),
            (requested, _) => requested.to_owned(),
        };
        if NetworkRunner::of(call.primary, &configuration) == NetworkRunner::Here {
            self.attachments.push(Attachment { container_id: container_id.clone(), network, ifname });
            return Ok(());
        }
        // The network's cached result (libcni, `cachedInfo`).
        let cached = directory.join("results").join(format!("{network}-{container_id}-{ifname}"));
        let found = read_trusted(&cached, MAX_BYTES).ok().and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        let found = found.unwrap_or_default();
        self.saved.invocations.push(Invocation {
            name: network,
            interface: ifname,
            conf: text,
            runtime_config: found["capabilityArgs"].as_object().cloned().unwrap_or_default(),
            cni_args: call.request.args_text.clone(),
            result: Some(found["result"].clone()).filter(|result| !result.is_null()),
            ..Invocation::default()
        });
        self.files.push(cached);
        Ok(())
    }

    /// Removes the record and the cached results.
    pub(super) fn remove(&self) {
        for file in &self.files {
            if let Err(error) = fs::remove_file(file)
                && error.kind() != ErrorKind::NotFound
            {
                tracing::warn!("Multus's file not removed: {}: {error}", file.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_adds_and_replaces_keys_of_cni_args() {
        let more = [("MAC", "02::1".to_owned()), ("IP", "10.0.0.9".to_owned())];
        assert_eq!(with_args("A=1;B=2", &[]), "A=1;B=2");
        assert_eq!(with_args("", &more), "IgnoreUnknown=1;MAC=02::1;IP=10.0.0.9");
        assert_eq!(with_args("IgnoreUnknown=true;IP=1;A=1", &more), "IgnoreUnknown=true;A=1;MAC=02::1;IP=10.0.0.9");
    }
}
