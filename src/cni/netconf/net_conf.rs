//! The network configuration of this plugin, parsed except for the blocks of its sub-plugins.

use super::chain::{Bounds, blocks, kind, redirects};
use super::keys::{self, CNI_CONF_DIR, POD_ANNOTATIONS, absolute, check_annotations, delegate_timeout, text};
use super::kubernetes::Kubernetes;
use super::primary::Primary;
use crate::cni::block::{Block, BlockReader};
use crate::cni::block::{at_most, wrong_type};
use crate::cni::document::Document;
use crate::cni::error::{Code, Error};
use crate::cni::names::{MAX_NETWORK_NAME, is_identifier};
use crate::cni::request::CniCommand;
use crate::cni::version;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;
use tracing::level_filters::LevelFilter;

/// The file in which names of groups are looked up (group(5)).
pub const GROUP_FILE: &str = "/etc/group";

/// A network configuration. The blocks of sub-plugins are not parsed here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetConf {
    /// `cniVersion`; `0.1.0` if absent or empty (SPEC.md).
    pub cni_version: String,
    /// `name` of the network.
    pub name: String,
    /// `type`: `detour`, `istio-cni`, `excludedns`, or any other in a configuration with `chain`.
    pub kind: String,
    /// `log_level`, or istio-cni's `plugin_log_level`.
    pub log_level: LevelFilter,
    /// `log_file`: log lines are appended to this file, in addition to stderr.
    pub log_file: Option<PathBuf>,
    /// `cni_conf_dir`: the directory of the cluster network's configuration list, of which this list is a copy.
    pub cni_conf_dir: Option<PathBuf>,
    /// `kubernetes`: the sources of pod facts.
    pub kubernetes: Kubernetes,
    /// `dialect`; `None` for `auto`: the first of the two that the kernel accepts.
    pub rule_format: Option<RuleFormat>,
    /// `auto_dialect`: the one that `auto` tries first in a new pod; `None` for `iptables`.
    pub auto_format: Option<RuleFormat>,
    /// The sub-plugins and executables of `chain`, or the default ones of `type`; empty for a primary plugin without
    /// `chain`.
    pub chain: Vec<Block>,
    /// `allow` and `outside_bounds`: what pods may request.
    pub bounds: Bounds,
    /// The keys of a primary plugin: `clusterNetwork`, `delegates` and others.
    pub primary: Option<Primary>,
    /// `delegate_timeout_seconds`: the timeout of each call of an executable.
    pub delegate_timeout: Duration,
    /// `args.cni`: the arguments from a pod's annotation that Multus passes, by sub-plugin.
    pub args: Map<String, Value>,
    /// `runtimeConfig`, without invalid annotations of the pod.
    pub runtime_config: Map<String, Value>,
    /// `prevResult`, unchanged.
    pub prev_result: Option<Value>,
    /// `cni.dev/valid-attachments`, for GC; `None` if the runtime passes no list.
    pub valid_attachments: Option<Vec<ValidAttachment>>,
    /// `attachments_may_exclude_namespaces`: whether attachments can add to the node's `exclude_namespaces`. It has an
    /// effect only in the node configuration.
    pub attachments_may_exclude_namespaces: bool,
    /// Whether the configuration asks for the redirection of pods in the ambient mesh, which detour does not make:
    /// istio-cni's `ambient_enabled`, and a chain with `istio-redirect`.
    pub redirects_ambient: bool,
    /// The file in which names of groups are looked up (group(5)). No key sets it, since it belongs to the host.
    pub group_file: PathBuf,
    /// Warnings about ignored keys, one line each.
    pub warnings: Vec<String>,
}

/// The key with the rule format that `auto` tries first: a fact about the node, which the agent writes.
pub const AUTO_DIALECT: &str = "auto_dialect";

/// The format in which a pod's redirection is written into the kernel (configuration key `dialect`); a pod never has both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum RuleFormat {
    /// The rules that iptables-nft itself would write, in its tables
    #[default]
    Iptables,
    /// Native rules, in detour's own tables of family inet
    #[value(name = "nft", alias = "nftables")]
    Nftables,
}

/// An attachment that still exists according to the runtime (SPEC.md, "GC").
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ValidAttachment {
    /// `containerID`.
    pub container_id: String,
    /// `ifname`.
    pub ifname: String,
}

impl NetConf {
    /// Parses the text on stdin. `program` is the name under which the binary was started; it replaces a
    /// missing `type`.
    ///
    /// # Errors
    /// As [`Document::parse`] and [`NetConf::from_document`].
    pub fn parse(stdin: &[u8], command: CniCommand, program: &str) -> Result<Self, Error> {
        Self::from_document(&Document::parse(stdin)?, command, program)
    }

    /// Checks name and version as the reference library does (`pkg/skel`), then parses the keys of this plugin.
    /// Other keys are ignored (SPEC.md).
    ///
    /// # Errors
    /// [`Code::InvalidConfig`] with the path of the key and the expected values; for the version, the errors of
    /// [`version::check`].
    pub fn from_document(document: &Document, command: CniCommand, program: &str) -> Result<Self, Error> {
        let keys = document.block.reader();
        let name = name(&keys, command)?;
        version::check(&document.cni_version, command)?;
        let kind = kind(&keys, program)?;
        keys::check_misspelled(&document.block.keys)?;
        let mut warnings = keys::at_the_top(&document.block.keys);
        let mut kubernetes = Kubernetes::read(&keys, &mut warnings)?;
        let primary = Primary::read(&keys, &mut warnings)?;
        let (mut log_level, mut log_file) = (keys::log_level(&keys)?, absolute(&keys, "log_file")?);
        if let Some(primary) = &primary {
            log_level = log_level.or(primary.log_level);
            log_file = log_file.or_else(|| primary.log_file.clone());
            kubernetes.kubeconfig = kubernetes.kubeconfig.or_else(|| primary.kubeconfig.clone());
            kubernetes.cni_bin_dir = kubernetes.cni_bin_dir.or_else(|| Some(primary.bin_dir.clone()));
        }
        let mut runtime_config = keys.block("runtimeConfig")?.map(|config| config.all().clone()).unwrap_or_default();
        check_annotations(&mut runtime_config, &mut warnings);
        let has_chain = primary.is_none() || keys.value("chain").is_some();
        let chain = if has_chain { blocks(&keys, &kind)? } else { Vec::new() };
        let redirects_ambient = keys.boolean("ambient_enabled")?.unwrap_or(false) && chain.iter().any(redirects);
        if redirects_ambient {
            let warning = "ambient_enabled: ignored: detour does not redirect pods of the ambient mesh; run istio-cni for \
                           them, and remove this key or istio-redirect";
            warnings.push(warning.into());
        }
        Ok(Self {
            cni_version: document.cni_version.clone(),
            bounds: Bounds::of_configuration(&keys, &chain, &name)?,
            name,
            log_level: log_level.unwrap_or(LevelFilter::INFO),
            log_file,
            cni_conf_dir: absolute(&keys, CNI_CONF_DIR)?,
            kubernetes,
            rule_format: RuleFormat::read(&keys)?,
            auto_format: RuleFormat::read_auto(&keys)?,
            chain,
            kind,
            primary,
            delegate_timeout: delegate_timeout(&keys)?,
            args: match keys.block("args")? {
                Some(args) => args.block("cni")?.map(|cni| cni.all().clone()).unwrap_or_default(),
                None => Map::new(),
            },
            runtime_config,
            prev_result: keys.value("prevResult").cloned(),
            valid_attachments: valid_attachments(&keys)?,
            attachments_may_exclude_namespaces: keys.boolean("attachments_may_exclude_namespaces")?.unwrap_or(false),
            redirects_ambient,
            group_file: GROUP_FILE.into(),
            warnings,
        })
    }

    /// Parses as much of an invalid configuration as a DEL needs: name, version, and the primary plugin's directory
    /// of saved state if its keys are valid.
    ///
    /// A DEL must succeed even if the configuration was changed after the ADD or was never valid.
    ///
    /// # Errors
    /// Name or version are invalid.
    pub fn from_document_for_del(document: &Document) -> Result<Self, Error> {
        let parse_only = |keys: &[&str]| {
            let mut reduced = document.clone();
            reduced.block.keys.retain(|key, _| keys.contains(&key.as_str()));
            reduced.block.keys.insert("type".to_owned(), "detour".into());
            Self::from_document(&reduced, CniCommand::Del, "")
        };
        parse_only(&["name", "clusterNetwork", "delegates", "cniDir", "binDir", "retryDeleteOnError"])
            .or_else(|_| parse_only(&["name"]))
    }

    /// Returns the pod's annotations, all of which are strings; `None` if the runtime does not pass them.
    #[must_use]
    pub fn pod_annotations(&self) -> Option<&Map<String, Value>> {
        self.runtime_config.get(POD_ANNOTATIONS)?.as_object()
    }

    /// Returns the pod's nameservers that the runtime passes in `runtimeConfig.dns` (capability `dns`).
    ///
    /// CONVENTIONS.md has the key `servers`. containerd sends a Go structure without JSON names, hence `Servers`
    /// (go-cni, `types.go`).
    #[must_use]
    pub fn runtime_nameservers(&self) -> Vec<IpAddr> {
        let dns = self.runtime_config.get("dns");
        dns.and_then(|dns| dns.get("servers").or_else(|| dns.get("Servers"))).map(addresses).unwrap_or_default()
    }

    /// Returns `prevResult.dns.nameservers`.
    #[must_use]
    pub fn prev_result_nameservers(&self) -> Vec<IpAddr> {
        let dns = self.prev_result.as_ref().and_then(|result| result.get("dns"));
        dns.and_then(|dns| dns.get("nameservers")).map(addresses).unwrap_or_default()
    }
}

impl RuleFormat {
    /// Reads `dialect`, else istio-cni's `native_nftables`; `None` for `auto`.
    fn read(keys: &BlockReader<'_>) -> Result<Option<Self>, Error> {
        let native = keys.boolean("native_nftables")?.unwrap_or(false);
        let formats = [("auto", None), ("iptables", Some(Self::Iptables)), ("nftables", Some(Self::Nftables))];
        Ok(keys.one_of("dialect", &formats)?.unwrap_or(native.then_some(Self::Nftables)))
    }

    /// Reads `auto_dialect`.
    pub(in crate::cni) fn read_auto(keys: &BlockReader<'_>) -> Result<Option<Self>, Error> {
        keys.one_of(AUTO_DIALECT, &[("iptables", Self::Iptables), ("nftables", Self::Nftables)])
    }

    /// Returns the name as in the configuration key `dialect`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        }
    }
}

/// Reads the network name. Its length is checked only for commands that lead to saved state: a DEL must succeed without.
fn name(keys: &BlockReader<'_>, command: CniCommand) -> Result<String, Error> {
    let invalid = |msg: &str| Error::new(Code::InvalidConfig, msg);
    let name = text(keys, "name")?.ok_or_else(|| invalid("missing network name"))?;
    if !is_identifier(name) {
        return Err(invalid("invalid characters found in network name").with_details(name));
    }
    if matches!(command, CniCommand::Add | CniCommand::Status) {
        at_most(MAX_NETWORK_NAME, "bytes", "name", name.len())?;
    }
    Ok(name.to_owned())
}

/// Reads the existing attachments for GC. SPEC.md had the second name until libcni 1.2.3
/// (containernetworking/cni#1101).
fn valid_attachments(keys: &BlockReader<'_>) -> Result<Option<Vec<ValidAttachment>>, Error> {
    for key in ["cni.dev/valid-attachments", "cni.dev/attachments"] {
        let items = match keys.value(key) {
            None => continue,
            Some(Value::Array(items)) => items,
            Some(other) => return Err(wrong_type(key, other, "an array of objects with containerID and ifname")),
        };
        let attachment = |(i, item)| {
            let keys = BlockReader::new(format!("{key}[{i}]"), item)?;
            let required = |name| match text(&keys, name)? {
                Some(value) => Ok(value.to_owned()),
                None => Err(Error::new(Code::InvalidConfig, format!("{key}[{i}].{name}: missing"))),
            };
            Ok(ValidAttachment { container_id: required("containerID")?, ifname: required("ifname")? })
        };
        return items.iter().enumerate().map(attachment).collect::<Result<_, _>>().map(Some);
    }
    Ok(None)
}

/// Returns the IP addresses of a list without IPv6 zones. Other items are ignored, as by readers of resolv.conf(5).
fn addresses(list: &Value) -> Vec<IpAddr> {
    let texts = list.as_array().into_iter().flatten().filter_map(Value::as_str);
    texts.filter_map(|text| text.split('%').next()?.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(conf: &Value) -> Result<NetConf, Error> {
        NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour")
    }

    /// A small configuration with one more key.
    fn with(key: &str, value: Value) -> Result<NetConf, Error> {
        let mut conf = json!({"cniVersion": "1.1.0", "name": "n", "type": "detour"});
        conf[key] = value;
        parse(&conf)
    }

    #[test]
    fn the_smallest_configuration_has_all_defaults() {
        let conf = parse(&json!({"name": "n"})).expect("accepted");
        assert_eq!((conf.cni_version.as_str(), conf.name.as_str(), conf.kind.as_str()), ("0.1.0", "n", "detour"));
        assert_eq!((conf.log_level, conf.log_file), (LevelFilter::INFO, None));
        assert_eq!(conf.rule_format, None);
        assert!(conf.args.is_empty() && conf.runtime_config.is_empty());
        assert_eq!((conf.prev_result, conf.valid_attachments), (None, None));
        assert!(conf.warnings.is_empty() && !conf.redirects_ambient);
    }

    /// The saved state of a longer name can't be written, so it has none.
    #[test]
    fn the_length_of_a_name_is_limited_except_for_a_removal() {
        let parse = |length: usize, command| {
            let text = format!(r#"{{"cniVersion":"1.1.0","name":"{}","type":"detour"}}"#, "n".repeat(length));
            NetConf::parse(text.as_bytes(), command, "").map(|conf| conf.name.len())
        };
        for command in [CniCommand::Add, CniCommand::Status] {
            assert_eq!(parse(225, command), Ok(225));
            let error = parse(226, command).expect_err("too long");
            assert_eq!((error.code, &*error.msg), (Code::InvalidConfig, "name: expected at most 225 bytes, got 226"));
        }
        for command in [CniCommand::Check, CniCommand::Del, CniCommand::Gc] {
            assert_eq!(parse(300, command), Ok(300));
        }
    }

    #[test]
    fn name_and_version_are_checked_before_other_keys() {
        let refused = |conf: Value| parse(&conf).expect_err("refused");
        let error = refused(json!({"cniVersion": "9", "chain": 7}));
        assert_eq!(error, Error::new(Code::InvalidConfig, "missing network name"));
        assert_eq!(refused(json!({"name": ""})).msg, "missing network name");
        let error = refused(json!({"name": "a/b", "cniVersion": "9"}));
        let wanted = Error::new(Code::InvalidConfig, "invalid characters found in network name").with_details("a/b");
        assert_eq!(error, wanted);
        assert_eq!(refused(json!({"name": "a", "cniVersion": "9", "chain": 7})).code, Code::IncompatibleVersion);
        assert_eq!(refused(json!({"name": 7})).msg, "name: invalid value 7; expected a string");
        let old = json!({"name": "a", "cniVersion": "0.3.1"}).to_string();
        assert!(NetConf::parse(old.as_bytes(), CniCommand::Check, "detour").is_err());
    }

    #[test]
    fn the_configuration_of_istio_cni_is_accepted() {
        let conf = parse(&json!({
            "cniVersion": "0.3.1", "name": "istio-cni", "type": "istio-cni", "plugin_log_level": "debug",
            "cni_agent_run_dir": "/var/run/istio-cni", "ambient_enabled": false, "enablement_selectors": [],
            "exclude_namespaces": ["istio-system", "kube-system"], "pod_namespace": "istio-system",
            "native_nftables": true, "enable_ambient_detection_retry": false, "ipam": {}, "dns": {},
        }))
        .expect("accepted");
        assert_eq!((conf.log_level, conf.rule_format), (LevelFilter::DEBUG, Some(RuleFormat::Nftables)));
        assert_eq!(conf.kubernetes.kubeconfig, Some("/var/run/istio-cni/istio-cni-kubeconfig".into()));
        assert_eq!(conf.kubernetes.exclude_namespaces, ["istio-system", "kube-system"]);
        assert_eq!(conf.kubernetes.agent_namespace.as_deref(), Some("istio-system"));
        assert_eq!(conf.warnings, [""; 0]);
    }

    #[test]
    fn only_a_redirection_for_the_ambient_mesh_is_a_warning() {
        let conf = with("ambient_enabled", json!(true)).expect("accepted");
        assert!(conf.redirects_ambient);
        assert!(conf.warnings[0].starts_with("ambient_enabled: "), "{:?}", conf.warnings);
        let chain = json!([{"type": "uid-exclude", "uids": [7]}]);
        let excluding = json!({"name": "n", "type": "istio-cni", "ambient_enabled": true, "chain": chain});
        let excluding = parse(&excluding).expect("accepted");
        assert!(excluding.warnings.is_empty() && !excluding.redirects_ambient, "{:?}", excluding.warnings);
    }

    #[test]
    fn own_keys_take_precedence_over_those_of_istio_cni() {
        let conf = parse(&json!({
            "name": "n", "dialect": "auto", "native_nftables": true, "log_level": "warn", "plugin_log_level": "debug",
        }));
        let conf = conf.expect("accepted");
        assert_eq!((conf.rule_format, conf.auto_format, conf.log_level), (None, None, LevelFilter::WARN));
    }

    #[test]
    fn keys_that_runtimes_and_multus_add_are_read() {
        let conf = parse(&json!({
            "name": "n", "args": {"cni": {"uid-exclude": {"uids": [7]}}, "other": 1}, "capabilities": {"dns": true},
            "runtimeConfig": {"dns": {"servers": []}}, "prevResult": {"ips": []}, "unknown": [],
        }));
        let conf = conf.expect("accepted");
        assert_eq!(Value::Object(conf.args), json!({"uid-exclude": {"uids": [7]}}));
        assert_eq!(Value::Object(conf.runtime_config), json!({"dns": {"servers": []}}));
        assert_eq!(conf.prev_result, Some(json!({"ips": []})));
    }

    #[test]
    fn valid_attachments_are_read_from_both_keys() {
        let list = json!([{"containerID": "c", "ifname": "eth0"}]);
        let wanted = ValidAttachment { container_id: "c".into(), ifname: "eth0".into() };
        for key in ["cni.dev/valid-attachments", "cni.dev/attachments"] {
            assert_eq!(
                with(key, list.clone()).expect("accepted").valid_attachments,
                Some(vec![wanted.clone()]),
                "{key}"
            );
        }
        let none = with("cni.dev/valid-attachments", json!([])).expect("accepted");
        assert_eq!(none.valid_attachments, Some(Vec::new()));
        assert_eq!(with("cni.dev/valid-attachments", Value::Null).expect("accepted").valid_attachments, None);
        let error = with("cni.dev/valid-attachments", json!([{"containerID": "c"}])).expect_err("refused");
        assert_eq!(error.msg, "cni.dev/valid-attachments[0].ifname: missing");
    }

    #[test]
    fn errors_have_the_key_and_the_expected_values() {
        for (key, value, wanted) in [
            ("dialect", json!("nft"), r#"dialect: invalid value "nft"; expected one of auto, iptables, nftables"#),
            ("log_file", json!("a.log"), r#"log_file: invalid value "a.log"; expected an absolute path"#),
            (
                "auto_dialect",
                json!("auto"),
                r#"auto_dialect: invalid value "auto"; expected one of iptables, nftables"#,
            ),
            ("native_nftables", json!("yes"), r#"native_nftables: invalid value "yes"; expected true or false"#),
            ("args", json!([]), "args: invalid value []; expected an object"),
            ("args", json!({"cni": 1}), "args.cni: invalid value 1; expected an object"),
            ("runtimeConfig", json!(1), "runtimeConfig: invalid value 1; expected an object"),
        ] {
            let error = with(key, value).expect_err("refused");
            assert_eq!((error.code, error.msg.as_str()), (Code::InvalidConfig, wanted));
        }
    }

    #[test]
    fn a_primary_plugin_has_no_default_sub_plugins() {
        let conf = with("clusterNetwork", json!("ovn")).expect("accepted");
        assert!(conf.primary.is_some() && conf.chain.is_empty());
        let conf = parse(
            &json!({"name": "n", "type": "multus", "delegates": [{"type": "x"}], "chain": [{"type": "uid-exclude"}]}),
        );
        assert_eq!(conf.expect("accepted").chain.len(), 1);
        assert!(with("kubeconfig", json!("relative")).expect("no primary plugin's key").primary.is_none());
    }

    #[test]
    fn own_keys_take_precedence_over_those_of_multus() {
        let multus = json!({
            "name": "n", "type": "detour", "clusterNetwork": "ovn", "kubeconfig": "/m", "binDir": "/m/bin",
            "logFile": "/m.log", "logLevel": "debug",
        });
        let conf = parse(&multus).expect("accepted");
        assert_eq!(conf.kubernetes.kubeconfig, Some("/m".into()));
        assert_eq!((conf.kubernetes.cni_bin_dir, conf.log_file), (Some("/m/bin".into()), Some("/m.log".into())));
        assert_eq!(conf.log_level, LevelFilter::DEBUG);
        let mut both = multus;
        both["kubernetes"] = json!({"kubeconfig": "/k", "cni_bin_dir": "/k/bin"});
        (both["log_file"], both["log_level"]) = (json!("/k.log"), json!("warn"));
        let conf = parse(&both).expect("accepted");
        assert_eq!(conf.kubernetes.kubeconfig, Some("/k".into()));
        assert_eq!((conf.kubernetes.cni_bin_dir, conf.log_file), (Some("/k/bin".into()), Some("/k.log".into())));
        assert_eq!(conf.log_level, LevelFilter::WARN);
    }

    #[test]
    fn both_spellings_of_the_runtimes_nameservers_are_read() {
        let wanted: Vec<IpAddr> = vec!["10.0.0.10".parse().expect("v4"), "fd00::a".parse().expect("v6")];
        for key in ["servers", "Servers"] {
            let conf = with("runtimeConfig", json!({"dns": {key: ["10.0.0.10", "fd00::a"], "Options": null}}));
            assert_eq!(conf.expect("accepted").runtime_nameservers(), wanted, "{key}");
        }
        for dns in [json!({}), json!({"dns": null}), json!({"dns": {"Servers": null}}), json!({"dns": []})] {
            assert!(with("runtimeConfig", dns).expect("accepted").runtime_nameservers().is_empty());
        }
    }

    #[test]
    fn nameservers_that_are_not_addresses_are_ignored() {
        let conf = with("prevResult", json!({"dns": {"nameservers": ["fe80::1%eth0", "", 7, "x", "1.1.1.1"]}}));
        let wanted: Vec<IpAddr> = vec!["fe80::1".parse().expect("v6"), "1.1.1.1".parse().expect("v4")];
        assert_eq!(conf.expect("accepted").prev_result_nameservers(), wanted);
    }
}
