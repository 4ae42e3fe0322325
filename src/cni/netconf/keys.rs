//! Keys of several configurations: optional text, absolute paths, timeouts, log levels, and the annotations of the pod as
//! the container runtime passes them. The runtime has them from the kubelet, so they need no API server.

use crate::cni::block::BlockReader;
use crate::cni::error::Error;
use crate::cni::list::wrong_type;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::time::Duration;

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

/// The minimum severity of the events that are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    /// No events (istio-cni's `none`).
    Off,
    /// Failures.
    Error,
    /// Also events that may need attention.
    Warn,
    /// Also the decisions of each call, one line per call.
    Info,
    /// Also the reasons for decisions.
    Debug,
}

impl LogLevel {
    /// Reads `log_level`, else istio-cni's `plugin_log_level`.
    pub(super) fn read(reader: &BlockReader<'_>) -> Result<Option<Self>, Error> {
        let own = Self::read_key(reader, "log_level")?;
        if own.is_some() { Ok(own) } else { Self::read_key(reader, "plugin_log_level") }
    }

    /// Reads the level of one key. Multus's level `verbose` is accepted only in Multus's key `logLevel`.
    pub(super) fn read_key(reader: &BlockReader<'_>, key: &'static str) -> Result<Option<Self>, Error> {
        let Some(name) = text(reader, key)? else { return Ok(None) };
        let invalid = || wrong_type(key, &Value::from(name), "one of none, error, warn, info, debug");
        let is_verbose = key == "logLevel" && name.eq_ignore_ascii_case("verbose");
        is_verbose.then_some(Self::Info).or_else(|| Self::named(name)).map(Some).ok_or_else(invalid)
    }

    /// Returns the level with this name, in upper or lower case: the names of istio-cni and of maistra's plugin
    /// (logrus).
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "none" | "off" => Some(Self::Off),
            "panic" | "fatal" | "error" => Some(Self::Error),
            "warn" | "warning" => Some(Self::Warn),
            "info" => Some(Self::Info),
            "debug" | "trace" => Some(Self::Debug),
            _ => None,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::block::Block;
    use crate::cni::{CniCommand, NetConf};
    use serde_json::json;

    fn read(conf: &Value) -> Result<Option<LogLevel>, Error> {
        LogLevel::read(&Block::new("", conf).expect("an object").reader())
    }

    #[test]
    fn level_names_of_istio_cni_and_logrus_are_accepted() {
        for (name, wanted) in [
            ("none", LogLevel::Off),
            ("panic", LogLevel::Error),
            ("fatal", LogLevel::Error),
            ("error", LogLevel::Error),
            ("warn", LogLevel::Warn),
            ("warning", LogLevel::Warn),
            ("info", LogLevel::Info),
            ("DEBUG", LogLevel::Debug),
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
        assert_eq!(LogLevel::read_key(&keys.reader(), "logLevel"), Ok(Some(LogLevel::Info)));
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
}
