//! The configuration on stdin, understood as far as it isn't a sub-plugin's.
//!
//! From which severity on is logged.

use super::list::wrong_type;
use super::names::is_identifier;
use super::{Block, BlockReader, CniCommand, Code, Document, Error, version};
pub use chain::SUB_PLUGINS;
pub(super) use chain::{default_chain, kind};
pub(super) use kubernetes::ISTIO_KUBECONFIG;
pub use kubernetes::Kubernetes;
pub use primary::{DefaultNetwork, NetworkName, NetworkStatus, Primary};
pub(super) use primary::{PRIMARY_KEYS, is_primary};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::time::Duration;

mod chain;
mod kubernetes;
mod primary;
mod unknown;

/// How long an executable may take where nobody says so, in seconds: kubelet gives a runtime two
/// minutes for a pod (`runtimeRequestTimeout`), and what an ADD made must be undone within them.
const DELEGATE_TIMEOUT: u32 = 60;

/// A network configuration. Sub-plugins' blocks stay raw: `chain` understands them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetConf {
    /// `cniVersion`; absent or empty is `0.1.0` (SPEC.md).
    pub cni_version: String,
    /// `name`: the network's.
    pub name: String,
    /// `type`: `detour`, `istio-cni`, `excludedns`, or any other where there is a chain.
    pub kind: String,
    /// `log_level`, or istio-cni's `plugin_log_level`.
    pub log_level: LogLevel,
    /// `log_file`: a file that log lines are appended to, besides stderr.
    pub log_file: Option<PathBuf>,
    /// `kubernetes`: where facts come from.
    pub kubernetes: Kubernetes,
    /// `dialect`.
    pub dialect: RuleFormatSetting,
    /// `chain`, or what `type` stands for where there is none; for a primary plugin without one it
    /// is empty.
    pub chain: Vec<Block>,
    /// What makes this the primary plugin: `clusterNetwork` or `delegates`, and their like.
    pub primary: Option<Primary>,
    /// `delegate_timeout_seconds`: how long each call of an executable may take.
    pub delegate_timeout: Duration,
    /// `args.cni`: what Multus passes on from a pod's annotation, by sub-plugin.
    pub args: Map<String, Value>,
    /// `runtimeConfig`.
    pub runtime_config: Map<String, Value>,
    /// `prevResult`, as it came.
    pub prev_result: Option<Value>,
    /// `cni.dev/valid-attachments`, for GC; `None` where the runtime gives no list.
    pub valid_attachments: Option<Vec<ValidAttachment>>,
    /// `attachments_may_exclude_namespaces`: whether attachments can add to the `exclude_namespaces` of the
    /// node; counts only in the node's own configuration.
    pub attachments_may_exclude_namespaces: bool,
    /// istio-cni's `ambient_enabled`: what it asks for is not done here.
    pub ambient_enabled: bool,
    /// Where names of groups are looked up (group(5)); no key sets it, for it is the host's.
    pub group_file: PathBuf,
    /// What was ignored and should be looked at, one line each.
    pub warnings: Vec<String>,
}

const GROUP_FILE: &str = "/etc/group";

/// How the rules are written into the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleFormatSetting {
    /// The first of the two that the kernel accepts.
    Auto,
    /// What iptables-nft itself would write.
    Iptables,
    /// A native `inet` table.
    Nftables,
}

/// An attachment that the runtime still knows (SPEC.md, "GC").
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ValidAttachment {
    /// `containerID`.
    pub container_id: String,
    /// `ifname`.
    pub ifname: String,
}

impl NetConf {
    /// Understands stdin's text. `program` is the name under which the binary was started; it
    /// stands in for a missing `type`.
    ///
    /// # Errors
    /// As [`Document::parse`] and [`NetConf::understand`].
    pub fn parse(stdin: &[u8], command: CniCommand, program: &str) -> Result<Self, Error> {
        Self::understand(&Document::parse(stdin)?, command, program)
    }

    /// Checks name and version as the reference library does (`pkg/skel`), then understands the
    /// keys that are this plugin's. Others are ignored (SPEC.md).
    ///
    /// # Errors
    /// [`Code::InvalidConfig`] with the key's path and what is accepted; the version's errors are
    /// those of [`version::check`].
    pub fn understand(document: &Document, command: CniCommand, program: &str) -> Result<Self, Error> {
        let keys = document.block.reader();
        let name = name(&keys)?;
        version::check(&document.cni_version, command)?;
        let kind = kind(&keys, program)?;
        let mut warnings = unknown::at_the_top(&document.block.keys);
        let ambient_enabled = keys.boolean("ambient_enabled")?.unwrap_or(false);
        if ambient_enabled {
            warnings.push("ambient_enabled: ambient mode is not done here; pods without a sidecar get nothing".into());
        }
        let mut kubernetes = Kubernetes::read(&keys, &mut warnings)?;
        let primary = Primary::read(&keys, &mut warnings)?;
        let (mut log_level, mut log_file) = (LogLevel::read(&keys)?, absolute(&keys, "log_file")?);
        if let Some(primary) = &primary {
            log_level = log_level.or(primary.log_level);
            log_file = log_file.or_else(|| primary.log_file.clone());
            kubernetes.kubeconfig = kubernetes.kubeconfig.or_else(|| primary.kubeconfig.clone());
            kubernetes.cni_bin_dir = kubernetes.cni_bin_dir.or_else(|| Some(primary.bin_dir.clone()));
        }
        let has_chain = primary.is_none() || keys.value("chain").is_some();
        Ok(Self {
            cni_version: document.cni_version.clone(),
            name,
            log_level: log_level.unwrap_or(LogLevel::Info),
            log_file,
            kubernetes,
            dialect: RuleFormatSetting::read(&keys)?,
            chain: if has_chain { chain::chain(&keys, &kind)? } else { Vec::new() },
            kind,
            primary,
            delegate_timeout: delegate_timeout(&keys)?,
            args: match keys.block("args")? {
                Some(args) => args.reader().block("cni")?.map(|cni| cni.keys).unwrap_or_default(),
                None => Map::new(),
            },
            runtime_config: keys.block("runtimeConfig")?.map(|config| config.keys).unwrap_or_default(),
            prev_result: keys.value("prevResult").cloned(),
            valid_attachments: valid_attachments(&keys)?,
            attachments_may_exclude_namespaces: keys.boolean("attachments_may_exclude_namespaces")?.unwrap_or(false),
            ambient_enabled,
            group_file: GROUP_FILE.into(),
            warnings,
        })
    }
}

impl NetConf {
    /// What a DEL needs of a configuration that is wrong: its name and version, and where the primary
    /// plugin keeps what it needs, as far as that is right. What is wrong was so at ADD, or came
    /// since; either way it must not keep a pod from going.
    ///
    /// # Errors
    /// Name or version are wrong.
    pub fn understand_for_del(document: &Document) -> Result<Self, Error> {
        let only = |keys: &[&str]| {
            let mut bare = document.clone();
            bare.block.keys.retain(|key, _| keys.contains(&key.as_str()));
            bare.block.keys.insert("type".to_owned(), "detour".into());
            Self::understand(&bare, CniCommand::Del, "")
        };
        only(&["name", "clusterNetwork", "delegates", "cniDir", "binDir", "retryDeleteOnError"])
            .or_else(|_| only(&["name"]))
    }
}

impl RuleFormatSetting {
    /// `dialect`, else istio-cni's `native_nftables`.
    fn read(keys: &BlockReader<'_>) -> Result<Self, Error> {
        let native = keys.boolean("native_nftables")?.unwrap_or(false);
        let words = [("auto", Self::Auto), ("iptables", Self::Iptables), ("nftables", Self::Nftables)];
        let written = keys.one_of("dialect", &words)?;
        Ok(written.unwrap_or(if native { Self::Nftables } else { Self::Auto }))
    }
}

fn name(keys: &BlockReader<'_>) -> Result<String, Error> {
    let invalid = |msg: &str| Error::new(Code::InvalidConfig, msg);
    match text(keys, "name")? {
        None => Err(invalid("missing network name")),
        Some(name) if is_identifier(name) => Ok(name.to_owned()),
        Some(name) => Err(invalid("invalid characters found in network name").with_details(name)),
    }
}

/// What the runtime still knows. The second name is SPEC.md's own until libcni 1.2.3
/// (containernetworking/cni#1101).
fn valid_attachments(keys: &BlockReader<'_>) -> Result<Option<Vec<ValidAttachment>>, Error> {
    for key in ["cni.dev/valid-attachments", "cni.dev/attachments"] {
        let items = match keys.value(key) {
            None => continue,
            Some(Value::Array(items)) => items,
            Some(other) => return Err(wrong_type(key, other, "an array of objects with containerID and ifname")),
        };
        let attachment = |(i, item)| {
            let block = Block::new(format!("{key}[{i}]"), item)?;
            let required = |name| match text(&block.reader(), name)? {
                Some(value) => Ok(value.to_owned()),
                None => Err(Error::new(Code::InvalidConfig, format!("{key}[{i}].{name}: it is missing"))),
            };
            Ok(ValidAttachment { container_id: required("containerID")?, ifname: required("ifname")? })
        };
        return items.iter().enumerate().map(attachment).collect::<Result<_, _>>().map(Some);
    }
    Ok(None)
}

/// A string. istio-cni's agent writes empty ones for what is not set: they count as absent.
fn text<'a>(keys: &BlockReader<'a>, key: &'static str) -> Result<Option<&'a str>, Error> {
    Ok(keys.string(key)?.filter(|text| !text.is_empty()))
}

pub(super) fn delegate_timeout(keys: &BlockReader<'_>) -> Result<Duration, Error> {
    let seconds = keys.number("delegate_timeout_seconds", 1, 300)?.unwrap_or(DELEGATE_TIMEOUT);
    Ok(Duration::from_secs(seconds.into()))
}

/// A path. A runtime starts plugins in a directory of its own choice, so it must be absolute.
pub(super) fn absolute(keys: &BlockReader<'_>, key: &'static str) -> Result<Option<PathBuf>, Error> {
    let Some(text) = text(keys, key)? else { return Ok(None) };
    if !Path::new(text).is_absolute() {
        return Err(wrong_type(&keys.place(key), &Value::from(text), "an absolute path"));
    }
    Ok(Some(PathBuf::from(text)))
}

/// From which severity on a line is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    /// Nothing (istio-cni's `none`).
    Off,
    /// Failures.
    Error,
    /// What should be looked at.
    Warn,
    /// What was decided, one line a call.
    Info,
    /// How it came about.
    Debug,
}

impl LogLevel {
    /// `log_level`, else istio-cni's `plugin_log_level`.
    fn read(reader: &BlockReader<'_>) -> Result<Option<Self>, Error> {
        let own = Self::read_key(reader, "log_level")?;
        if own.is_some() { Ok(own) } else { Self::read_key(reader, "plugin_log_level") }
    }

    /// The level under one key.
    fn read_key(reader: &BlockReader<'_>, key: &'static str) -> Result<Option<Self>, Error> {
        let Some(word) = text(reader, key)? else { return Ok(None) };
        let accepted = "none, error, warn, info, debug";
        let refused = || wrong_type(key, &Value::from(word), accepted);
        // Multus's own word, in Multus's own key.
        let of_multus = key == "logLevel" && word.eq_ignore_ascii_case("verbose");
        of_multus.then_some(Self::Info).or_else(|| Self::named(word)).map(Some).ok_or_else(refused)
    }

    /// Returns the level with this name: the words of istio-cni and of maistra's plugin (logrus), in upper or lower
    /// case.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        match word.to_ascii_lowercase().as_str() {
            "none" | "off" => Some(Self::Off),
            "panic" | "fatal" | "error" => Some(Self::Error),
            "warn" | "warning" => Some(Self::Warn),
            "info" => Some(Self::Info),
            "debug" | "trace" => Some(Self::Debug),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::Block;
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
        assert_eq!((conf.log_level, conf.log_file), (LogLevel::Info, None));
        assert_eq!(conf.dialect, RuleFormatSetting::Auto);
        assert!(conf.args.is_empty() && conf.runtime_config.is_empty());
        assert_eq!((conf.prev_result, conf.valid_attachments), (None, None));
        assert!(conf.warnings.is_empty() && !conf.ambient_enabled);
    }

    #[test]
    fn name_then_version_then_the_rest() {
        let refused = |conf: Value| parse(&conf).expect_err("refused");
        let error = refused(json!({"cniVersion": "9", "chain": 7}));
        assert_eq!(error, Error::new(Code::InvalidConfig, "missing network name"));
        assert_eq!(refused(json!({"name": ""})).msg, "missing network name");
        let error = refused(json!({"name": "a/b", "cniVersion": "9"}));
        let wanted = Error::new(Code::InvalidConfig, "invalid characters found in network name").with_details("a/b");
        assert_eq!(error, wanted);
        assert_eq!(refused(json!({"name": "a", "cniVersion": "9", "chain": 7})).code, Code::IncompatibleVersion);
        assert_eq!(refused(json!({"name": 7})).msg, "name: 7 is not accepted; accepted: a string");
        let old = json!({"name": "a", "cniVersion": "0.3.1"}).to_string();
        assert!(NetConf::parse(old.as_bytes(), CniCommand::Check, "detour").is_err());
    }

    #[test]
    fn istio_cnis_own_configuration() {
        let conf = parse(&json!({
            "cniVersion": "0.3.1", "name": "istio-cni", "type": "istio-cni", "plugin_log_level": "debug",
            "cni_agent_run_dir": "/var/run/istio-cni", "ambient_enabled": false, "enablement_selectors": [],
            "exclude_namespaces": ["istio-system", "kube-system"], "pod_namespace": "istio-system",
            "native_nftables": true, "enable_ambient_detection_retry": false, "ipam": {}, "dns": {},
        }))
        .expect("accepted");
        assert_eq!((conf.log_level, conf.dialect), (LogLevel::Debug, RuleFormatSetting::Nftables));
        assert_eq!(conf.kubernetes.kubeconfig, Some("/var/run/istio-cni/istio-cni-kubeconfig".into()));
        assert_eq!(conf.kubernetes.exclude_namespaces, ["istio-system", "kube-system"]);
        assert_eq!(conf.kubernetes.agent_namespace.as_deref(), Some("istio-system"));
        assert_eq!(conf.warnings, [""; 0]);
    }

    #[test]
    fn an_enabled_ambient_mode_is_a_warning() {
        let conf = with("ambient_enabled", json!(true)).expect("accepted");
        assert!(conf.ambient_enabled);
        assert!(conf.warnings[0].starts_with("ambient_enabled: "), "{:?}", conf.warnings);
    }

    #[test]
    fn own_keys_win_over_istio_cnis() {
        let conf = parse(&json!({
            "name": "n", "dialect": "auto", "native_nftables": true, "log_level": "warn", "plugin_log_level": "debug",
        }));
        let conf = conf.expect("accepted");
        assert_eq!((conf.dialect, conf.log_level), (RuleFormatSetting::Auto, LogLevel::Warn));
    }

    #[test]
    fn what_runtimes_and_multus_add() {
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
    fn the_attachments_that_are_left_under_either_name() {
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
        assert_eq!(error.msg, "cni.dev/valid-attachments[0].ifname: it is missing");
    }

    #[test]
    fn errors_name_the_key_and_what_is_accepted() {
        for (key, value, wanted) in [
            ("dialect", json!("nft"), r#"dialect: "nft" is not accepted; accepted: auto, iptables, nftables"#),
            ("log_file", json!("a.log"), r#"log_file: "a.log" is not accepted; accepted: an absolute path"#),
            ("native_nftables", json!("yes"), r#"native_nftables: "yes" is not accepted; accepted: true or false"#),
            ("args", json!([]), "args: [] is not accepted; accepted: an object"),
            ("args", json!({"cni": 1}), "args.cni: 1 is not accepted; accepted: an object"),
            ("runtimeConfig", json!(1), "runtimeConfig: 1 is not accepted; accepted: an object"),
        ] {
            let error = with(key, value).expect_err("refused");
            assert_eq!((error.code, error.msg.as_str()), (Code::InvalidConfig, wanted));
        }
    }

    #[test]
    fn a_primary_plugin_has_a_chain_only_where_it_is_written_down() {
        let conf = with("clusterNetwork", json!("ovn")).expect("accepted");
        assert!(conf.primary.is_some() && conf.chain.is_empty());
        let conf = parse(
            &json!({"name": "n", "type": "multus", "delegates": [{"type": "x"}], "chain": [{"type": "uid-exclude"}]}),
        );
        assert_eq!(conf.expect("accepted").chain.len(), 1);
        assert!(with("kubeconfig", json!("relative")).expect("no primary plugin's key").primary.is_none());
    }

    #[test]
    fn own_keys_win_over_multus() {
        let multus = json!({
            "name": "n", "type": "detour", "clusterNetwork": "ovn", "kubeconfig": "/m", "binDir": "/m/bin",
            "logFile": "/m.log", "logLevel": "debug",
        });
        let conf = parse(&multus).expect("accepted");
        assert_eq!(conf.kubernetes.kubeconfig, Some("/m".into()));
        assert_eq!((conf.kubernetes.cni_bin_dir, conf.log_file), (Some("/m/bin".into()), Some("/m.log".into())));
        assert_eq!(conf.log_level, LogLevel::Debug);
        let mut both = multus;
        both["kubernetes"] = json!({"kubeconfig": "/k", "cni_bin_dir": "/k/bin"});
        (both["log_file"], both["log_level"]) = (json!("/k.log"), json!("warn"));
        let conf = parse(&both).expect("accepted");
        assert_eq!(conf.kubernetes.kubeconfig, Some("/k".into()));
        assert_eq!((conf.kubernetes.cni_bin_dir, conf.log_file), (Some("/k/bin".into()), Some("/k.log".into())));
        assert_eq!(conf.log_level, LogLevel::Warn);
    }

    fn read(conf: &Value) -> Result<Option<LogLevel>, Error> {
        LogLevel::read(&Block::new("", conf).expect("an object").reader())
    }

    #[test]
    fn everybodys_words_are_understood() {
        for (word, wanted) in [
            ("none", LogLevel::Off),
            ("panic", LogLevel::Error),
            ("fatal", LogLevel::Error),
            ("error", LogLevel::Error),
            ("warn", LogLevel::Warn),
            ("warning", LogLevel::Warn),
            ("info", LogLevel::Info),
            ("DEBUG", LogLevel::Debug),
        ] {
            assert_eq!(read(&json!({"log_level": word})), Ok(Some(wanted)), "{word}");
            assert_eq!(read(&json!({"plugin_log_level": word})), Ok(Some(wanted)), "{word}");
        }
        assert_eq!(read(&json!({"log_level": ""})), Ok(None));
    }

    #[test]
    fn another_word_is_refused() {
        let error = read(&json!({"plugin_log_level": "loud"})).expect_err("refused");
        let wanted = r#"plugin_log_level: "loud" is not accepted; accepted: none, error, warn, info, debug"#;
        assert_eq!(error.msg, wanted);
    }

    #[test]
    fn verbose_is_accepted_in_multus_key_alone() {
        let keys = Block::new("", &json!({"logLevel": "verbose"})).expect("an object");
        assert_eq!(LogLevel::read_key(&keys.reader(), "logLevel"), Ok(Some(LogLevel::Info)));
        for key in ["log_level", "plugin_log_level"] {
            assert!(read(&json!({key: "verbose"})).is_err(), "{key}");
        }
    }
}
