//! What a plugin answers when it fails, and the one table of codes.

use crate::printable::{cut, line};
use serde::Serialize;

/// How long each text of an error object may be, in bytes: runtimes repeat it for each try.
const TEXT_LIMIT: usize = 4 << 10;

/// Every code this plugin can answer with.
///
/// 1 to 99 belong to the CNI specification (SPEC.md, "Error", and the reference library's
/// `pkg/types`); 100 and above are this plugin's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Code {
    /// The configuration's `cniVersion` is not one that is spoken here, or does not allow the command.
    IncompatibleVersion = 1,
    /// An environment variable is missing or malformed, or the command is unknown.
    Environment = 4,
    /// Reading or writing failed.
    Io = 5,
    /// Text that should be JSON is not.
    Decode = 6,
    /// The configuration, an annotation or a reference is wrong. Trying again won't help.
    InvalidConfig = 7,
    /// `CNI_NETNS` is not a network namespace, or is the plugin's own.
    InvalidNetns = 8,
    /// What may come yet: an API that does not answer, a lock, a kubeconfig not written so far.
    TryAgain = 11,
    /// STATUS: an ADD can't be served now.
    NotAvailable = 50,
    /// The pod is not known to the cluster, or the one that is known is another one of that name.
    PodUnknown = 100,
    /// The credentials are refused (401) or lack a right (403).
    Forbidden = 101,
    /// The kernel refused the rules, an address or a route.
    KernelRefused = 102,
    /// CHECK: what is in the kernel is not what the attachments ask for.
    Drift = 103,
    /// CHECK: there was no ADD of this attachment.
    NoAdd = 104,
    /// What was kept of an earlier ADD can't be read.
    State = 105,
    /// An executable in the chain failed without a code of its own.
    Delegate = 106,
    /// Rules of another tool stand in the way, or the network namespace holds more than is read.
    ForeignRules = 107,
    /// A fault of this plugin's own.
    Internal = 108,
}

impl Code {
    /// All codes, in the order of their numbers.
    pub const ALL: [Self; 17] = [
        Self::IncompatibleVersion,
        Self::Environment,
        Self::Io,
        Self::Decode,
        Self::InvalidConfig,
        Self::InvalidNetns,
        Self::TryAgain,
        Self::NotAvailable,
        Self::PodUnknown,
        Self::Forbidden,
        Self::KernelRefused,
        Self::Drift,
        Self::NoAdd,
        Self::State,
        Self::Delegate,
        Self::ForeignRules,
        Self::Internal,
    ];

    /// The number that goes on the wire.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The code of that number, where it is one of ours.
    #[must_use]
    pub fn numbered(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.number() == number)
    }

    /// One word for programs that count.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::IncompatibleVersion => "incompatible-version",
            Self::Environment => "environment",
            Self::Io => "io",
            Self::Decode => "decode",
            Self::InvalidConfig => "invalid-config",
            Self::InvalidNetns => "invalid-netns",
            Self::TryAgain => "try-again",
            Self::NotAvailable => "not-available",
            Self::PodUnknown => "pod-unknown",
            Self::Forbidden => "forbidden",
            Self::KernelRefused => "kernel-refused",
            Self::Drift => "drift",
            Self::NoAdd => "no-add",
            Self::State => "state",
            Self::Delegate => "delegate",
            Self::ForeignRules => "foreign-rules",
            Self::Internal => "internal",
        }
    }
}

/// A failed command: one line for people, a code for programs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.line())]
pub struct Error {
    /// Which kind of failure.
    pub code: Code,
    /// What failed, on what, and the next step.
    pub msg: String,
    /// More, where there is more.
    pub details: String,
    /// The code of another plugin whose failure this is: it is answered in place of `code`'s own.
    pub answered: Option<u32>,
}

impl Error {
    /// An error without details.
    pub fn new(code: Code, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new(), answered: None }
    }

    /// The same error with details.
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// The same error, answered with another plugin's code.
    #[must_use]
    pub const fn answered_with(mut self, code: u32) -> Self {
        self.answered = Some(code);
        self
    }

    /// The number that goes on the wire.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.answered.unwrap_or(self.code.number())
    }

    /// The first failure of things that were all tried, the others in its details.
    ///
    /// # Errors
    /// One of them failed.
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
        let (msg, details) = (cut(&self.msg, TEXT_LIMIT), cut(&self.details, TEXT_LIMIT));
        if details.is_empty() { msg.into_owned() } else { format!("{msg}: {details}") }
    }

    /// The JSON object that goes to stdout (SPEC.md, "Error").
    ///
    /// Runtimes copy its texts into logs and Events, and so to terminals. The texts hold names that a pod's
    /// author chose, and those of other plugins, so they are written as [`line`] writes them, and cut where
    /// they are too long.
    #[must_use]
    pub fn to_json(&self, cni_version: &str) -> serde_json::Value {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Wire<'a> {
            cni_version: &'a str,
            code: u32,
            msg: &'a str,
            #[serde(skip_serializing_if = "str::is_empty")]
            details: &'a str,
        }
        let [msg, details] = [&self.msg, &self.details].map(|text| line(text));
        let (msg, details) = (&*cut(&msg, TEXT_LIMIT), &*cut(&details, TEXT_LIMIT));
        let wire = Wire { cni_version, code: self.number(), msg, details };
        serde_json::to_value(wire).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_never_999() {
        let numbers: Vec<u32> = Code::ALL.iter().map(|c| c.number()).collect();
        assert!(numbers.windows(2).all(|w| w[0] < w[1]), "{numbers:?}");
        assert!(!numbers.contains(&999));
        let names: std::collections::BTreeSet<_> = Code::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), numbers.len(), "{names:?}");
    }

    #[test]
    fn json_leaves_out_empty_details() {
        let e = Error::new(Code::Decode, "no");
        assert_eq!(e.to_json("1.0.0").to_string(), r#"{"cniVersion":"1.0.0","code":6,"msg":"no"}"#);
        let e = e.with_details("why");
        assert_eq!(e.to_json("1.0.0")["details"], "why");
    }

    #[test]
    fn texts_are_bounded_and_hold_no_character_that_acts() {
        let long = Error::new(Code::Delegate, "x".repeat(1 << 20)).to_json("1.0.0");
        assert!(long["msg"].as_str().is_some_and(|msg| msg.len() <= TEXT_LIMIT && msg.ends_with('…')));
        let error = Error::new(Code::Delegate, "a\u{1b}[2J\nb").with_details("\u{202e}\u{9b}").to_json("1.0.0");
        assert_eq!((&error["msg"], &error["details"]), (&"a\\u{1b}[2J\\nb".into(), &"\\u{202e}\\u{9b}".into()));
    }

    #[test]
    fn what_leaves_is_bounded_whatever_was_quoted() {
        let e = Error::new(Code::InvalidConfig, "a".repeat(200_000)).with_details("b".repeat(200_000));
        assert!(e.to_json("1.0.0").to_string().len() < 10_000 && e.to_string().len() < 10_000);
    }

    #[test]
    fn another_plugins_code_is_answered_in_place_of_ours() {
        let e = Error::new(Code::Delegate, "no").answered_with(11);
        assert_eq!((e.code, e.number()), (Code::Delegate, 11));
        assert_eq!(e.to_json("1.0.0")["code"], 11);
    }
}
