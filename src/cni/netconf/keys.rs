//! Keys that several configurations have: optional text, absolute paths, timeouts and log levels.

use crate::cni::block::BlockReader;
use crate::cni::error::Error;
use crate::cni::list::wrong_type;
use serde_json::Value;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::block::Block;
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
}
