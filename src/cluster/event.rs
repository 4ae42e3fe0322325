//! What the cluster's users are told about a pod.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// An event of a pod, as `kubectl describe pod` shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Event {
    /// Whether something should be looked at (`type: Warning`).
    pub warning: bool,
    /// Why, in one word for programs.
    pub reason: Cow<'static, str>,
    /// What happened, for people.
    pub message: String,
}

/// An event as others told it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedEvent {
    /// Whether something should be looked at (`type: Warning`).
    pub warning: bool,
    /// Why, in one word for programs.
    pub reason: String,
    /// What happened, for people.
    pub message: String,
    /// Who told it (`source.component`, or `reportingComponent`).
    pub by: String,
    /// When it was told last, in seconds since 1970; 0 where it does not say.
    pub last: i64,
    /// How often.
    pub count: u64,
}
