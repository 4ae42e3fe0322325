//! What an installation writes, and where: the administrator's keys, the texts of the plugin's configuration and of the
//! kubeconfig, and the directories of each platform.

use super::InstallError;
use crate::cni::{CniCommand, NetConf, POD_ANNOTATIONS, PROGRAM, closest, is_dns_subdomain, unknown_key};
use crate::host_path::HostPath;
use crate::sub_plugins::SubPlugin;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// The CNI version in a configuration file for Multus: the version that Istio uses and every Multus supports.
const ATTACHMENT_VERSION: &str = "0.3.1";

/// The CNI version in a configuration file for the runtime. It has CHECK, which runtimes call from 0.4.0 on, and containerd
/// 1.6 supports it.
const PRIMARY_VERSION: &str = "1.0.0";

/// A valid configuration of the plugin.
#[derive(Debug, Clone)]
pub struct Entry {
    /// All keys, possibly without the network's name and version.
    keys: Map<String, Value>,
    /// What the plugin reads.
    pub conf: NetConf,
}

impl Entry {
    /// Returns the plugin's configuration with the keys of the installation, and those of the administrator, of which each
    /// layer overrides the earlier ones.
    ///
    /// # Errors
    /// The plugin would reject it.
    pub fn new(own: &Value, layers: &[&Map<String, Value>]) -> Result<Self, InstallError> {
        let mut given = Map::new();
        layers.iter().for_each(|layer| override_keys(&mut given, layer));
        let mut keys = object(own.clone());
        override_keys(&mut keys, &given);
        // `chain` selects sub-plugins, and so do another type and the configuration of a primary plugin.
        let is_set = |key: &&str| given.get(*key).is_some_and(|value| !value.is_null());
        if !["chain", "clusterNetwork", "delegates"].iter().any(is_set)
            && keys.get("type").is_none_or(|kind| kind.is_null() || kind == PROGRAM)
        {
            keys.insert("chain".into(), default_chain());
        }
        Ok(Self { conf: parse_alone(keys.clone())?, keys })
    }

    /// Returns the text of a configuration file for the network `name`.
    ///
    /// # Errors
    /// The plugin would reject it.
    pub fn standalone(&self, name: &str) -> Result<String, InstallError> {
        let version = if self.conf.primary.is_some() { PRIMARY_VERSION } else { ATTACHMENT_VERSION };
        let mut keys = object(json!({ "cniVersion": version, "name": name }));
        keys.extend(self.keys.clone());
        keys.insert("name".into(), name.into());
        let conf = Value::Object(keys);
        parse(&conf)?;
        Ok(format!("{conf:#}\n"))
    }

    /// Returns the entry for a configuration list, without the network's name and version.
    ///
    /// # Errors
    /// The plugin would reject it.
    pub fn listed(&self) -> Result<Value, InstallError> {
        let mut keys = self.keys.clone();
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

    /// Whether the sub-plugin chain only excludes: it neither redirects nor has executables.
    #[must_use]
    pub fn only_excludes(&self) -> bool {
        let excludes = |block| SubPlugin::of(block).is_some_and(|known| known != SubPlugin::IstioRedirect);
        self.conf.chain.iter().all(excludes)
    }
}

/// The administrator's keys of the plugin's configurations.
#[derive(Debug, Clone, Default)]
pub struct GivenKeys {
    /// The keys of `--config`.
    pub config: Map<String, Value>,
    /// The attachments of `--attachments`.
    pub attachments: Vec<Attachment>,
}

/// An attachment: a configuration file of its own, for a network that pods select.
#[derive(Debug, Clone)]
pub struct Attachment {
    /// The name of the network and of the NetworkAttachmentDefinition.
    pub name: String,
    /// The keys that override those of `--config`.
    pub keys: Map<String, Value>,
}

impl GivenKeys {
    /// Adds the keys of `--config`. `place` names the file in errors, and `names` are those of the installed program.
    ///
    /// # Errors
    /// The text is not a JSON object, or the program is not installed under the name in its key `type`.
    pub fn add_config(&mut self, text: &[u8], place: &str, names: &[&str]) -> Result<(), InstallError> {
        self.config = json_of(text, place, "a JSON object")?;
        check_type(&self.config, place, names)
    }

    /// Adds the attachments of `--attachments`; the arguments are those of [`Self::add_config`].
    ///
    /// # Errors
    /// The text is not a JSON array of objects, or a name or key of an attachment is invalid.
    pub fn add_attachments(&mut self, text: &[u8], place: &str, names: &[&str]) -> Result<(), InstallError> {
        let all: Vec<Map<String, Value>> = json_of(text, place, "a JSON array of objects")?;
        for (i, mut keys) in all.into_iter().enumerate() {
            let place = format!("{place}: [{i}]");
            let name = keys.shift_remove("name").unwrap_or_default();
            let Some(name) = name.as_str().filter(|name| is_dns_subdomain(name)).map(str::to_owned) else {
                let what = "expected the name of a NetworkAttachmentDefinition";
                return Err(InstallError::Given(format!("{place}.name: {what}, got {name}")));
            };
            if self.attachments.iter().any(|other| other.name == name) {
                let why = format!("{place}.name: {name:?} occurs twice; each attachment needs its own");
                return Err(InstallError::Given(why));
            }
            check_type(&keys, &place, names)?;
            if let Some(problem) = unknown_key(&keys) {
                return Err(InstallError::Given(format!("{place}: {problem}")));
            }
            self.attachments.push(Attachment { name, keys });
        }
        Ok(())
    }

    /// Returns the name of the network in the configuration file of the installation: the key `name` of `--config`, or
    /// that of Istio's NetworkAttachmentDefinition.
    ///
    /// # Errors
    /// The name is not a text, or no such file `is_written`.
    pub fn network(&self, is_written: bool) -> Result<String, InstallError> {
        let why = match self.config.get("name").filter(|name| !name.is_null()) {
            None => return Ok("istio-cni".to_owned()),
            Some(Value::String(name)) if is_written => return Ok(name.clone()),
            Some(_) if is_written => "expected a text",
            Some(_) => "it has an effect only with --chained=false and without --attachments; remove the key",
        };
        Err(InstallError::Given(format!("--config: name: {why}")))
    }
}

fn json_of<T: DeserializeOwned>(text: &[u8], place: &str, expected: &str) -> Result<T, InstallError> {
    serde_json::from_slice(text).map_err(|error| InstallError::Given(format!("{place}: expected {expected}: {error}")))
}

/// Checks that the program is installed under the name that a configuration's type requires.
fn check_type(keys: &Map<String, Value>, place: &str, names: &[&str]) -> Result<(), InstallError> {
    match keys.get("type").and_then(Value::as_str) {
        Some(kind) if !names.contains(&kind) => {
            let names = names.join(" or ");
            let next = format!("add --name {kind}, or remove the key");
            Err(InstallError::Given(format!("{place}: type: expected {names}, got {kind:?}; {next}")))
        }
        _ => Ok(()),
    }
}

/// Returns the keys of an object, and of the objects in it, without those that have no value.
fn object(value: Value) -> Map<String, Value> {
    let Value::Object(mut keys) = value else { return Map::new() };
    keys.retain(|_, value| {
        if let Value::Object(block) = value {
            block.retain(|_, value| !value.is_null());
        }
        !value.is_null()
    });
    keys
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
    let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, PROGRAM);
    conf.map_err(|error| InstallError::Configuration(error.to_string()))
}

/// The properties of a platform.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Platform {
    /// Its name for `--platform`.
    pub name: &'static str,
    /// Other names that `--platform` accepts.
    #[serde(default, borrow)]
    pub aliases: Vec<&'static str>,
    /// The directory in which the runtime or Multus looks for plugins.
    #[serde(rename = "cniBinDir")]
    pub bin_dir: &'static str,
    /// The directory of network configurations.
    #[serde(rename = "cniConfDir")]
    pub conf_dir: &'static str,
    /// Whether the plugin is added to the cluster network's configuration list. Otherwise it has a configuration file
    /// of its own, which pods select as an attachment.
    pub chained: bool,
    /// Whether new pods get rules in format nftables.
    #[serde(default)]
    pub nftables: bool,
    /// Paths that exist on every node of this platform and on no other, for detection. If empty, the platform is not
    /// detected; it has the same directories as the default.
    #[serde(default, borrow)]
    evidence: Vec<&'static str>,
}

/// The platforms, from the chart's table. Detection takes the first one whose evidence exists; the last one is the default.
pub static PLATFORMS: LazyLock<Vec<Platform>> = LazyLock::new(|| {
    let table = include_str!("../../../manifests/chart/platforms.yaml");
    let rows: Map<String, Value> = serde_saphyr::from_str(table).expect("a table, which the tests read");
    let row = |(name, mut row): (String, Value)| {
        row["name"] = name.into();
        serde_json::from_str(row.to_string().leak()).expect("a platform, which the tests read")
    };
    rows.into_iter().map(row).collect()
});

impl Platform {
    /// Returns the platform with this name or alias.
    ///
    /// # Errors
    /// Unknown name; the text lists all names.
    pub fn named(name: &str) -> Result<&'static Self, String> {
        let known = |platform: &&Self| platform.name == name || platform.aliases.contains(&name);
        PLATFORMS.iter().find(known).ok_or_else(|| match closest(name, Self::names()) {
            Some(similar) => format!("did you mean {similar:?}? expected {}", Self::names().join(", ")),
            None => format!("expected {}", Self::names().join(", ")),
        })
    }

    /// Returns all names and aliases, sorted.
    #[must_use]
    pub fn names() -> Vec<&'static str> {
        let mut names: Vec<_> = PLATFORMS.iter().flat_map(|p| [p.name].into_iter().chain(p.aliases.clone())).collect();
        names.sort_unstable();
        names
    }

    /// Detects the platform of a node; `exists` tells whether a path exists there.
    #[must_use]
    pub fn detect(exists: impl Fn(&HostPath) -> bool) -> &'static Self {
        let path_exists = |path: &str| HostPath::new(path).is_some_and(|path| exists(&path));
        let is_detected =
            |platform: &&Self| !platform.evidence.is_empty() && platform.evidence.iter().all(|path| path_exists(path));
        PLATFORMS.iter().find(is_detected).unwrap_or(&PLATFORMS[PLATFORMS.len() - 1])
    }
}

/// Returns the text of a kubeconfig with this token for the API server at the URL `server`. `ca` are the certificate
/// authorities (PEM) that sign its certificate.
#[must_use]
pub fn kubeconfig(server: &str, ca: &[u8], token: &str) -> String {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "local", "cluster": { "server": server, "certificate-authority-data": STANDARD.encode(ca) } }],
        "users": [{ "name": "detour", "user": { "token": token } }],
        "contexts": [{ "name": "detour", "context": { "cluster": "local", "user": "detour" } }],
        "current-context": "detour",
    });
    format!("{config:#}\n")
}

/// Returns the token in a kubeconfig that [`kubeconfig()`] wrote.
#[must_use]
pub fn token_in(text: &str) -> Option<String> {
    let config: Value = serde_json::from_str(text).ok()?;
    config["users"][0]["user"]["token"].as_str().map(str::to_owned)
}

/// Returns the URL of the API server from `KUBERNETES_SERVICE_HOST` and `_PORT`, which the kubelet sets in pods. The
/// host is an IP address there, so the plugin needs no DNS.
#[must_use]
pub fn server_url(host: &str, port: &str) -> String {
    if host.contains(':') { format!("https://[{host}]:{port}") } else { format!("https://{host}:{port}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detected(paths: &[&str]) -> &'static str {
        Platform::detect(|path| paths.iter().any(|there| path.as_path() == std::path::Path::new(there))).name
    }

    #[test]
    fn each_platform_is_detected_by_its_evidence() {
        let default = Platform::named("kubernetes").expect("the default");
        for platform in PLATFORMS.iter() {
            let wanted = if platform.evidence.is_empty() { default } else { platform };
            assert_eq!(detected(&platform.evidence), wanted.name);
            assert_eq!((wanted.bin_dir, wanted.conf_dir), (platform.bin_dir, platform.conf_dir), "{}", platform.name);
        }
        // Nodes that have directories of other platforms.
        assert_eq!(detected(&["/opt/cni/bin", "/etc/cni/net.d"]), "kubernetes");
        assert_eq!(detected(&["/bin/k3s", "/opt/cni/bin"]), "kubernetes");
    }

    #[test]
    fn every_name_and_alias_is_accepted_and_means_one_platform() {
        for platform in PLATFORMS.iter() {
            for name in platform.aliases.iter().chain([&platform.name]) {
                assert_eq!(Platform::named(name).expect("accepted").name, platform.name);
            }
            assert!(HostPath::new(platform.bin_dir).is_some() && HostPath::new(platform.conf_dir).is_some());
        }
        let error = Platform::named("openshit").expect_err("a typing error");
        assert!(error.contains("openshift") && error.contains("eks"), "{error}");
    }

    #[test]
    fn ipv6_addresses_are_bracketed_in_the_server_url() {
        assert_eq!(server_url("10.96.0.1", "443"), "https://10.96.0.1:443");
        assert_eq!(server_url("fd00::1", "6443"), "https://[fd00::1]:6443");
        assert_eq!(server_url("api.example", "443"), "https://api.example:443");
    }
}
