//! The settings of the redirection as `explain` shows them: key, value, sources.

use crate::policy::Redirect;
use crate::sub_plugins::{SettingSource, setting_values};
use serde::Serialize;
use serde_json::Value;

/// A setting of the redirection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// The key in an `istio-redirect` block.
    pub key: &'static str,
    /// The value in effect: a list of strings or `*`, a number, a boolean or a word.
    pub value: Value,
    /// The sources of the value; `default` if it is not set.
    pub sources: Vec<String>,
}

impl Setting {
    /// Returns whether the setting has Istio's default because it is not set.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.sources.iter().all(|source| *source == SettingSource::Default.to_string())
    }

    /// Returns the value in one line.
    #[must_use]
    pub fn shown(&self) -> String {
        match &self.value {
            Value::Array(items) if items.is_empty() => "none".to_owned(),
            Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(", "),
            other => plain(other),
        }
    }
}

/// Returns every setting of `redirect` that has a source.
pub(super) fn settings(redirect: &Redirect, origins: impl Iterator<Item = (&'static str, String)>) -> Vec<Setting> {
    let mut settings: Vec<Setting> =
        setting_values(redirect).map(|(key, value)| Setting { key, value, sources: Vec::new() }).collect();
    for (key, source) in origins {
        if let Some(setting) = settings.iter_mut().find(|setting| setting.key == key)
            && !setting.sources.contains(&source)
        {
            setting.sources.push(source);
        }
    }
    settings.retain(|setting| !setting.sources.is_empty());
    settings
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
