//! The plugin's own configuration, from what an installation is told.

use super::{HostPath, InstallError};
use crate::cni::{CniCommand, NetConf, NodeConf};
use crate::plugin::validate;
use serde_json::{Map, Value, json};

/// What goes into the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntrySettings {
    /// The keys that an operator wrote; they win over all below but the name.
    pub given: Map<String, Value>,
    /// `log_level`.
    pub log_level: String,
    /// `kubernetes.kubeconfig`.
    pub kubeconfig: HostPath,
    /// `kubernetes.agent_socket`, where an agent stays to answer there.
    pub agent_socket: Option<HostPath>,
    /// `kubernetes.exclude_namespaces`.
    pub exclude_namespaces: Vec<String>,
    /// `kubernetes.agent_namespace`: where the agent's own pods are, for which nothing is done.
    pub agent_namespace: Option<String>,
    /// `kubernetes.cni_bin_dir`.
    pub bin_dir: HostPath,
    /// Whether the runtime calls the plugin as the primary plugin, by a configuration that others installed.
    pub primary: Option<bool>,
}

/// The version of the protocol in a file of our own: the one that Istio writes, which every Multus
/// speaks.
const CNI_VERSION: &str = "0.3.1";

impl EntrySettings {
    /// A configuration for a file of its own, for the network `name`.
    ///
    /// # Errors
    /// The plugin would refuse it.
    pub fn standalone(&self, name: &str) -> Result<String, InstallError> {
        let head = json!({ "cniVersion": CNI_VERSION, "name": name });
        let mut keys = head.as_object().cloned().unwrap_or_default();
        keys.extend(self.plugin());
        keys.insert("name".into(), name.into());
        let conf = Value::Object(keys);
        accepted(&conf)?;
        Ok(format!("{conf:#}\n"))
    }

    /// A member of a plugin list, which has name and version for all.
    ///
    /// # Errors
    /// The plugin would refuse it.
    pub fn member(&self) -> Result<Value, InstallError> {
        let mut keys = self.plugin();
        keys.shift_remove("name");
        keys.shift_remove("cniVersion");
        // The runtime tells the pod's resolvers then.
        let capabilities = keys.entry("capabilities").or_insert_with(|| json!({}));
        if let Some(capabilities) = capabilities.as_object_mut() {
            capabilities.entry("dns").or_insert(true.into());
        }
        let mut alone = keys.clone();
        alone.insert("name".into(), "n".into());
        alone.insert("cniVersion".into(), "1.0.0".into());
        accepted(&Value::Object(alone))?;
        Ok(Value::Object(keys))
    }

    /// The text of the node configuration: what the plugin's own configuration states of the node's keys.
    ///
    /// # Errors
    /// The plugin would refuse that configuration.
    pub fn node(&self) -> Result<String, InstallError> {
        Ok(NodeConf::of(&self.conf()?).with_primary(Some(self.primary.unwrap_or(false))).text())
    }

    /// Checks the configuration as [`validate`] does. Returns its warnings.
    ///
    /// # Errors
    /// The plugin would refuse it.
    pub fn check(&self, is_installed: &dyn Fn(&str) -> Option<bool>) -> Result<Vec<String>, InstallError> {
        validate(&self.conf()?, is_installed).map_err(refused)
    }

    /// The directories in which the plugin looks for executables, besides those of the runtime.
    ///
    /// # Errors
    /// The plugin would refuse the configuration.
    pub fn program_directories(&self) -> Result<Vec<HostPath>, InstallError> {
        let own = self.conf()?.kubernetes.cni_bin_dir.and_then(HostPath::new);
        Ok([self.bin_dir.clone()].into_iter().chain(own.filter(|own| *own != self.bin_dir)).collect())
    }

    /// The kubeconfig that the plugin uses; `None` if it reads files instead.
    ///
    /// # Errors
    /// The plugin would refuse the configuration.
    pub fn effective_kubeconfig(&self) -> Result<Option<HostPath>, InstallError> {
        let kubernetes = self.conf()?.kubernetes;
        Ok(kubernetes.kubeconfig.filter(|_| kubernetes.manifests_dir.is_none()).and_then(HostPath::new))
    }

    fn conf(&self) -> Result<NetConf, InstallError> {
        let mut keys = self.plugin();
        keys.insert("name".into(), "n".into());
        keys.insert("cniVersion".into(), "1.0.0".into());
        accepted(&Value::Object(keys))
    }

    /// All keys of the plugin's configuration, but for those of a network.
    fn plugin(&self) -> Map<String, Value> {
        let mut kubernetes = json!({
            "kubeconfig": self.kubeconfig,
            "cni_bin_dir": self.bin_dir,
            "exclude_namespaces": self.exclude_namespaces,
        });
        if let Some(socket) = &self.agent_socket {
            kubernetes["agent_socket"] = json!(socket);
        }
        if let Some(namespace) = &self.agent_namespace {
            kubernetes["agent_namespace"] = namespace.as_str().into();
        }
        let keys = json!({ "type": super::PROGRAM, "log_level": self.log_level, "kubernetes": kubernetes });
        let mut keys = keys.as_object().cloned().unwrap_or_default();
        for (key, value) in &self.given {
            match (keys.get_mut(key).and_then(Value::as_object_mut), value) {
                (Some(there), Value::Object(given)) => there.extend(given.clone()),
                _ => drop(keys.insert(key.clone(), value.clone())),
            }
        }
        if self.takes_the_default_chain() {
            keys.insert("chain".into(), default_chain());
        }
        keys
    }

    /// Whether nothing that was given decides which sub-plugins run: a type of another name and a primary
    /// plugin's configuration do.
    fn takes_the_default_chain(&self) -> bool {
        let given = |key: &str| self.given.get(key).filter(|value| !value.is_null());
        let is_primary = given("clusterNetwork").or(given("delegates")).is_some();
        given("chain").is_none() && !is_primary && given("type").is_none_or(|kind| kind == super::PROGRAM)
    }
}

/// The sub-plugins of an installation whose operator lists none; the same as in the chart, in `conf/` and in
/// the README.
#[must_use]
pub fn default_chain() -> Value {
    json!([
        { "type": "istio-redirect" },
        { "type": "uid-exclude", "uids": ["1337"] },
        { "type": "dns-exclude", "uids": ["1337"] },
    ])
}

fn accepted(conf: &Value) -> Result<NetConf, InstallError> {
    NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, super::PROGRAM).map_err(refused)
}

fn refused(error: crate::cni::Error) -> InstallError {
    InstallError::Configuration(error.to_string())
}
