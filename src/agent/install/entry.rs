//! The texts of the plugin's configuration and of the node configuration, from the settings of an installation.

use super::error::InstallError;
use crate::cni::{AUTO_DIALECT, CniCommand, NetConf, NodeConf, POD_ANNOTATIONS, PROGRAM, RuleFormat};
use crate::host_path::HostPath;
use crate::plugin::{TargetNode, validate};
use crate::sub_plugins::SubPlugin;
use serde_json::{Map, Value, json};

/// The settings of the plugin's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntrySettings {
    /// Keys from the administrator (`--config`). They override all other settings except the network's name.
    pub given: Map<String, Value>,
    /// `kubernetes.kubeconfig`; `None` if the plugin asks only the agent.
    pub kubeconfig: Option<HostPath>,
    /// `kubernetes.agent_socket`; `None` if no agent serves it.
    pub agent_socket: Option<HostPath>,
    /// `kubernetes.agent_namespace`: the namespace of the agent's own pods, which the plugin skips.
    pub agent_namespace: Option<String>,
    /// `kubernetes.cni_bin_dir`.
    pub bin_dir: HostPath,
    /// `auto_dialect`: the rule format that `auto` tries first on this node; `None` for the default.
    pub auto_format: Option<RuleFormat>,
    /// Whether the runtime calls the plugin as the primary plugin, by a configuration that another tool installed.
    pub primary: Option<bool>,
}

/// The namespaces whose pods are skipped, unless the administrator's keys name others.
const DEFAULT_EXCLUDED: [&str; 2] = ["istio-system", "kube-system"];

/// The CNI version in a configuration file for Multus: the version that Istio uses and every Multus supports.
const ATTACHMENT_VERSION: &str = "0.3.1";

/// The CNI version in a configuration file for the runtime. It has CHECK, which runtimes call from 0.4.0 on, and containerd
/// 1.6 supports it.
const PRIMARY_VERSION: &str = "1.0.0";

impl EntrySettings {
    /// Returns the text of a configuration file for the network `name`.
    ///
    /// # Errors
    /// The plugin would reject it.
    pub fn standalone(&self, name: &str) -> Result<String, InstallError> {
        let version = if self.is_primary()? { PRIMARY_VERSION } else { ATTACHMENT_VERSION };
        let head = json!({ "cniVersion": version, "name": name });
        let mut keys = head.as_object().cloned().unwrap_or_default();
        keys.extend(self.plugin());
        keys.insert("name".into(), name.into());
        let conf = Value::Object(keys);
        parse(&conf)?;
        Ok(format!("{conf:#}\n"))
    }

    /// Returns the entry for a configuration list, without the network's name and version.
    ///
    /// # Errors
    /// The plugin would reject it.
    pub fn member(&self) -> Result<Value, InstallError> {
        let mut keys = self.plugin();
        keys.shift_remove("name");
        keys.shift_remove("cniVersion");
        // With these capabilities, the runtime passes the pod's resolvers (`runtimeConfig.dns`) and annotations, the last
        // source of facts about the pod.
        let capabilities = keys.entry("capabilities").or_insert_with(|| json!({}));
        if let Some(capabilities) = capabilities.as_object_mut() {
            for name in ["dns", POD_ANNOTATIONS] {
                capabilities.entry(name).or_insert(true.into());
            }
        }
        parse_alone(keys.clone())?;
        Ok(Value::Object(keys))
    }

    /// Returns the node configuration for these settings alone.
    ///
    /// # Errors
    /// The plugin would reject that configuration.
    pub fn node(&self) -> Result<NodeConf, InstallError> {
        Ok(NodeConf::from_configuration(&self.conf()?).with_primary(Some(self.primary.unwrap_or(false))))
    }

    /// Returns the same settings with other keys of the administrator, which override the given ones.
    #[must_use]
    pub fn with_keys(&self, keys: &Map<String, Value>) -> Self {
        let mut given = self.given.clone();
        override_keys(&mut given, keys);
        Self { given, ..self.clone() }
    }

    /// Whether the configuration is that of a primary plugin.
    ///
    /// # Errors
    /// The plugin would reject the configuration.
    pub fn is_primary(&self) -> Result<bool, InstallError> {
        Ok(self.conf()?.primary.is_some())
    }

    /// Whether the sub-plugin chain of this configuration only excludes: it neither redirects nor has executables.
    ///
    /// # Errors
    /// The plugin would reject it.
    pub fn only_excludes(&self) -> Result<bool, InstallError> {
        let excludes = |block| SubPlugin::of(block).is_some_and(|known| known != SubPlugin::IstioRedirect);
        Ok(self.conf()?.chain.iter().all(excludes))
    }

    /// Validates the configuration as `detour validate` does. Returns its warnings.
    ///
    /// # Errors
    /// The plugin would reject it.
    pub fn check(&self, node: TargetNode<'_>) -> Result<Vec<String>, InstallError> {
        validate(&self.conf()?, node).map_err(refused)
    }

    /// Returns the directories that the plugin searches for executables before those of the runtime.
    ///
    /// # Errors
    /// The plugin would reject the configuration.
    pub fn program_directories(&self) -> Result<Vec<HostPath>, InstallError> {
        let own = self.conf()?.kubernetes.cni_bin_dir.and_then(HostPath::new);
        Ok([self.bin_dir.clone()].into_iter().chain(own.filter(|own| *own != self.bin_dir)).collect())
    }

    /// Returns the path of the kubeconfig that the plugin uses; `None` if it reads manifests instead.
    ///
    /// # Errors
    /// The plugin would reject the configuration.
    pub fn effective_kubeconfig(&self) -> Result<Option<HostPath>, InstallError> {
        let kubernetes = self.conf()?.kubernetes;
        Ok(kubernetes.kubeconfig.filter(|_| kubernetes.manifests_dir.is_none()).and_then(HostPath::new))
    }

    fn conf(&self) -> Result<NetConf, InstallError> {
        parse_alone(self.plugin())
    }

    /// Returns all keys of the plugin's configuration except the network's name and version.
    fn plugin(&self) -> Map<String, Value> {
        let kubeconfig = self.kubeconfig.iter().map(|path| ("kubeconfig", json!(path)));
        let others = [("cni_bin_dir", json!(self.bin_dir)), ("exclude_namespaces", json!(DEFAULT_EXCLUDED))];
        let mut kubernetes: Value = kubeconfig.chain(others).collect();
        if let Some(socket) = &self.agent_socket {
            kubernetes["agent_socket"] = json!(socket);
        }
        if let Some(namespace) = &self.agent_namespace {
            kubernetes["agent_namespace"] = namespace.as_str().into();
        }
        let keys = json!({ "type": PROGRAM, "log_level": "info", "kubernetes": kubernetes });
        let mut keys = keys.as_object().cloned().unwrap_or_default();
        if let Some(format) = self.auto_format {
            keys.insert(AUTO_DIALECT.to_owned(), format.name().into());
        }
        override_keys(&mut keys, &self.given);
        if self.uses_default_chain() {
            keys.insert("chain".into(), default_chain());
        }
        keys
    }

    /// Whether the administrator's keys select no sub-plugins: `chain` does, and so do another type and the
    /// configuration of a primary plugin.
    fn uses_default_chain(&self) -> bool {
        let given = |key: &str| self.given.get(key).filter(|value| !value.is_null());
        let is_primary = given("clusterNetwork").or(given("delegates")).is_some();
        given("chain").is_none() && !is_primary && given("type").is_none_or(|kind| kind == PROGRAM)
    }
}

/// Returns the default sub-plugin chain of an installation. It is the same in the chart, in `conf/` and in docs/install.md.
#[must_use]
pub fn default_chain() -> Value {
    json!([
        { "type": "istio-redirect" },
        { "type": "uid-exclude", "uids": ["1337"] },
        { "type": "dns-exclude", "uids": ["1337"] },
    ])
}

/// Replaces keys of a configuration. The keys of an object such as `kubernetes` are replaced one by one.
fn override_keys(keys: &mut Map<String, Value>, given: &Map<String, Value>) {
    for (key, value) in given {
        match (keys.get_mut(key).and_then(Value::as_object_mut), value) {
            (Some(block), Value::Object(given)) => block.extend(given.clone()),
            _ => drop(keys.insert(key.clone(), value.clone())),
        }
    }
}

/// Parses an entry as a configuration of its own.
fn parse_alone(mut keys: Map<String, Value>) -> Result<NetConf, InstallError> {
    keys.insert("name".into(), "n".into());
    keys.insert("cniVersion".into(), "1.0.0".into());
    parse(&Value::Object(keys))
}

fn parse(conf: &Value) -> Result<NetConf, InstallError> {
    NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, PROGRAM).map_err(refused)
}

fn refused(error: crate::cni::Error) -> InstallError {
    InstallError::Configuration(error.to_string())
}
