//! What is run for a pod: a network, or executables on the default network's result.

use crate::cni::result::AddResult;
use crate::cni::{CniCommand, Error, Request};
use crate::delegate::{Call, Executables, NetworkConfiguration};
use crate::networks::{PodNetwork, RunnableConfiguration, Selection};
use crate::trusted_file;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fmt::Display;
use std::io::ErrorKind;
use std::path::Path;

/// The keys of `runtimeConfig` that Multus passes on to every network.
const PASSED_ON: [&str; 7] = ["portMappings", "bandwidth", "ips", "mac", "infinibandGUID", "deviceID", DEVICE_INFO];
/// The key with the file that describes a device ("Device Information Specification" of the Network Plumbing Working
/// Group).
const DEVICE_INFO: &str = "CNIDeviceInfoFile";
/// Where such files are (network-attachment-definition-client, `GetCNIDeviceInfoPath`).
const DEVICE_INFO_DIRECTORY: &str = "/var/run/k8s.cni.cncf.io/devinfo/cni";
/// The size limit of such a file, in bytes. One has about 200.
const LARGEST_DEVICE_INFO: u64 = 16 << 10;

/// Something that is run, with everything that a later DEL, CHECK or GC needs of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Invocation {
    /// How users know it.
    pub(super) name: String,
    /// `CNI_IFNAME`.
    pub(super) interface: String,
    /// Whether it runs on the default network's result and has no interface of its own.
    #[serde(default)]
    pub(super) in_chain: bool,
    /// Its configuration, byte for byte.
    conf: String,
    /// What its plugins' capabilities may ask for.
    #[serde(default)]
    runtime_config: Map<String, Value>,
    /// What goes into `args.cni` of its plugins.
    #[serde(default)]
    args: Map<String, Value>,
    /// `CNI_ARGS`.
    #[serde(default)]
    cni_args: String,
    /// What its ADD came to, in its own version; `None` until then.
    pub(super) result: Option<Value>,
}

impl Invocation {
    /// A network of the pod, which is the default network or a secondary one. `offered` is the runtime's
    /// `runtimeConfig`. As in Multus, a secondary network gets the keys of [`PASSED_ON`] of it, and a network with a
    /// device the place of a file that describes that.
    pub(super) fn network_of(
        network: &PodNetwork,
        is_default: bool,
        offered: &Map<String, Value>,
        request: &Request,
    ) -> Self {
        let passed_on = |key: &str| is_default || PASSED_ON.contains(&key);
        let offered = offered.iter().filter(|(key, _)| passed_on(key));
        let mut runtime_config: Map<_, _> = offered.map(|(key, value)| (key.clone(), value.clone())).collect();
        let selection = network.selection.as_ref();
        runtime_config.extend(selection.map(Selection::runtime_config).unwrap_or_default());
        if runtime_config.get("deviceID").and_then(Value::as_str).is_some_and(|id| !id.is_empty()) {
            let container = request.container_id.as_str();
            let file = format!("{}-{container}_{}", network.name, network.interface).replace('/', "-");
            runtime_config.insert(DEVICE_INFO.to_owned(), format!("{DEVICE_INFO_DIRECTORY}/{file}").into());
        }
        let cni_args = request.args_text.as_str();
        Self {
            name: network.name.clone(),
            interface: network.interface.clone(),
            in_chain: false,
            conf: network.configuration.text.clone(),
            runtime_config,
            args: selection.map(|selection| selection.cni_args.clone()).unwrap_or_default(),
            cni_args: with_args(cni_args, &selection.map(Selection::args).unwrap_or_default()),
            result: None,
        }
    }

    /// What a device plugin or the network's plugin writes of its device, for the network status. A file that can't
    /// be used is logged.
    pub(super) fn device_info(&self) -> Option<Value> {
        let file = Path::new(self.runtime_config.get(DEVICE_INFO)?.as_str()?);
        let refused = |why: &dyn Display| {
            tracing::warn!("{}: no device-info in network-status: {}: {why}", self.place(), file.display());
        };
        let text = match trusted_file::read_trusted(file, LARGEST_DEVICE_INFO) {
            Ok(text) => text,
            Err(error) if error.is_not_found() => return None,
            Err(error) => {
                refused(&error);
                return None;
            }
        };
        match serde_json::from_slice(&text) {
            Ok(info @ Value::Object(_)) => Some(info),
            Ok(_) => {
                refused(&"expected a JSON object");
                None
            }
            Err(error) => {
                refused(&error);
                None
            }
        }
    }

    /// Removes the file of [`Self::device_info`], as Multus does, if it is in the directory of such files.
    fn remove_device_info(&self) {
        let Some(file) = self.runtime_config.get(DEVICE_INFO).and_then(Value::as_str).map(Path::new) else { return };
        if file.parent() == Some(Path::new(DEVICE_INFO_DIRECTORY))
            && let Err(error) = std::fs::remove_file(file)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!("{}: file not removed: {}: {error}", self.place(), file.display());
        }
    }

    /// The same on the default network's result.
    pub(super) fn on_default(self, interface: &str) -> Self {
        Self { in_chain: true, interface: interface.to_owned(), ..self }
    }

    /// The executables of a chain, as a plugin list of their own.
    pub(super) fn executables(name: &str, interface: &str, conf: &crate::cni::NetConf, cni_args: &str) -> Option<Self> {
        let plugins: Vec<Value> =
            crate::sub_plugins::executables(&conf.chain).map(|(_, block)| block.keys.clone().into()).collect();
        let list = json!({"cniVersion": conf.cni_version, "name": conf.name, "plugins": plugins});
        (!plugins.is_empty()).then(|| Self {
            name: name.to_owned(),
            interface: interface.to_owned(),
            in_chain: true,
            conf: list.to_string(),
            runtime_config: conf.runtime_config.clone(),
            args: conf.args.clone(),
            cni_args: cni_args.to_owned(),
            result: None,
        })
    }

    /// Its plugins.
    ///
    /// # Errors
    /// Its configuration is none, which was found out before it was kept.
    pub(super) fn network(&self) -> Result<NetworkConfiguration, Error> {
        let configuration = RunnableConfiguration::parse(&self.place(), &self.conf, None)?;
        Ok(NetworkConfiguration {
            runtime_config: self.runtime_config.clone(),
            args: self.args.clone(),
            ..NetworkConfiguration::from(&configuration)
        })
    }

    fn call(&self, base: &Call, command: CniCommand) -> Call {
        let (ifname, args) = (self.interface.clone(), Some(self.cni_args.clone()));
        Call { command, ifname, args, ..base.clone() }
    }

    fn place(&self) -> String {
        let what = if self.in_chain { "chain member" } else { "network" };
        format!("{what} {} ({})", self.name, self.interface)
    }

    /// Whether all executables can be found.
    ///
    /// # Errors
    /// Which can't.
    pub(super) fn find(&self, base: &Call) -> Result<(), Error> {
        let found = self.network()?.find(&Executables, &self.call(base, CniCommand::Add));
        found.map_err(|error| self.about(error))
    }

    /// ADD; the result is kept, and given.
    ///
    /// # Errors
    /// It failed and was undone; the message says which one, the code is the plugin's.
    pub(super) fn add(&mut self, base: &Call, previous: Option<&AddResult>) -> Result<AddResult, Error> {
        let network = self.network()?;
        let previous = previous.map(|result| result.to_json(network.version())).transpose()?;
        let answer = network.add(&Executables, &self.call(base, CniCommand::Add), previous);
        let result = answer.map_err(|error| self.about(error))?;
        let result = match result {
            Some(result) => result,
            None => AddResult::default().to_json(network.version())?,
        };
        let result = self.result.insert(result);
        AddResult::read(result, network.version())
    }

    /// Keeps another result than the plugins' own.
    ///
    /// # Errors
    /// Its version has no place for it.
    pub(super) fn keep(&mut self, result: &AddResult) -> Result<(), Error> {
        self.result = Some(result.to_json(self.network()?.version())?);
        Ok(())
    }

    /// DEL; all plugins are tried.
    ///
    /// # Errors
    /// What failed.
    pub(super) fn del(&self, base: &Call) -> Result<(), Error> {
        let network = self.network()?;
        let answer = network.del(&Executables, &self.call(base, CniCommand::Del), self.result.as_ref());
        self.remove_device_info();
        answer.map_err(|error| self.about(error))
    }

    /// CHECK, against the result of its ADD.
    ///
    /// # Errors
    /// The first plugin that is not content.
    pub(super) fn check(&self, base: &Call) -> Result<(), Error> {
        let network = self.network()?;
        let answer = network.check(&Executables, &self.call(base, CniCommand::Check), self.result.as_ref());
        answer.map_err(|error| self.about(error))
    }

    /// The error with its name.
    pub(super) fn about(&self, error: Error) -> Error {
        Error { msg: format!("{}: {}", self.place(), error.msg), ..error }
    }
}

/// `CNI_ARGS` with what a selection adds: what is there is not repeated, and whoever does not know
/// the new keys is told to ignore them.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_selection_adds_to_cni_args() {
        let more = [("MAC", "02::1".to_owned()), ("IP", "10.0.0.9".to_owned())];
        assert_eq!(with_args("A=1;B=2", &[]), "A=1;B=2");
        assert_eq!(with_args("", &more), "IgnoreUnknown=1;MAC=02::1;IP=10.0.0.9");
        assert_eq!(with_args("IgnoreUnknown=true;IP=1;A=1", &more), "IgnoreUnknown=true;A=1;MAC=02::1;IP=10.0.0.9");
    }
}
