//! What the agent does about running pods, also the label selector of `--repair-selector`, and what its jobs share.

use super::limits::DeletionLimit;
use crate::agent::install::NodeFiles;
use crate::agent::metrics::Metrics;
use crate::agent::pod_reports::PodReports;
use crate::cluster::ServiceAccount;
use crate::policy::LivePolicyScope;
use kube::core::{Expression, Selector};
use std::sync::Mutex;

/// What the agent does about running pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSettings {
    /// How pods that bypass the sidecar are repaired; `None` to not repair them.
    pub repair: Option<RepairSettings>,
    /// Which changes of their policies running pods follow.
    pub live_policy: LivePolicyScope,
}

impl PodSettings {
    /// Whether the agent reads the saved state of running pods.
    #[must_use]
    pub fn uses_saved_state(&self) -> bool {
        self.repair.is_some() || self.live_policy != LivePolicyScope::Off
    }
}

/// Which pods are repaired, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepairSettings {
    /// The labels of the pods.
    pub selector: Selector,
    /// The mode.
    pub mode: RepairMode,
    /// Key and value of the label for [`RepairMode::Label`].
    pub label: (String, String),
}

/// How pods are repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairMode {
    /// The pod keeps running and gets its rules.
    InPlace,
    /// The pod is deleted if a controller replaces it.
    Delete,
    /// The pod is labeled for another tool.
    Label,
}

impl RepairMode {
    /// Returns the value of the metrics' label `type`.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::InPlace => "repair",
            Self::Delete => "delete",
            Self::Label => "label",
        }
    }
}

/// What all jobs share.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) settings: PodSettings,
    /// The node on which the plugin is installed.
    pub(super) node: NodeFiles,
    /// The account that changes pods.
    pub(super) account: ServiceAccount,
    /// The Events and conditions of pods.
    pub(super) reports: PodReports,
    pub(super) metrics: Metrics,
    pub(super) deletions: Mutex<DeletionLimit>,
}

impl Tools {
    /// Returns the reports about policies. Without live policy, the agent lacks the permissions to write them.
    pub(super) fn policy_reports(&self) -> PodReports {
        match self.settings.live_policy {
            LivePolicyScope::Off => PodReports::none(),
            LivePolicyScope::Exclusions | LivePolicyScope::All => self.reports.clone(),
        }
    }
}

const SYNTAX: &str = "KEY=VALUE, KEY!=VALUE, KEY in (A,B), KEY notin (A,B), KEY, !KEY, separated by commas";

/// Parses a selector. An empty text selects all pods.
///
/// # Errors
/// The text is not a selector.
pub fn parse_selector(text: &str) -> Result<Selector, String> {
    let parts = split(text).into_iter().map(str::trim).filter(|part| !part.is_empty());
    let parse = |part| parse_expression(part).ok_or_else(|| format!("invalid value {part:?}; expected {SYNTAX}"));
    parts.map(parse).collect()
}

/// Splits the text at commas that are not in parentheses.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0_i32);
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn parse_expression(part: &str) -> Option<Expression> {
    if let Some((key, value)) = part.split_once("!=") {
        return Some(Expression::NotEqual(parse_key(key)?, parse_value(value)?));
    }
    if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return Some(Expression::Equal(parse_key(key)?, parse_value(value)?));
    }
    if let Some((head, values)) = part.strip_suffix(')').and_then(|part| part.split_once('(')) {
        let values = values.split(',').map(parse_value).collect::<Option<_>>()?;
        return match head.trim().rsplit_once(char::is_whitespace)? {
            (key, "in") => Some(Expression::In(parse_key(key)?, values)),
            (key, "notin") => Some(Expression::NotIn(parse_key(key)?, values)),
            _ => None,
        };
    }
    match part.strip_prefix('!') {
        Some(key) => parse_key(key).map(Expression::DoesNotExist),
        None => parse_key(part).map(Expression::Exists),
    }
}

fn parse_key(text: &str) -> Option<String> {
    parse_value(text).filter(|key| !key.is_empty())
}

fn parse_value(text: &str) -> Option<String> {
    let text = text.trim();
    let is_valid = text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
    is_valid.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::SelectorExt;

    fn selects(text: &str) -> bool {
        let labels = [("app", "web"), ("tier", "front")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        parse_selector(text).expect("accepted").matches(&labels.into())
    }

    #[test]
    fn every_form_of_kubectl_is_supported() {
        for text in ["", "app=web", "app == web,tier", "app!=db", "other!=x", "!other", "app in (db, web),tier=front"] {
            assert!(selects(text), "{text}");
        }
        for text in ["app=db", "other=web", "other", "!app", "app!=web", "app notin (web)", "app=web,tier=back"] {
            assert!(!selects(text), "{text}");
        }
    }

    #[test]
    fn invalid_selectors_are_refused_with_the_syntax() {
        for text in ["app in web", "=x", "app>1", "a b", "app like (x)", "app=(x"] {
            let error = parse_selector(text).expect_err(text);
            assert!(error.contains("expected KEY=VALUE"), "{error}");
        }
    }
}
