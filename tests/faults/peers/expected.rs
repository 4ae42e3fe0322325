//! What a call must answer while a peer fails.

use crate::call::{Answer, Ended};
use crate::table::{is_answer, is_complete};
use std::time::Duration;

/// The bearer token of all requests; it must not appear in any output.
pub(super) const TOKEN: &str = "s3cr3t-t0ken-0f-this-n0de";
/// The timeout of a call, if the fault needs no longer one.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How much longer than its timeout a call may take. The sample must not depend on the speed of the machine.
fn slack() -> Duration {
    Duration::from_secs(if is_complete() { 2 } else { 30 })
}

#[derive(Debug, Clone)]
pub(super) struct Expected {
    /// The code; `None` for success.
    code: Option<u64>,
    /// What the error, or else the log, must contain.
    parts: Vec<String>,
    /// The timeout that limits the call.
    pub(super) within: Duration,
    /// Whether the error names the pod.
    names_pod: bool,
}

/// A call that fails with this code and a text that contains these parts.
pub(super) fn fails(code: u64, parts: &[&str]) -> Expected {
    Expected { code: Some(code), ..works().with(parts) }
}

/// A call that succeeds.
pub(super) fn works() -> Expected {
    Expected { code: None, parts: Vec::new(), within: TIMEOUT, names_pod: true }
}

impl Expected {
    pub(super) fn with(mut self, parts: &[&str]) -> Self {
        self.parts.extend(parts.iter().map(ToString::to_string));
        self
    }

    /// Adds what an error must contain.
    pub(super) fn with_if_it_fails(self, parts: &[&str]) -> Self {
        if self.code.is_some() { self.with(parts) } else { self }
    }

    pub(super) fn within(self, seconds: u64) -> Self {
        Self { within: Duration::from_secs(seconds), ..self }
    }

    /// The error of an executable names the executable.
    pub(super) fn without_pod(self) -> Self {
        Self { names_pod: false, ..self }
    }

    pub(super) fn is_success(&self) -> bool {
        self.code.is_none()
    }

    pub(super) fn check(&self, ended: &Ended) -> Result<(), String> {
        let Ended { answer, stderr, took } = ended;
        let (code, text) = match answer {
            Answer::Done => (None, stderr),
            Answer::Refused(code, text) => (Some(*code), text),
            _ => return is_answer(ended),
        };
        if code != self.code {
            return Err(format!("expected code {:?}", self.code));
        }
        let pod = (code.is_some() && self.names_pod).then_some("pod shop/web-0");
        if let Some(part) = self.parts.iter().map(String::as_str).chain(pod).find(|part| !text.contains(part)) {
            return Err(format!("the text does not contain {part:?}"));
        }
        if text.contains(TOKEN) || stderr.contains(TOKEN) {
            return Err("the token is in the output".to_owned());
        }
        let longest = self.within + slack();
        if *took > longest { Err(format!("expected at most {longest:?}, took {took:?}")) } else { Ok(()) }
    }
}
