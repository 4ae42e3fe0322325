//! Why a request failed, and the next step for TLS errors about certificates. `kube` hides the type of rustls' errors, so
//! they are recognized by their text, that of rustls 0.23.

use crate::cni::Error;
use crate::printable::without_tokens;
use hyper::http::response::Parts;
use kube::core::Status;
use std::fmt;
use std::time::Duration;

/// Why a request failed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The status of the API server's answer; 0 without one.
    pub(crate) status: u16,
    /// Whether the answer, or an event of a watch, exceeds its limit.
    pub(crate) is_too_large: bool,
    /// The cause in one line.
    pub(crate) cause: String,
    /// The answer's `Retry-After`.
    pub(super) retry_after: Option<Duration>,
    /// The object that does not exist, if the answer names it.
    pub(super) missing: Option<String>,
}

impl Failure {
    /// Returns a failure without an answer.
    pub(crate) fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), ..Self::default() }
    }

    /// Returns the failure of a request for an object that does not exist, or only an earlier one of the same name.
    pub(super) fn not_found(cause: String) -> Self {
        Self { status: 404, ..Self::new(cause) }
    }

    /// Returns the failure of a request whose answer is not what was requested.
    pub(super) fn unexpected(why: impl fmt::Display) -> Self {
        let why = without_tokens(&why.to_string()).into_owned();
        Self { status: 200, ..Self::new(format!("200, but the body is not the expected object: {why}")) }
    }

    /// Returns the failure of an answer that is larger than `limit`.
    pub(super) fn too_large(part: &str, limit: usize) -> Self {
        Self { is_too_large: true, ..Self::new(format!("expected {part} of at most {limit} bytes, got more")) }
    }

    /// Returns the failure that a `Status` reports.
    pub(crate) fn of_status(status: u16, message: &str) -> Self {
        let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
        let line: String = without_tokens(&line).chars().take(MAX_CHARS).collect();
        let cause = if line.is_empty() { status.to_string() } else { format!("{status}, {line}") };
        Self { status, ..Self::new(cause) }
    }

    /// Returns the failure of an answer that is not a success.
    pub(super) fn of_answer(head: &Parts, body: &[u8]) -> Self {
        let status: Status = serde_json::from_slice(body).unwrap_or_default();
        let text = String::from_utf8_lossy(if status.message.is_empty() { body } else { status.message.as_bytes() });
        let retry_after = head.headers.get("retry-after").and_then(|value| value.to_str().ok());
        Self {
            retry_after: retry_after.and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs),
            missing: status.details.filter(|_| status.reason == "NotFound").map(|details| details.name),
            ..Self::of_status(head.status.as_u16(), &text)
        }
    }

    /// Returns whether the API server may answer the same request differently later.
    pub(super) fn is_transient(&self) -> bool {
        match self.status {
            0 => !self.is_too_large && tls_step(&self.cause).is_none(),
            status => matches!(status, 200..=299 | 408 | 429 | 500..),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cause)
    }
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        Self::new(causes(&error))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(error.to_string())
    }
}

/// The maximum length of a server's text in an error.
const MAX_CHARS: usize = 300;

/// Returns the sources of an error in one line, each text once; kube's own text adds nothing to them.
fn causes(error: &kube::Error) -> String {
    let sources = std::iter::successors(std::error::Error::source(error), |error| error.source());
    let line = sources.map(ToString::to_string).fold(String::new(), |line, text| match line.contains(&text) {
        _ if line.is_empty() => text,
        true => line,
        false => format!("{line}: {text}"),
    });
    let line = if line.is_empty() { error.to_string() } else { line };
    without_tokens(&line).into_owned()
}

/// What rustls' reasons for rejecting the server's certificate contain, in small letters and without spaces, with the next
/// step for each.
const SERVER_STEPS: [(&str, &str); 6] = [
    ("causedasendentity", "the server presents a CA certificate; issue a serving certificate (CA:FALSE) for it"),
    ("unknownissuer", "not signed by certificate-authority(-data); copy the cluster's current CA there"),
    ("badsignature", "not signed by certificate-authority(-data); copy the cluster's current CA there"),
    ("expired", "the server's certificate has expired; renew it, or correct this node's clock"),
    ("notvalidyet", "the server's certificate is not valid yet; correct this node's clock"),
    ("notvalidforname", "the server's certificate is for other names; set server or tls-server-name to one of them"),
];

/// Parts of the names of alerts about a client's certificate (RFC 8446, section 6).
const CLIENT_ALERTS: [&str; 3] = ["Certificate", "UnknownCA", "AccessDenied"];

/// The alerts of a server, and the text of rustls, if client and server have no parameter in common.
const NOTHING_IN_COMMON: [&str; 4] =
    ["alert: HandshakeFailure", "alert: ProtocolVersion", "alert: InsufficientSecurity", "peer is incompatible: "];

/// Returns the next step for a TLS error; `None` if a retry may help.
pub(super) fn tls_step(cause: &str) -> Option<&'static str> {
    if let Some((_, reason)) = cause.split_once("invalid peer certificate: ") {
        let reason = reason.replace(' ', "").to_lowercase();
        let known = SERVER_STEPS.iter().find(|(text, _)| reason.contains(text));
        let other = "the server's certificate can't be verified; issue one that its clients can verify: with RSA of at \
                     least 2048 bits, ECDSA P-256 or P-384, or Ed25519";
        return Some(known.map_or(other, |(_, step)| step));
    }
    if NOTHING_IN_COMMON.iter().any(|text| cause.contains(text)) {
        return Some(
            "the server offers no TLS parameters that this client supports; enable one of each on the server: TLS 1.3 or \
             1.2; X25519, P-256 or P-384; AES-GCM or ChaCha20-Poly1305 with ECDHE; a certificate with RSA of at least \
             2048 bits, ECDSA P-256 or P-384, or Ed25519",
        );
    }
    let (_, alert) = cause.split_once("received fatal alert: ")?;
    CLIENT_ALERTS.iter().any(|part| alert.contains(part)).then_some(
        "the server requires a client certificate that it accepts; renew client-certificate(-data) in the kubeconfig",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::UnixTime;
    use rustls::{AlertDescription, CertificateError, Error, OtherError};
    use std::sync::Arc;
    use std::time::Duration;

    fn step(error: &Error) -> Option<&'static str> {
        tls_step(&format!("client error (Connect): {error}"))
    }

    #[test]
    fn each_certificate_error_of_rustls_has_its_next_step() {
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let name = "localhost".try_into().expect("a name");
        let ca = OtherError(Arc::new(std::io::Error::other("CaUsedAsEndEntity")));
        let rows = [
            (CertificateError::UnknownIssuer, "not signed by"),
            (CertificateError::BadSignature, "not signed by"),
            (CertificateError::Expired, "has expired"),
            (CertificateError::ExpiredContext { time: at(2), not_after: at(1) }, "has expired"),
            (CertificateError::NotValidYet, "not valid yet"),
            (CertificateError::NotValidYetContext { time: at(1), not_before: at(2) }, "not valid yet"),
            (CertificateError::NotValidForName, "tls-server-name"),
            (CertificateError::NotValidForNameContext { expected: name, presented: vec![] }, "tls-server-name"),
            (CertificateError::Other(ca), "CA:FALSE"),
            (CertificateError::BadEncoding, "clients can verify"),
        ];
        for (reason, expected) in rows {
            let found = step(&Error::InvalidCertificate(reason.clone())).unwrap_or_default();
            assert!(found.contains(expected), "{reason:?}: {found}");
        }
    }

    #[test]
    fn a_server_without_common_parameters_has_a_next_step() {
        for error in [
            Error::AlertReceived(AlertDescription::HandshakeFailure),
            Error::AlertReceived(AlertDescription::ProtocolVersion),
            Error::PeerIncompatible(rustls::PeerIncompatible::NoKxGroupsInCommon),
        ] {
            assert!(step(&error).is_some_and(|step| step.contains("P-256 or P-384")), "{error}");
        }
    }

    #[test]
    fn only_alerts_that_a_retry_can_not_change_have_a_next_step() {
        let step = |alert| step(&Error::AlertReceived(alert));
        assert!(step(AlertDescription::CertificateRequired).is_some());
        assert!(step(AlertDescription::UnknownCA).is_some());
        assert_eq!(step(AlertDescription::InternalError), None);
        assert_eq!(tls_step("connection refused"), None);
    }
}
