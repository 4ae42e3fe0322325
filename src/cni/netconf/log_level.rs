//! From which severity on is logged.

use super::text;
use crate::cni::{Error, Reader, list::wrong_type};
use serde_json::Value;

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
    pub(super) fn read(reader: &Reader<'_>) -> Result<Option<Self>, Error> {
        let own = Self::read_key(reader, "log_level")?;
        if own.is_some() { Ok(own) } else { Self::read_key(reader, "plugin_log_level") }
    }

    /// The level under one key.
    pub(super) fn read_key(reader: &Reader<'_>, key: &'static str) -> Result<Option<Self>, Error> {
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
