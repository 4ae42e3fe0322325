//! What the cluster's users are told about a pod.

/// An event of a pod, as `kubectl describe pod` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Whether something should be looked at (`type: Warning`).
    pub warning: bool,
    /// Why, in one word for programs.
    pub reason: &'static str,
    /// What happened, for people.
    pub message: String,
}
