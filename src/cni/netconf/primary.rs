//! The keys of a primary plugin: those of Multus with their meaning there (multus-cni, `docs/configuration.md`), and
//! some that Multus does not have.

use super::chain::OWN_TYPES;
use super::keys::{absolute, log_level_of, text};
use crate::cni::block::BlockReader;
use crate::cni::block::wrong_type;
use crate::cni::document::Document;
use crate::cni::error::{Code, Error};
use crate::cni::names::{is_dns_label, is_dns_subdomain, is_identifier};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing::level_filters::LevelFilter;

/// The default directory of delegates' executables.
const BIN_DIR: &str = "/opt/cni/bin";
/// The default directory of configuration files for definitions without `spec.config`.
const CONF_DIR: &str = "/etc/cni/multus/net.d";
/// The default directory of saved state, which must survive a reboot.
const CNI_DIR: &str = "/var/lib/cni/detour";
/// The default namespace of the cluster's own definitions, and the only default system namespace.
pub const SYSTEM_NAMESPACE: &str = "kube-system";
/// The default namespace whose definitions pods of all namespaces can use.
pub const GLOBAL_NAMESPACE: &str = "default";
/// The default timeout for the readiness file, in seconds.
const READINESS_TIMEOUT: u32 = 45;

/// The configuration of a primary plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Primary {
    /// `clusterNetwork`, else `delegates`.
    pub default: DefaultNetwork,
    /// `auxiliaryCNIChainName`: the directory of that name beside the file of `clusterNetwork`. Its plugins run for each
    /// pod, in a list of that name.
    pub auxiliary_chain: Option<PathBuf>,
    /// `defaultNetworks`: additional networks of each pod outside the system namespaces.
    pub default_networks: Vec<NetworkName>,
    /// `systemNamespaces`: their pods have no default networks.
    pub system_namespaces: Vec<String>,
    /// `multusNamespace`: the namespace of the definitions that the configuration names, and the default one of
    /// `v1.multus-cni.io/default-network`.
    pub namespace: String,
    /// `confDir`.
    pub conf_dir: PathBuf,
    /// `cniDir`: directory for the state that DEL needs.
    pub cni_dir: PathBuf,
    /// `binDir`; `kubernetes.cni_bin_dir` takes precedence.
    pub bin_dir: PathBuf,
    /// `kubeconfig`; `kubernetes.kubeconfig` takes precedence. Without both, the in-cluster environment is used if
    /// present, else no API.
    pub kubeconfig: Option<PathBuf>,
    /// `namespaceIsolation`: pods can use only definitions of their own namespace and of the global namespaces.
    pub namespace_isolation: bool,
    /// `globalNamespaces`; a list in the configuration replaces the default, `default`.
    pub global_namespaces: Vec<String>,
    /// `readinessindicatorfile`: an ADD waits until this file exists.
    pub readiness_file: Option<PathBuf>,
    /// `readiness_timeout_seconds`: the timeout for that file.
    pub readiness_timeout: Duration,
    /// `retryDeleteOnError`: a DEL keeps the saved state if a delegate's DEL fails.
    pub retry_delete_on_error: bool,
    /// `in_process_types`: types of attachments that run in this process, without an executable.
    pub in_process_types: Vec<String>,
    /// `chain_types`: types of executables without an interface of their own, which run on the default network's
    /// result.
    pub chain_types: Vec<String>,
    /// `merge_addresses`: the result contains the addresses of all attachments.
    pub merge_addresses: bool,
    /// `network_status`.
    pub network_status: NetworkStatus,
    /// `logFile`; `log_file` takes precedence.
    pub(super) log_file: Option<PathBuf>,
    /// `logLevel`; `log_level` takes precedence.
    pub(super) log_level: Option<LevelFilter>,
}

/// The default network of pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DefaultNetwork {
    /// `clusterNetwork`.
    Cluster(NetworkName),
    /// `delegates`: unchanged objects, at least one. The first is the default network, the others are additional
    /// networks of each pod.
    Delegates(Vec<Value>),
}

/// A reference to a network in the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetworkName {
    /// The name of a definition in [`Primary::namespace`], else of a configuration in [`Primary::conf_dir`].
    Name(String),
    /// The path of a configuration file, or of a directory, of which the first configuration counts.
    Path(PathBuf),
}

/// The pods that get the annotation `k8s.v1.cni.cncf.io/network-status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkStatus {
    /// Pods that select networks.
    Auto,
    /// All pods.
    Always,
    /// No pods.
    Never,
}

impl Primary {
    /// Reads the keys of a primary plugin; `None` without `clusterNetwork` and `delegates`.
    pub(super) fn read(keys: &BlockReader<'_>, warnings: &mut Vec<String>) -> Result<Option<Self>, Error> {
        let Some(default) = DefaultNetwork::read(keys)? else { return Ok(None) };
        warn_of_ignored_keys(keys, warnings)?;
        let mut default_networks = Vec::new();
        for (i, name) in keys.list("defaultNetworks")?.into_iter().flat_map(|list| list.items).enumerate() {
            default_networks.push(NetworkName::parse(&format!("defaultNetworks[{i}]"), &name)?);
        }
        if matches!(default, DefaultNetwork::Delegates(_)) && !default_networks.is_empty() {
            warnings.push("defaultNetworks: ignored without clusterNetwork; add these networks to delegates".into());
            default_networks.clear();
        }
        let statuses =
            [("auto", NetworkStatus::Auto), ("always", NetworkStatus::Always), ("never", NetworkStatus::Never)];
        let namespace = text(keys, "multusNamespace")?.unwrap_or(SYSTEM_NAMESPACE);
        check_namespace("multusNamespace", namespace)?;
        let path = |key, default: &str| absolute(keys, key).map(|path| path.unwrap_or_else(|| default.into()));
        let timeout = keys.number("readiness_timeout_seconds", 1, 300)?.unwrap_or(READINESS_TIMEOUT);
        let mut primary = Self {
            auxiliary_chain: auxiliary_chain(keys, &default)?,
            default,
            default_networks,
            system_namespaces: namespaces(keys, "systemNamespaces", SYSTEM_NAMESPACE)?,
            namespace: namespace.to_owned(),
            conf_dir: path("confDir", CONF_DIR)?,
            cni_dir: path("cniDir", CNI_DIR)?,
            bin_dir: path("binDir", BIN_DIR)?,
            kubeconfig: absolute(keys, "kubeconfig")?,
            namespace_isolation: keys.boolean("namespaceIsolation")?.unwrap_or(false),
            global_namespaces: namespaces(keys, "globalNamespaces", GLOBAL_NAMESPACE)?,
            readiness_file: absolute(keys, "readinessindicatorfile")?,
            readiness_timeout: Duration::from_secs(timeout.into()),
            retry_delete_on_error: keys.boolean("retryDeleteOnError")?.unwrap_or(false),
            in_process_types: types(keys, "in_process_types", &OWN_TYPES)?,
            chain_types: types(keys, "chain_types", &[])?,
            merge_addresses: keys.boolean("merge_addresses")?.unwrap_or(false),
            network_status: keys.one_of("network_status", &statuses)?.unwrap_or(NetworkStatus::Auto),
            log_file: absolute(keys, "logFile")?,
            log_level: log_level_of(keys, "logLevel")?,
        };
        if text(keys, "daemonSocketDir")?.is_some() {
            primary.paths_mut().for_each(on_the_node);
        }
        Ok(Some(primary))
    }

    /// Replaces each path below `/host` that does not exist, but exists without this prefix: Multus's daemon wrote it.
    pub fn find_on_the_node(&mut self, exists: &dyn Fn(&Path) -> bool) {
        for path in self.paths_mut().filter(|path| !exists(path)) {
            let mut without_prefix = path.clone();
            on_the_node(&mut without_prefix);
            if exists(&without_prefix) {
                *path = without_prefix;
            }
        }
    }

    /// Returns every path of the file.
    fn paths_mut(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let networks = self.default_networks.iter_mut().filter_map(NetworkName::path_mut);
        let optional = [&mut self.auxiliary_chain, &mut self.kubeconfig, &mut self.readiness_file, &mut self.log_file];
        let always = [&mut self.conf_dir, &mut self.cni_dir, &mut self.bin_dir];
        let default = match &mut self.default {
            DefaultNetwork::Cluster(name) => name.path_mut(),
            DefaultNetwork::Delegates(_) => None,
        };
        default.into_iter().chain(networks).chain(optional.into_iter().flatten()).chain(always)
    }

    /// Returns the same configuration without `defaultNetworks`: the default network, and `delegates` after the first.
    #[must_use]
    pub fn without_default_networks(&self) -> Self {
        Self { default_networks: Vec::new(), ..self.clone() }
    }
}

/// The keys that make a configuration one of a primary plugin.
const PRIMARY_KEYS: [&str; 2] = ["delegates", "clusterNetwork"];

impl Document {
    /// Returns whether the configuration is one of a primary plugin.
    #[must_use]
    pub fn is_primary(&self) -> bool {
        is_primary(&self.block.keys)
    }

    /// Removes the keys that make the configuration one of a primary plugin.
    pub fn remove_networks(&mut self) {
        PRIMARY_KEYS.iter().for_each(|key| drop(self.block.keys.shift_remove(*key)));
    }
}

/// Returns whether these keys are those of a primary plugin, valid or not.
pub(in crate::cni) fn is_primary(keys: &Map<String, Value>) -> bool {
    PRIMARY_KEYS.iter().any(|key| keys.get(*key).is_some_and(|value| !value.is_null() && value != ""))
}

impl DefaultNetwork {
    fn read(keys: &BlockReader<'_>) -> Result<Option<Self>, Error> {
        if let Some(name) = text(keys, "clusterNetwork")? {
            return NetworkName::parse("clusterNetwork", name).map(|name| Some(Self::Cluster(name)));
        }
        let expected = "an array of at least one configuration, each an object with type or plugins";
        match keys.value("delegates") {
            None => Ok(None),
            Some(Value::Array(delegates)) if !delegates.is_empty() && delegates.iter().all(Value::is_object) => {
                Ok(Some(Self::Delegates(delegates.clone())))
            }
            Some(other) => Err(wrong_type("delegates", other, expected)),
        }
    }
}

/// Removes the prefix with which the daemon of Multus writes paths of the node: its container has the node's directories
/// below `/host` (cluster-network-operator, `bindata/network/multus/multus.yaml`).
fn on_the_node(path: &mut PathBuf) {
    if let Ok(below) = path.strip_prefix("/host") {
        *path = Path::new("/").join(below);
    }
}

impl NetworkName {
    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match self {
            Self::Path(path) => Some(path),
            Self::Name(_) => None,
        }
    }

    fn parse(place: &str, text: &str) -> Result<Self, Error> {
        let expected = "the name of a definition or a configuration, or an absolute path";
        if text.contains('/') {
            let path = Path::new(text);
            path.is_absolute().then(|| Self::Path(path.to_owned()))
        } else {
            // The configuration in a file may have a name that is invalid for a definition.
            (is_dns_subdomain(text) || is_identifier(text)).then(|| Self::Name(text.to_owned()))
        }
        .ok_or_else(|| wrong_type(place, &Value::from(text), expected))
    }
}

/// Returns the directory of `auxiliaryCNIChainName`. As in Multus, it is beside the file of the default network.
fn auxiliary_chain(keys: &BlockReader<'_>, default: &DefaultNetwork) -> Result<Option<PathBuf>, Error> {
    let key = "auxiliaryCNIChainName";
    let Some(name) = text(keys, key)? else { return Ok(None) };
    if !is_identifier(name) {
        let expected = "the name of a directory: letters, digits, _, . and -, a letter or digit first";
        return Err(wrong_type(key, &Value::from(name), expected));
    }
    match default {
        DefaultNetwork::Cluster(NetworkName::Path(file)) => Ok(Some(file.with_file_name(name))),
        _ => {
            let msg = format!("{key}: {name:?}: expected the path of a file in clusterNetwork, beside this directory");
            Err(Error::new(Code::InvalidConfig, msg))
        }
    }
}

fn warn_of_ignored_keys(keys: &BlockReader<'_>, warnings: &mut Vec<String>) -> Result<(), Error> {
    if keys.value("clusterNetwork").is_some_and(|name| name != "") && keys.value("delegates").is_some() {
        warnings.push("delegates: ignored together with clusterNetwork".into());
    }
    if keys.boolean("logToStderr")? == Some(false) {
        warnings.push("logToStderr: ignored; log lines are always written to stderr, which runtimes log".into());
    }
    if keys.value("logOptions").is_some() {
        warnings.push("logOptions: ignored; this plugin does not rotate log files: use logrotate(8)".into());
    }
    if keys.value("daemonSocketDir").is_some() {
        warnings
            .push("daemonSocketDir: ignored; without a daemon, paths below /host are read without this prefix".into());
    }
    Ok(())
}

/// Reads names of namespaces. An empty string counts as absent, as in Multus.
fn namespaces(keys: &BlockReader<'_>, key: &'static str, default: &str) -> Result<Vec<String>, Error> {
    match keys.list(key)? {
        Some(list) if keys.value(key).is_none_or(|value| value != "") => {
            list.items.iter().try_for_each(|name| check_namespace(key, name)).map(|()| list.items)
        }
        _ => Ok(vec![default.to_owned()]),
    }
}

fn check_namespace(key: &str, name: &str) -> Result<(), Error> {
    let invalid = || wrong_type(key, &Value::from(name), "names of namespaces");
    if is_dns_label(name) { Ok(()) } else { Err(invalid()) }
}

/// Reads a list of types: names of executables, without `/`.
fn types(keys: &BlockReader<'_>, key: &'static str, default: &[&str]) -> Result<Vec<String>, Error> {
    let Some(list) = keys.list(key)? else { return Ok(default.iter().map(ToString::to_string).collect()) };
    match list.items.iter().find(|kind| kind.contains('/')) {
        Some(wrong) => Err(list.reject(wrong, "types, which are names of executables, without /")),
        None => Ok(list.items),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{Block, CniCommand, NetConf};
    use serde_json::json;

    fn read(conf: &Value) -> Result<(Option<Primary>, Vec<String>), Error> {
        let mut warnings = Vec::new();
        let block = Block::new("", conf).expect("an object");
        Primary::read(&block.reader(), &mut warnings).map(|read| (read, warnings))
    }

    /// A small configuration with one more key.
    fn with(key: &str, value: Value) -> Result<(Primary, Vec<String>), Error> {
        let mut conf = json!({"clusterNetwork": "ovn"});
        conf[key] = value;
        read(&conf).map(|(read, warnings)| (read.expect("a primary plugin"), warnings))
    }

    #[test]
    fn a_configuration_without_networks_is_not_one_of_a_primary_plugin() {
        for conf in [json!({}), json!({"clusterNetwork": "", "kubeconfig": "/k"}), json!({"delegates": null})] {
            assert_eq!(read(&conf), Ok((None, vec![])));
        }
    }

    #[test]
    fn a_configuration_with_only_a_network_has_all_defaults() {
        let wanted = Primary {
            default: DefaultNetwork::Cluster(NetworkName::Name("ovn".into())),
            auxiliary_chain: None,
            default_networks: vec![],
            system_namespaces: vec!["kube-system".into()],
            namespace: "kube-system".into(),
            conf_dir: "/etc/cni/multus/net.d".into(),
            cni_dir: "/var/lib/cni/detour".into(),
            bin_dir: "/opt/cni/bin".into(),
            kubeconfig: None,
            namespace_isolation: false,
            global_namespaces: vec!["default".into()],
            readiness_file: None,
            readiness_timeout: Duration::from_secs(45),
            retry_delete_on_error: false,
            in_process_types: vec!["detour".into(), "istio-cni".into(), "excludedns".into()],
            chain_types: vec![],
            merge_addresses: false,
            network_status: NetworkStatus::Auto,
            log_file: None,
            log_level: None,
        };
        assert_eq!(with("kubeconfig", json!("")), Ok((wanted, vec![])));
    }

    /// The file that OpenShift's Multus daemon writes for CRI-O, after a change of its type.
    #[test]
    fn the_configuration_of_openshift_is_accepted() {
        let text = include_str!("../../../tests/golden/openshift/00-multus.conf");
        let mut conf: Value = serde_json::from_str(text).expect("JSON");
        conf["type"] = "detour".into();
        let (primary, warnings) = read(&conf).expect("accepted");
        let primary = primary.expect("a primary plugin");
        let path = PathBuf::from("/run/multus/cni/net.d/10-ovn-kubernetes.conf");
        assert_eq!(primary.default, DefaultNetwork::Cluster(NetworkName::Path(path)));
        assert_eq!(primary.auxiliary_chain, Some("/run/multus/cni/net.d/vendor-cni-chain".into()));
        assert!(primary.namespace_isolation && primary.readiness_file.is_none());
        let wanted = ["default", "openshift-multus", "openshift-sriov-network-operator", "openshift-cnv"];
        assert_eq!(primary.global_namespaces, wanted);
        assert_eq!((primary.bin_dir, primary.log_level), ("/var/lib/cni/bin".into(), Some(LevelFilter::INFO)));
        assert!(warnings.len() == 1 && warnings[0].starts_with("daemonSocketDir: ignored"), "{warnings:?}");
    }

    #[test]
    fn paths_of_the_daemon_are_read_on_the_node() {
        let file = "/host/run/multus/cni/net.d/05-cilium.conflist";
        let mut conf = json!({
            "clusterNetwork": file, "readinessindicatorfile": file, "defaultNetworks": ["/host/etc/x.conf", "/hosts/y.conf"],
        });
        let paths = |conf: &Value| {
            let primary = read(conf).expect("accepted").0.expect("a primary plugin");
            (primary.default, primary.readiness_file, primary.default_networks)
        };
        let path = |text: &str| NetworkName::Path(text.into());
        let others = vec![path("/host/etc/x.conf"), path("/hosts/y.conf")];
        assert_eq!(paths(&conf), (DefaultNetwork::Cluster(path(file)), Some(file.into()), others));
        conf["daemonSocketDir"] = "/run/multus/socket".into();
        let file = "/run/multus/cni/net.d/05-cilium.conflist";
        let others = vec![path("/etc/x.conf"), path("/hosts/y.conf")];
        assert_eq!(paths(&conf), (DefaultNetwork::Cluster(path(file)), Some(file.into()), others));
    }

    #[test]
    fn paths_of_the_daemon_that_exist_only_on_the_node_are_read_there() {
        let conf = json!({
            "clusterNetwork": "/host/etc/cni/net.d/10-a.conflist", "auxiliaryCNIChainName": "chain",
            "readinessindicatorfile": "/host/run/ready", "defaultNetworks": ["/host/both.conf"], "binDir": "/host/opt/bin",
            "confDir": "/host/none", "kubeconfig": "/host/k", "cniDir": "/host/var/lib/d", "logFile": "/host/var/log/l",
        });
        let mut primary = read(&conf).expect("accepted").0.expect("a primary plugin");
        let exists =
            |path: &Path| path == Path::new("/host/both.conf") || !path.starts_with("/host") && !path.ends_with("none");
        primary.find_on_the_node(&exists);
        let mut paths: Vec<String> = primary.paths_mut().map(|path| path.display().to_string()).collect();
        paths.sort_unstable();
        let wanted = "/etc/cni/net.d/10-a.conflist /etc/cni/net.d/chain /host/both.conf /host/none /k /opt/bin /run/ready \
            /var/lib/d /var/log/l";
        assert_eq!(paths.join(" "), wanted);
    }

    #[test]
    fn delegates_are_unchanged() {
        let delegates = json!([{"type": "bridge", "x": 1.5}, {"plugins": [{"type": "ptp"}]}]);
        let (primary, warnings) = read(&json!({"delegates": delegates, "defaultNetworks": ["a"]})).expect("accepted");
        let primary = primary.expect("a primary plugin");
        assert_eq!(primary.default, DefaultNetwork::Delegates(delegates.as_array().expect("an array").clone()));
        assert!(primary.default_networks.is_empty() && warnings[0].starts_with("defaultNetworks: ignored"));
    }

    #[test]
    fn unsupported_keys_are_warnings() {
        for (key, value) in [
            ("delegates", json!([{"type": "bridge"}])),
            ("logToStderr", json!(false)),
            ("logOptions", json!({"maxAge": 5})),
            ("daemonSocketDir", json!("/run/multus")),
        ] {
            let (_, warnings) = with(key, value).expect("accepted");
            assert!(warnings.len() == 1 && warnings[0].starts_with(&format!("{key}: ignored")), "{warnings:?}");
        }
    }

    #[test]
    fn keys_of_this_plugin_are_read() {
        let (primary, _) = with("network_status", json!("never")).expect("accepted");
        assert_eq!(primary.network_status, NetworkStatus::Never);
        assert_eq!(with("in_process_types", json!([])).expect("accepted").0.in_process_types, [""; 0]);
        assert_eq!(with("chain_types", json!("a, b")).expect("accepted").0.chain_types, ["a", "b"]);
        assert!(with("merge_addresses", json!(true)).expect("accepted").0.merge_addresses);
        let timeout = with("readiness_timeout_seconds", json!(3)).expect("accepted").0.readiness_timeout;
        assert_eq!(timeout, Duration::from_secs(3));
        let (primary, _) = with("defaultNetworks", json!(["a.b", "/etc/x.conf"])).expect("accepted");
        let wanted = [NetworkName::Name("a.b".into()), NetworkName::Path("/etc/x.conf".into())];
        assert_eq!(primary.default_networks, wanted);
        assert_eq!(with("globalNamespaces", json!("")).expect("accepted").0.global_namespaces, ["default"]);
    }

    /// Multus accepts them.
    #[test]
    fn a_key_in_another_case_is_a_warning_with_the_right_one() {
        for key in ["readinessindicatorfile", "namespaceIsolation", "clusterNetwork", "globalNamespaces"] {
            for other in [key.to_uppercase(), key.to_lowercase(), key.replacen('i', "I", 1)] {
                let conf = json!({"name": "n", "type": "detour", "delegates": [{"type": "x"}], (&other): "y"});
                let warnings =
                    NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").map(|conf| conf.warnings);
                let wanted = format!("{other}: unknown key, ignored; did you mean {key:?}?");
                assert!(other == key || warnings == Ok(vec![wanted]), "{other}: {warnings:?}");
            }
        }
    }

    #[test]
    fn errors_have_the_key_and_the_expected_values() {
        for (key, value, wanted) in [
            ("clusterNetwork", json!("net.d/ovn.conf"), r#"clusterNetwork: invalid value "net.d/ovn.conf"; expected "#),
            ("clusterNetwork", json!("a b"), r#"clusterNetwork: invalid value "a b"; expected the name of"#),
            ("clusterNetwork", json!(7), "clusterNetwork: invalid value 7; expected a string"),
            ("defaultNetworks", json!(["a", "../b"]), r#"defaultNetworks[1]: invalid value "../b""#),
            ("multusNamespace", json!("a/b"), r#"multusNamespace: invalid value "a/b"; expected names of"#),
            ("systemNamespaces", json!(["*"]), r#"systemNamespaces: invalid value "*"; expected names of"#),
            ("globalNamespaces", json!("a,B"), r#"globalNamespaces: invalid value "B"; expected names of"#),
            ("confDir", json!("x"), r#"confDir: invalid value "x"; expected an absolute path"#),
            ("namespaceIsolation", json!("yes"), r#"namespaceIsolation: invalid value "yes"; expected true or"#),
            (
                "network_status",
                json!("on"),
                r#"network_status: invalid value "on"; expected one of auto, always, never"#,
            ),
            ("chain_types", json!(["a/b"]), r#"chain_types: invalid value "a/b"; expected types"#),
            ("logLevel", json!("loud"), r#"logLevel: invalid value "loud"; expected one of none, error"#),
            ("auxiliaryCNIChainName", json!("aux"), r#"auxiliaryCNIChainName: "aux": expected the path of a file"#),
            ("auxiliaryCNIChainName", json!("../x"), r#"auxiliaryCNIChainName: invalid value "../x"; expected the"#),
            ("readiness_timeout_seconds", json!(0), "readiness_timeout_seconds: invalid value 0; expected a whole"),
        ] {
            let error = with(key, value).expect_err(key);
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(wanted), "{error}");
        }
        for delegates in [json!([]), json!({}), json!([{"type": "a"}, 7])] {
            let error = read(&json!({"delegates": delegates})).expect_err("refused");
            assert!(error.msg.starts_with("delegates: ") && error.msg.contains("expected an array"), "{error}");
        }
    }
}
