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
    /// `log_level`, else istio-cni's `plugin_log_level`, else [`LogLevel::Info`].
    pub(super) fn read(reader: &Reader<'_>) -> Result<Self, Error> {
        for key in ["log_level", "plugin_log_level"] {
            if let Some(word) = text(reader, key)? {
                let refused = || wrong_type(key, &Value::from(word), "none, error, warn, info, debug");
                return Self::named(word).ok_or_else(refused);
            }
        }
        Ok(Self::Info)
    }

    /// By the words of istio-cni, of maistra's plugin (logrus) and of Multus, in upper or lower case.
    fn named(word: &str) -> Option<Self> {
        match word.to_ascii_lowercase().as_str() {
            "none" | "off" => Some(Self::Off),
            "panic" | "fatal" | "error" => Some(Self::Error),
            "warn" | "warning" => Some(Self::Warn),
            "info" | "verbose" => Some(Self::Info),
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

    fn read(conf: &Value) -> Result<LogLevel, Error> {
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
            ("verbose", LogLevel::Info),
            ("DEBUG", LogLevel::Debug),
            ("", LogLevel::Info),
        ] {
            assert_eq!(read(&json!({"log_level": word})), Ok(wanted), "{word}");
            assert_eq!(read(&json!({"plugin_log_level": word})), Ok(wanted), "{word}");
        }
    }

    #[test]
    fn another_word_is_refused() {
        let error = read(&json!({"plugin_log_level": "loud"})).expect_err("refused");
        let wanted = r#"plugin_log_level: "loud" is not accepted; accepted: none, error, warn, info, debug"#;
        assert_eq!(error.msg, wanted);
    }
}
