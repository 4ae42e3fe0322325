//! Keys of several configurations: optional text, absolute paths, timeouts, log levels, and the annotations of the pod as
//! the container runtime passes them. The runtime has them from the kubelet, so they need no API server.

use crate::cni::block::{BlockReader, excerpt, wrong_type};
use crate::cni::error::{Code, Error};
use crate::cni::{closest, did_you_mean};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing::level_filters::LevelFilter;

/// The key of the entry in an own list with the directory of the cluster network's list.
pub const CNI_CONF_DIR: &str = "cni_conf_dir";

/// The default timeout of an executable, in seconds. kubelet gives a runtime two minutes for a pod
/// (`runtimeRequestTimeout`), in which a failed ADD must also be undone.
const DELEGATE_TIMEOUT: u32 = 60;

/// Reads a string. An empty one counts as absent: istio-cni's agent writes empty strings for unset keys.
pub(super) fn text<'a>(keys: &BlockReader<'a>, key: &'static str) -> Result<Option<&'a str>, Error> {
    Ok(keys.string(key)?.filter(|text| !text.is_empty()))
}

/// Reads a path. It must be absolute, since the working directory of a plugin depends on the runtime.
pub(super) fn absolute(keys: &BlockReader<'_>, key: &'static str) -> Result<Option<PathBuf>, Error> {
    let Some(text) = text(keys, key)? else { return Ok(None) };
    if !Path::new(text).is_absolute() {
        return Err(wrong_type(&keys.place(key), &Value::from(text), "an absolute path"));
    }
    Ok(Some(PathBuf::from(text)))
}

/// Reads `delegate_timeout_seconds`.
pub(super) fn delegate_timeout(keys: &BlockReader<'_>) -> Result<Duration, Error> {
    let seconds = keys.number("delegate_timeout_seconds", 1, 300)?.unwrap_or(DELEGATE_TIMEOUT);
    Ok(Duration::from_secs(seconds.into()))
}

/// Reads the minimum severity of the events that are logged: `log_level`, or istio-cni's `plugin_log_level` without it.
pub(super) fn log_level(reader: &BlockReader<'_>) -> Result<Option<LevelFilter>, Error> {
    let own = log_level_of(reader, "log_level")?;
    if own.is_some() { Ok(own) } else { log_level_of(reader, "plugin_log_level") }
}

/// Reads the level of one key, in upper or lower case: the names of istio-cni and of maistra's plugin (logrus). Multus's
/// level `verbose` is accepted only in Multus's key `logLevel`.
pub(super) fn log_level_of(reader: &BlockReader<'_>, key: &'static str) -> Result<Option<LevelFilter>, Error> {
    let Some(name) = text(reader, key)? else { return Ok(None) };
    Ok(Some(match name.to_ascii_lowercase().as_str() {
        "none" | "off" => LevelFilter::OFF,
        "panic" | "fatal" | "error" => LevelFilter::ERROR,
        "warn" | "warning" => LevelFilter::WARN,
        "info" => LevelFilter::INFO,
        "verbose" if key == "logLevel" => LevelFilter::INFO,
        "debug" | "trace" => LevelFilter::DEBUG,
        _ => return Err(wrong_type(key, &Value::from(name), "one of none, error, warn, info, debug")),
    }))
}

/// The capability with which runtimes pass all annotations of the pod (containerd, `internal/cri/annotations`; CRI-O,
/// `ocicni`).
pub const POD_ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";

/// The maximum size of all keys and values. The API server accepts 256 KiB (apimachinery, `TotalAnnotationSizeLimitB`),
/// and the kubelet adds a few annotations.
const MAX_SIZE: usize = 512 << 10;

/// Checks the annotations in `runtimeConfig`. Removes invalid ones with a warning, all of them together: a part could
/// lack the annotation that decides. Replaces `null`, as which containerd passes a pod without annotations.
pub(super) fn check_annotations(runtime_config: &mut Map<String, Value>, warnings: &mut Vec<String>) {
    let problem = match runtime_config.get_mut(POD_ANNOTATIONS) {
        None => return,
        Some(absent @ Value::Null) => {
            *absent = Value::Object(Map::new());
            return;
        }
        Some(Value::Object(annotations)) => problem_of(annotations),
        Some(other) => Some(wrong_type(&place(), other, "an object of strings").msg),
    };
    if let Some(problem) = problem {
        runtime_config.shift_remove(POD_ANNOTATIONS);
        warnings.push(format!("{problem}; the annotations from the runtime are ignored"));
    }
}

fn problem_of(annotations: &Map<String, Value>) -> Option<String> {
    let mut size = 0;
    for (key, value) in annotations {
        let Value::String(text) = value else {
            return Some(wrong_type(&format!("{}.{key}", place()), value, "a string").msg);
        };
        size += key.len() + text.len();
    }
    (size > MAX_SIZE).then(|| format!("{}: expected at most {MAX_SIZE} bytes, got {size}", place()))
}

fn place() -> String {
    format!("runtimeConfig.{POD_ANNOTATIONS}")
}

/// The keys of this plugin at the top level.
const OWN: &[&str] = &[
    "allow",
    "attachments_may_exclude_namespaces",
    "auto_dialect",
    "chain",
    "chain_types",
    "cni_conf_dir",
    "delegate_timeout_seconds",
    "dialect",
    "in_process_types",
    "kubernetes",
    "log_file",
    "log_level",
    "merge_addresses",
    "network_status",
    "node_bounds",
    "outside_bounds",
    "readiness_timeout_seconds",
];
/// The keys of istio-cni (`cni/pkg/plugin/plugin.go`), earlier versions included.
const ISTIO: &[&str] = &[
    "ambient_enabled",
    "cni_agent_run_dir",
    "cni_event_address",
    "ebpf_enabled",
    "enable_ambient_detection_retry",
    "enablement_selectors",
    "hostNSEnterExec",
    "exclude_namespaces",
    "log_uds_address",
    "native_nftables",
    "plugin_log_level",
    "pod_namespace",
];
/// The keys of Multus (`docs/configuration.md`), without those of its daemon's own file.
const MULTUS: &[&str] = &[
    "auxiliaryCNIChainName",
    "binDir",
    "clusterNetwork",
    "cniDir",
    "confDir",
    "daemonSocketDir",
    "defaultNetworks",
    "delegates",
    "globalNamespaces",
    "kubeconfig",
    "logFile",
    "logLevel",
    "logOptions",
    "logToStderr",
    "multusNamespace",
    "namespaceIsolation",
    "readinessindicatorfile",
    "retryDeleteOnError",
    "systemNamespaces",
];
/// The keys of the CNI specification, of libcni, and of all plugins of the CNI project.
const CNI: &[&str] = &[
    "args",
    "capabilities",
    "cniVersion",
    "cniVersions",
    "disableCheck",
    "disableGC",
    "dns",
    "ipMasq",
    "ipam",
    "loadOnlyInlinedPlugins",
    "name",
    "plugins",
    "prevResult",
    "runtimeConfig",
    "type",
];
/// The prefix of the specification's keys for runtimes.
const CNI_PREFIX: &str = "cni.dev/";
/// The keys in `kubernetes` of maistra's plugin and of earlier versions of istio-cni, which have no effect here.
const MAISTRA: [&str; 4] = ["intercept_type", "iptables_script", "k8s_api_root", "node_name"];
/// The maximum number of unknown keys with a suggestion: the author of an attachment controls their number.
const MAX_SUGGESTIONS: usize = 8;

/// Returns a warning for each key at the top level that is unknown to this plugin and to the others above.
pub(super) fn at_the_top(keys: &Map<String, Value>) -> Vec<String> {
    warnings("", unknown_at_the_top(keys), || names([OWN, ISTIO, MULTUS]))
}

/// Checks that no unknown key at the top level is a misspelled `chain` or `allow`: an ADD would succeed without the
/// exclusions, or pods could exclude more than the bounds permit. Keys of other plugins with other values than lists and
/// objects are ignored.
///
/// # Errors
/// [`Code::InvalidConfig`] with the first such key.
pub(super) fn check_misspelled(keys: &Map<String, Value>) -> Result<(), Error> {
    let meant = |key: &str| {
        let is_block = keys[key].is_array() || keys[key].is_object();
        let meant = is_block.then(|| closest(key, ["chain", "chain_types", "allow"])).flatten();
        meant.filter(|meant| *meant != "chain_types")
    };
    match unknown_at_the_top(keys).find_map(|key| Some((key, meant(key)?))) {
        Some((key, meant)) => {
            let msg = format!("{}: unknown key; did you mean {meant:?}?", excerpt(key));
            Err(Error::new(Code::InvalidConfig, msg))
        }
        None => Ok(()),
    }
}

/// Returns an error message for the first key of an attachment of `--attachments` that is unknown at the top level, with
/// the suggestion of a key of this plugin: those of Multus that resemble `namespace` have no effect in an attachment.
#[must_use]
pub fn unknown_key(keys: &Map<String, Value>) -> Option<String> {
    let key = unknown_at_the_top(keys).next()?;
    let suggestion = did_you_mean(key, OWN.iter().copied());
    let next = if suggestion.is_empty() { "; remove it" } else { suggestion.as_str() };
    Some(format!("{}: unknown key{next}", excerpt(key)))
}

/// Returns whether the key at the top level is one of this plugin, of istio-cni or of Multus that this plugin may read.
pub(in crate::cni) fn is_of_this_plugin(key: &str) -> bool {
    let aliases = ["cni_agent_run_dir", "exclude_namespaces", "pod_namespace"];
    names([OWN, MULTUS]).chain(aliases).any(|known| known == key)
}

fn names<const N: usize>(lists: [&'static [&'static str]; N]) -> impl Iterator<Item = &'static str> {
    lists.into_iter().flatten().copied()
}

fn unknown_at_the_top(keys: &Map<String, Value>) -> impl Iterator<Item = &str> {
    // The lists of the most frequent keys first.
    let is_known =
        |key: &&str| key.starts_with(CNI_PREFIX) || [CNI, OWN, ISTIO, MULTUS].iter().any(|names| names.contains(key));
    keys.keys().map(String::as_str).filter(move |key| !is_known(key))
}

/// Returns a warning for each of the `unknown` keys in `kubernetes` that is not one of maistra's. `known` are the
/// keys that are read there.
pub(super) fn in_kubernetes(unknown: &[&str], known: impl Fn() -> Vec<&'static str>) -> Vec<String> {
    let unknown = unknown.iter().copied().filter(|key| !MAISTRA.contains(key));
    warnings("kubernetes.", unknown, || known().into_iter())
}

fn warnings<'a, K: Iterator<Item = &'static str>>(
    prefix: &str,
    unknown: impl Iterator<Item = &'a str>,
    known: impl Fn() -> K,
) -> Vec<String> {
    let warning = |(i, key): (usize, &str)| {
        let suggestion = if i < MAX_SUGGESTIONS { did_you_mean(key, known()) } else { String::new() };
        format!("{prefix}{}: unknown key, ignored{suggestion}", excerpt(key))
    };
    unknown.enumerate().map(warning).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::block::Block;
    use crate::cni::{CniCommand, NetConf};
    use serde_json::json;
    use std::time::{Duration, Instant};

    fn read(conf: &Value) -> Result<Option<LevelFilter>, Error> {
        log_level(&Block::new("", conf).expect("an object").reader())
    }

    #[test]
    fn level_names_of_istio_cni_and_logrus_are_accepted() {
        for (name, wanted) in [
            ("none", LevelFilter::OFF),
            ("panic", LevelFilter::ERROR),
            ("fatal", LevelFilter::ERROR),
            ("error", LevelFilter::ERROR),
            ("warn", LevelFilter::WARN),
            ("warning", LevelFilter::WARN),
            ("info", LevelFilter::INFO),
            ("DEBUG", LevelFilter::DEBUG),
        ] {
            assert_eq!(read(&json!({"log_level": name})), Ok(Some(wanted)), "{name}");
            assert_eq!(read(&json!({"plugin_log_level": name})), Ok(Some(wanted)), "{name}");
        }
        assert_eq!(read(&json!({"log_level": ""})), Ok(None));
    }

    #[test]
    fn an_unknown_level_is_refused() {
        let error = read(&json!({"plugin_log_level": "loud"})).expect_err("refused");
        let wanted = r#"plugin_log_level: invalid value "loud"; expected one of none, error, warn, info, debug"#;
        assert_eq!(error.msg, wanted);
    }

    #[test]
    fn verbose_is_accepted_in_multus_key_alone() {
        let keys = Block::new("", &json!({"logLevel": "verbose"})).expect("an object");
        assert_eq!(log_level_of(&keys.reader(), "logLevel"), Ok(Some(LevelFilter::INFO)));
        for key in ["log_level", "plugin_log_level"] {
            assert!(read(&json!({key: "verbose"})).is_err(), "{key}");
        }
    }

    fn conf(runtime_config: &Value) -> NetConf {
        let conf = json!({"name": "n", "type": "detour", "runtimeConfig": runtime_config});
        NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("accepted")
    }

    fn passed(annotations: &Value) -> NetConf {
        conf(&json!({POD_ANNOTATIONS: annotations, "mac": "m"}))
    }

    #[test]
    fn annotations_of_the_runtime_are_read() {
        assert_eq!(conf(&json!({})).pod_annotations(), None);
        let read = passed(&json!({"a": "1", "b": ""}));
        assert_eq!(read.pod_annotations(), json!({"a": "1", "b": ""}).as_object());
        assert_eq!(read.warnings, [""; 0]);
        let none = passed(&Value::Null);
        assert_eq!((none.pod_annotations(), none.warnings.len()), (Some(&Map::new()), 0));
    }

    #[test]
    fn invalid_annotations_are_ignored_as_a_whole_with_a_warning() {
        let key = "x".repeat(MAX_SIZE);
        let table = [
            (json!([]), "runtimeConfig.io.kubernetes.cri.pod-annotations: invalid value []; expected an object"),
            (json!("a"), "expected an object of strings; the annotations from the runtime are ignored"),
            (json!({"a": "1", "b": 7}), "pod-annotations.b: invalid value 7; expected a string; the annotations"),
            (json!({"a": null}), "pod-annotations.a: invalid value null"),
            (json!({key.as_str(): "1"}), "expected at most 524288 bytes, got 524289"),
        ];
        for (annotations, warning) in table {
            let ignored = passed(&annotations);
            assert_eq!(ignored.pod_annotations(), None);
            assert_eq!(Value::Object(ignored.runtime_config), json!({"mac": "m"}), "other keys remain");
            assert!(ignored.warnings[0].contains(warning), "{warning}: {:?}", ignored.warnings);
        }
        assert!(passed(&json!({key[1..]: "1"})).pod_annotations().is_some());
    }

    fn top(value: &Value) -> Vec<String> {
        at_the_top(value.as_object().expect("an object"))
    }

    #[test]
    fn the_warning_for_a_misspelled_key_suggests_the_right_one() {
        let keys = json!({"chian": [], "log_levle": "x", "Dialect": "auto", "something": 1, "chain": []});
        let wanted = [
            "chian: unknown key, ignored; did you mean \"chain\"?",
            "log_levle: unknown key, ignored; did you mean \"log_level\"?",
            "Dialect: unknown key, ignored; did you mean \"dialect\"?",
            "something: unknown key, ignored",
        ];
        assert_eq!(top(&keys), wanted);
        let others = json!({"binDir": "/b", "hostNSEnterExec": false, "readinessindicatorfile": "/f"});
        assert_eq!(top(&others), [""; 0], "keys of Multus and istio-cni");
        let known = ["kubeconfig", "agent_socket"];
        let wanted = ["kubernetes.kubeconfg: unknown key, ignored; did you mean \"kubeconfig\"?"];
        assert_eq!(
            in_kubernetes(&["kubeconfg", "iptables_script", "node_name", "k8s_api_root", "intercept_type"], || known
                .to_vec()),
            wanted
        );
    }

    #[test]
    fn a_misspelled_chain_or_allow_is_an_error() {
        let check = |keys: Value| check_misspelled(keys.as_object().expect("an object")).map_err(|error| error.msg);
        for key in ["chian", "Chain", "chains", "cain", "chain_"] {
            let wanted = format!("{key}: unknown key; did you mean \"chain\"?");
            assert_eq!(check(json!({key: [{"type": "uid-exclude"}]})), Err(wanted.clone()));
            assert_eq!(check(json!({key: {"type": "uid-exclude"}})), Err(wanted));
        }
        let wanted = Err("alow: unknown key; did you mean \"allow\"?".to_owned());
        assert_eq!(check(json!({"alow": [{"uids": "1000-1999"}]})), wanted);
        for other in [
            json!({"chain": [], "chain_type": [], "chain_types": [], "main": [], "plugins": []}),
            json!({"chaining-mode": "generic-veth", "chained": true, "chian": null, "allowed": "all", "flow": []}),
        ] {
            assert_eq!(check(other), Ok(()));
        }
    }

    #[test]
    fn the_schema_of_the_chart_has_every_key_that_the_chart_can_apply() {
        let text = include_str!("../../../manifests/chart/values.schema.json");
        let schema: Value = serde_json::from_str(text).expect("JSON");
        let properties = |definition: &str| {
            let keys = schema["definitions"][definition]["properties"].as_object().expect("an object");
            keys.keys().cloned().collect::<std::collections::BTreeSet<String>>()
        };
        let owned = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
        // The chart's logLevel sets log_level, the agent the next two, and no file contains the last one. kubernetes has a
        // list of its own.
        let elsewhere = ["log_level", "cni_conf_dir", "auto_dialect", "node_bounds"];
        let own = names([OWN]).filter(|key| !elsewhere.contains(key)).map(str::to_owned);
        // Of Multus's keys, those that have an effect, except those for which detour has keys of its own.
        let multus = owned(&[
            "auxiliaryCNIChainName",
            "binDir",
            "clusterNetwork",
            "cniDir",
            "confDir",
            "defaultNetworks",
            "delegates",
            "globalNamespaces",
            "multusNamespace",
            "namespaceIsolation",
            "readinessindicatorfile",
            "retryDeleteOnError",
            "systemNamespaces",
        ]);
        let wanted = own.chain(multus).chain(owned(&["capabilities"])).collect();
        assert_eq!(properties("config"), wanted);
        let of_attachment =
            owned(&["capabilities", "chain", "dialect", "log_level", "name", "namespace", "namespaces"]);
        assert_eq!(properties("attachment"), of_attachment.into_iter().collect());
    }

    #[test]
    fn keys_of_runtimes_and_other_plugins_cause_no_warnings() {
        for keys in [OWN, ISTIO, MULTUS, CNI, &["cni.dev/valid-attachments", "cni.dev/attachments"]] {
            let keys: Map<String, Value> = keys.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
            assert_eq!(at_the_top(&keys), [""; 0]);
        }
    }

    #[test]
    fn many_or_long_unknown_keys_are_handled_fast() {
        let started = Instant::now();
        let many: Map<String, Value> = (0..90_000).map(|i| (format!("chian{i}"), Value::Null)).collect();
        let suggested = at_the_top(&many).iter().filter(|warning| warning.contains("did you mean")).count();
        assert_eq!(suggested, MAX_SUGGESTIONS);
        let long = [("chian".repeat(800_000), Value::Null)].into_iter().collect();
        assert!(at_the_top(&long)[0].len() < 300);
        let lists: Map<String, Value> = (0..90_000).map(|i| (format!("list{i}"), json!([]))).collect();
        assert_eq!(check_misspelled(&lists), Ok(()));
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    }
}
