//! The bypass of an excluded container as a value and in words, for several reports.

use crate::policy::{BypassEnd, ContainerScope};
use serde::Serialize;

/// The container that sends a packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ContainerSender {
    /// Its name.
    pub name: String,
    /// Whether the pod's policy excludes it.
    pub excluded: bool,
    /// The traffic that bypasses the sidecar now; `None` if none does.
    pub bypasses: Option<ContainerScope>,
    /// When this bypass ends; `None` without a bypass, or if the policy does not request it.
    pub until: Option<BypassEnd>,
    /// Where the packet arrives after that; `None` unless the bypass ends while the container runs.
    pub afterwards: Option<String>,
}

impl ContainerSender {
    /// Returns one line: whether the container's traffic bypasses the sidecar, and when this ends.
    pub(super) fn text(&self) -> String {
        let Some(scope) = self.bypasses else {
            return match self.excluded {
                false => "not excluded".to_owned(),
                true => {
                    "excluded, but it has no element: it does not run, its bypass has ended, or it started captured"
                        .to_owned()
                }
            };
        };
        let what = scope_text(scope);
        match (self.until, &self.afterwards) {
            (None, _) => format!("{what} bypasses the sidecar; no saved policy requests this"),
            (Some(until), None) => format!("{what} bypasses the sidecar {}", end_text(until)),
            (Some(until), Some(then)) => format!("{what} bypasses the sidecar {}; then: {then}", end_text(until)),
        }
    }
}

/// Returns a scope in words.
pub(super) const fn scope_text(scope: ContainerScope) -> &'static str {
    match scope {
        ContainerScope::All => "all outbound traffic",
        ContainerScope::Dns => "DNS",
    }
}

/// Returns the end of a bypass in words.
pub(super) const fn end_text(until: BypassEnd) -> &'static str {
    match until {
        BypassEnd::ProxyReady => "until the proxy accepts connections",
        BypassEnd::ContainerExit => "until the container exits",
    }
}
