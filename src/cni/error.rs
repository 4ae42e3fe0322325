//! Errors of a plugin call, and the table of their codes.

use crate::printable::{cut, line};
use serde_json::json;
use std::fmt::Display;

/// The maximum length of each text of an error object, in bytes: runtimes log it again for each attempt.
const MAX_TEXT_BYTES: usize = 4 << 10;

/// An error code of this plugin.
///
/// 1 to 99 are defined by the CNI specification (SPEC.md, "Error", and the reference library's `pkg/types`); 100
/// and above by this plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Code {
    /// The configuration's `cniVersion` is not supported or does not have the command.
    IncompatibleVersion = 1,
    /// An environment variable is missing or malformed, or the command is unknown.
    Environment = 4,
    /// Reading or writing failed.
    Io = 5,
    /// A text is not JSON.
    Decode = 6,
    /// The configuration, an annotation or a reference is invalid; a retry does not help.
    InvalidConfig = 7,
    /// `CNI_NETNS` is not a network namespace, or is the plugin's own.
    InvalidNetns = 8,
    /// Temporarily unavailable: the API server, a lock, or a kubeconfig that is not written yet.
    TryAgain = 11,
    /// STATUS: an ADD would fail now.
    NotAvailable = 50,
    /// The cluster has no such pod, or another pod of the same name.
    PodUnknown = 100,
    /// The API server rejects the credentials (401) or denies access (403).
    Forbidden = 101,
    /// The kernel refused the rules, an address or a route.
    KernelRefused = 102,
    /// CHECK: the rules in the kernel differ from the desired state.
    Drift = 103,
    /// CHECK: there was no ADD of this attachment.
    NoAdd = 104,
    /// The saved state of an earlier ADD can't be read.
    State = 105,
    /// An executable of `chain` failed without an error code.
    Delegate = 106,
    /// Rules of another tool conflict, or the network namespace has more objects than this plugin reads.
    ForeignRules = 107,
    /// A bug in this plugin.
    Internal = 108,
}

impl Code {
    /// All codes with their names in logs and metrics, in the order of their numbers.
    pub const NAMES: [(Self, &'static str); 17] = [
        (Self::IncompatibleVersion, "incompatible-version"),
        (Self::Environment, "environment"),
        (Self::Io, "io"),
        (Self::Decode, "decode"),
        (Self::InvalidConfig, "invalid-config"),
        (Self::InvalidNetns, "invalid-netns"),
        (Self::TryAgain, "try-again"),
        (Self::NotAvailable, "not-available"),
        (Self::PodUnknown, "pod-unknown"),
        (Self::Forbidden, "forbidden"),
        (Self::KernelRefused, "kernel-refused"),
        (Self::Drift, "drift"),
        (Self::NoAdd, "no-add"),
        (Self::State, "state"),
        (Self::Delegate, "delegate"),
        (Self::ForeignRules, "foreign-rules"),
        (Self::Internal, "internal"),
    ];

    /// Returns the number in the error object.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Returns the code with this number; `None` if it is not one of this plugin.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        Self::NAMES.into_iter().map(|(code, _)| code).find(|code| code.number() == number)
    }

    /// Returns the name of the code in logs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.into_iter().find(|(code, _)| *code == self).map_or("", |(_, name)| name)
    }
}

/// The error of a failed call: a message for users and a code for programs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.line())]
pub struct Error {
    /// The kind of failure.
    pub code: Code,
    /// What failed, on what, and the next step.
    pub msg: String,
    /// Further details; may be empty.
    pub details: String,
    /// The error code of another plugin that failed, returned in place of `code`.
    pub answered: Option<u32>,
    /// Whether `msg` names the network of a primary plugin: the path of a configuration's block does.
    pub names_network: bool,
}

impl Error {
    /// Returns an error without details.
    pub fn new(code: Code, msg: impl Into<String>) -> Self {
        let (msg, details) = (msg.into(), String::new());
        Self { code, msg, details, answered: None, names_network: false }
    }

    /// Returns the error with these details.
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// Returns the error with another plugin's error code.
    #[must_use]
    pub const fn answered_with(mut self, code: u32) -> Self {
        self.answered = Some(code);
        self
    }

    /// Returns the error of a message that names the network of a primary plugin.
    #[must_use]
    pub fn naming_network(self) -> Self {
        Self { names_network: true, ..self }
    }

    /// Returns the error with a place before its message.
    #[must_use]
    pub fn at(self, place: impl Display) -> Self {
        Self { msg: format!("{place}: {}", self.msg), ..self }
    }

    /// Returns the error with the name of the pod in its message, once.
    #[must_use]
    pub fn of_pod(self, namespace: &str, name: &str) -> Self {
        let pod = format!("{namespace}/{name}");
        if self.msg.contains(&pod) {
            return self;
        }
        Self { msg: format!("pod {pod}: {}", self.msg), ..self }
    }

    /// Returns the error with the name of a primary plugin's network in its message, once.
    #[must_use]
    pub fn of_network(self, name: Option<&str>) -> Self {
        let Some(name) = name.filter(|_| !self.names_network) else { return self };
        Self { msg: format!("network {name}: {}", self.msg), ..self }.naming_network()
    }

    /// Returns the number in the error object.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.answered.unwrap_or(self.code.number())
    }

    /// Returns the first of several errors with the others in its details.
    ///
    /// # Errors
    /// One of the results is an error.
    pub fn all(results: impl IntoIterator<Item = Result<(), Self>>) -> Result<(), Self> {
        let mut errors = results.into_iter().filter_map(Result::err);
        let Some(mut first) = errors.next() else { return Ok(()) };
        for other in errors {
            let separator = if first.details.is_empty() { "" } else { "; " };
            first.details += &format!("{separator}{other}");
        }
        Err(first)
    }

    fn line(&self) -> String {
        let (msg, details) = (cut(&self.msg, MAX_TEXT_BYTES), cut(&self.details, MAX_TEXT_BYTES));
        if details.is_empty() { msg.into_owned() } else { format!("{msg}: {details}") }
    }

    /// Returns the error object for stdout (SPEC.md, "Error").
    ///
    /// Runtimes copy its texts into logs and Events, which are displayed in terminals. The texts contain names that
    /// authors of pods chose and messages of other plugins, so they are escaped as by [`line()`] and limited in
    /// length.
    #[must_use]
    pub fn to_json(&self, cni_version: &str) -> serde_json::Value {
        let [msg, details] = [&self.msg, &self.details].map(|text| line(text));
        let (msg, details) = (cut(&msg, MAX_TEXT_BYTES), cut(&details, MAX_TEXT_BYTES));
        let mut object = json!({"cniVersion": cni_version, "code": self.number(), "msg": msg});
        if !details.is_empty() {
            object["details"] = details.into();
        }
        object
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_never_999() {
        let numbers: Vec<u32> = Code::NAMES.iter().map(|(c, _)| c.number()).collect();
        assert!(numbers.windows(2).all(|w| w[0] < w[1]), "{numbers:?}");
        assert!(!numbers.contains(&999));
        let names: std::collections::BTreeSet<_> = Code::NAMES.iter().map(|(_, name)| *name).collect();
        assert_eq!(names.len(), numbers.len(), "{names:?}");
    }

    #[test]
    fn json_omits_empty_details() {
        let e = Error::new(Code::Decode, "no");
        assert_eq!(e.to_json("1.0.0").to_string(), r#"{"cniVersion":"1.0.0","code":6,"msg":"no"}"#);
        let e = e.with_details("why");
        assert_eq!(e.to_json("1.0.0")["details"], "why");
    }

    #[test]
    fn texts_are_escaped_and_limited_in_length() {
        let long = Error::new(Code::Delegate, "x".repeat(1 << 20)).to_json("1.0.0");
        assert!(long["msg"].as_str().is_some_and(|msg| msg.len() <= MAX_TEXT_BYTES && msg.ends_with('…')));
        let error = Error::new(Code::Delegate, "a\u{1b}[2J\nb").with_details("\u{202e}\u{9b}").to_json("1.0.0");
        assert_eq!((&error["msg"], &error["details"]), (&"a\\u{1b}[2J\\nb".into(), &"\\u{202e}\\u{9b}".into()));
    }

    #[test]
    fn the_error_object_is_limited_in_length() {
        let e = Error::new(Code::InvalidConfig, "a".repeat(200_000)).with_details("b".repeat(200_000));
        assert!(e.to_json("1.0.0").to_string().len() < 10_000 && e.to_string().len() < 10_000);
    }

    #[test]
    fn the_code_of_another_plugin_replaces_that_of_this_plugin() {
        let e = Error::new(Code::Delegate, "no").answered_with(11);
        assert_eq!((e.code, e.number()), (Code::Delegate, 11));
        assert_eq!(e.to_json("1.0.0")["code"], 11);
    }
}
