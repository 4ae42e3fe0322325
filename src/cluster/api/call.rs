//! One request to one API server: its attempts, and the errors that responses and failures become, with next steps for
//! TLS errors about certificates. `kube` hides the type of rustls' errors, so they are recognized by their text, that of
//! rustls 0.23.

use super::request::ApiRequest;
use super::retry::{AttemptError, Deadline, RetriesExhausted, retry};
use super::session::Session;
use crate::cluster::response_limit::TooLarge;
use crate::cni::{Code, Error};
use crate::printable::without_tokens;
use hyper::Response;
use kube::client::Body;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// A request to an API server. `Display` gives the object, the request line and the kubeconfig.
#[derive(Clone, Copy)]
pub(super) struct ApiCall<'a> {
    /// The request.
    pub(super) request: &'a ApiRequest,
    /// The session that sends it.
    pub(super) session: &'a Session,
    /// The kubeconfig, or the directory of a service account.
    pub(super) kubeconfig: &'a Path,
    /// Whether transient errors are retried.
    pub(super) retries: bool,
}

impl ApiCall<'_> {
    /// Runs `attempt` until it succeeds, fails permanently, or the deadline has passed.
    ///
    /// # Errors
    /// The error for the last attempt's failure.
    pub(super) async fn run<T>(
        &self,
        deadline: Deadline,
        attempt: impl AsyncFn() -> Result<T, AttemptError>,
    ) -> Result<T, Error> {
        self.retry(deadline, attempt).await.map_err(|exhausted| self.exhausted(exhausted))
    }

    /// Like [`Self::run`], with the last attempt's failure as it is.
    pub(super) async fn retry<T>(
        &self,
        deadline: Deadline,
        attempt: impl AsyncFn() -> Result<T, AttemptError>,
    ) -> Result<T, RetriesExhausted> {
        retry(deadline, &self.session.address, attempt).await
    }

    /// Sends the request once, with `timeout`, and parses the response.
    ///
    /// # Errors
    /// There is no response, or it is not a success.
    pub(super) async fn get_once<T: DeserializeOwned>(&self, timeout: Duration) -> Result<T, Error> {
        let once = Self { retries: false, ..*self };
        let attempt = async || match once.get().await {
            Err(AttemptError::NotFound(cause)) => Err(once.gone(&cause)),
            other => other,
        };
        once.run(Deadline::after(timeout), attempt).await
    }

    /// Sends the request for a page of a list once, with `timeout`. Returns `None` if the page exceeds the limit of a
    /// response and `can_shrink`.
    ///
    /// # Errors
    /// As [`Self::get_once`].
    pub(super) async fn get_page(&self, timeout: Duration, can_shrink: bool) -> Result<Option<Value>, Error> {
        let once = Self { retries: false, ..*self };
        let attempt = async || match once.exchange().await {
            Err(error) if can_shrink && TooLarge::find_in(&error).is_some() => Ok(None),
            Err(error) => Err(once.no_response(&error)),
            Ok(response) => match once.successful(response) {
                Ok(body) => once.parsed(&body).map(Some),
                Err(AttemptError::NotFound(cause)) => Err(once.gone(&cause)),
                Err(error) => Err(error),
            },
        };
        once.run(Deadline::after(timeout), attempt).await
    }

    /// Sends the request and parses the response: one attempt.
    pub(super) async fn get<T: DeserializeOwned>(&self) -> Result<T, AttemptError> {
        self.parsed(&self.send().await?)
    }

    fn parsed<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, AttemptError> {
        serde_json::from_slice(body).map_err(|error| self.unexpected(&error.to_string()))
    }

    /// The error for a successful response whose body is not the requested object.
    pub(super) fn unexpected(&self, why: &str) -> AttemptError {
        let why = without_tokens(why);
        self.transient(format!("200, but the body is not the expected object: {why}"), None)
    }

    /// Sends the request and returns the body of a successful response: one attempt.
    pub(super) async fn send(&self) -> Result<Vec<u8>, AttemptError> {
        let response = self.exchange().await.map_err(|error| self.no_response(&error))?;
        self.successful(response)
    }

    async fn exchange(&self) -> Result<Response<Vec<u8>>, kube::Error> {
        let request = self.request.http.clone().map(Body::from);
        let (head, body) = self.session.client().send(request).await?.into_parts();
        Ok(Response::from_parts(head, body.collect_bytes().await?.into()))
    }

    /// Returns the body of a successful response.
    fn successful(&self, response: Response<Vec<u8>>) -> Result<Vec<u8>, AttemptError> {
        let status = response.status();
        let retry_after = response.headers().get("retry-after").and_then(|value| value.to_str().ok());
        let retry_after = retry_after.and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs);
        let body = response.into_body();
        if status.is_success() { Ok(body) } else { Err(self.rejected(status.as_u16(), retry_after, &body)) }
    }

    /// The error for a response that is not a success.
    pub(super) fn rejected(&self, status: u16, retry_after: Option<Duration>, body: &[u8]) -> AttemptError {
        let message = status_message(body);
        let kubeconfig = self.kubeconfig.display();
        let response = if message.is_empty() { status.to_string() } else { format!("{status}, {message}") };
        let (code, msg) = match status {
            404 if self.request.confirmed_by.as_ref().is_some_and(|name| !is_not_found(name, body)) => {
                return self.transient(response, None);
            }
            404 => return AttemptError::NotFound(response),
            408 | 429 | 500.. => return self.transient(response, retry_after),
            401 => (
                Code::Forbidden,
                format!(
                    "401, the credentials in {kubeconfig} are not accepted; check the process that renews this file"
                ),
            ),
            403 if message.contains("ValidatingAdmissionPolicy") => {
                (Code::Forbidden, format!("403, an admission policy denies to {}", self.request.permission))
            }
            403 => (
                Code::Forbidden,
                format!(
                    "403, the credentials in {kubeconfig} lack the permission to {}; grant it in a ClusterRole",
                    self.request.permission
                ),
            ),
            409 | 422 => (Code::PodUnknown, format!("{status}, the object was changed or replaced in the meantime")),
            _ => (
                Code::InvalidConfig,
                format!("{status}, not the response of a Kubernetes API; correct server in {kubeconfig}"),
            ),
        };
        AttemptError::Permanent(self.error(code, msg).with_details(message))
    }

    /// The error for a request without a response.
    pub(super) fn no_response(&self, error: &kube::Error) -> AttemptError {
        if let Some(too_large) = TooLarge::find_in(error) {
            let kubeconfig = self.kubeconfig.display();
            let msg = format!("{too_large}; not the response of a Kubernetes API; correct server in {kubeconfig}");
            return AttemptError::Permanent(self.error(Code::InvalidConfig, msg));
        }
        let cause = causes(error);
        match tls_step(&cause) {
            Some(step) => AttemptError::Permanent(self.error(Code::InvalidConfig, step).with_details(cause)),
            None => self.transient(cause, None),
        }
    }

    fn transient(&self, cause: String, retry_after: Option<Duration>) -> AttemptError {
        if self.retries { AttemptError::Transient { cause, retry_after } } else { self.not_retried(&cause) }
    }

    /// The error for a transient failure that is not retried here.
    pub(super) fn not_retried(&self, cause: &str) -> AttemptError {
        AttemptError::Permanent(self.request_failed(cause))
    }

    fn request_failed(&self, cause: &str) -> Error {
        self.error(Code::TryAgain, "request failed").with_details(cause)
    }

    /// The error for an object that existed before and can't appear again.
    pub(super) fn gone(&self, cause: &str) -> AttemptError {
        AttemptError::Permanent(self.error(Code::PodUnknown, "the object no longer exists").with_details(cause))
    }

    /// Describes an object that was not found: the request and its attempts.
    pub(super) fn not_found(&self, exhausted: RetriesExhausted) -> String {
        let effort = effort(&exhausted);
        let cause = match exhausted.last {
            AttemptError::NotFound(cause) | AttemptError::Transient { cause, .. } => cause,
            AttemptError::Permanent(error) => error.to_string(),
        };
        format!("{self}: not found in {effort}: {cause}")
    }

    /// The error for the last attempt's failure.
    pub(super) fn exhausted(&self, exhausted: RetriesExhausted) -> Error {
        let effort = effort(&exhausted);
        match exhausted.last {
            AttemptError::Permanent(error) => error,
            AttemptError::NotFound(cause) => {
                let msg = format!(
                    "not found in {effort}: it was deleted, or the kubeconfig is for another cluster; see {}",
                    self.request.kubectl
                );
                self.error(Code::PodUnknown, msg).with_details(cause)
            }
            AttemptError::Transient { cause, .. } if !self.retries => self.request_failed(&cause),
            AttemptError::Transient { cause, .. } => {
                let msg = format!("no usable answer in {effort}; check that this node can reach the API server");
                self.error(Code::TryAgain, msg).with_details(cause)
            }
        }
    }

    fn error(&self, code: Code, what: impl fmt::Display) -> Error {
        Error::new(code, format!("{self}: {what}"))
    }
}

impl fmt::Display for ApiCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ApiRequest { http, subject, .. } = self.request;
        let (server, kubeconfig) = (&self.session.server, self.kubeconfig.display());
        write!(f, "{subject}: {} {server}{} (kubeconfig {kubeconfig})", http.method(), http.uri().path())
    }
}

fn effort(RetriesExhausted { attempts, elapsed, .. }: &RetriesExhausted) -> String {
    let plural = if *attempts == 1 { "" } else { "s" };
    format!("{attempts} attempt{plural} within {:.1} s", elapsed.as_secs_f32())
}

/// Returns the message of a `Status`, or the start of any other body, in one line.
pub(super) fn status_message(body: &[u8]) -> String {
    const MAX_CHARS: usize = 300;
    #[derive(Deserialize)]
    struct ApiStatus {
        message: String,
    }
    let text = match serde_json::from_slice::<ApiStatus>(body) {
        Ok(status) => status.message,
        Err(_) => String::from_utf8_lossy(body).into_owned(),
    };
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    without_tokens(&line).chars().take(MAX_CHARS).collect()
}

/// Whether the body is a `Status` about the object `name` (apimachinery, `errors.NewNotFound`).
fn is_not_found(name: &str, body: &[u8]) -> bool {
    let status: Value = serde_json::from_slice(body).unwrap_or_default();
    status["reason"] == "NotFound" && status["details"]["name"] == name
}

/// Returns the sources of an error in one line, each text once; kube's own text adds nothing to them.
pub(crate) fn causes(error: &kube::Error) -> String {
    let mut line = String::new();
    let mut next = std::error::Error::source(error);
    while let Some(source) = next {
        let text = source.to_string();
        if !line.contains(&text) {
            line = if line.is_empty() { text } else { format!("{line}: {text}") };
        }
        next = source.source();
    }
    if line.is_empty() {
        line = error.to_string();
    }
    without_tokens(&line).into_owned()
}

/// What precedes the reason why this client rejects the server's certificate.
const SERVER_CERTIFICATE: &str = "invalid peer certificate: ";
/// What precedes the alert with which the server rejects this client.
const ALERT: &str = "received fatal alert: ";

/// Texts of rustls' reasons for rejecting the server's certificate, with the next step for each.
const SERVER_STEPS: [(&[&str], &str); 7] = [
    (
        &["CaUsedAsEndEntity"],
        "the server presents a CA certificate as its own; issue a serving certificate (CA:FALSE) for it",
    ),
    (
        &["UnknownIssuer"],
        "the kubeconfig's certificate-authority(-data) did not sign the server's certificate; copy the cluster's \
         current CA there",
    ),
    (
        &["BadSignature"],
        "the kubeconfig's certificate-authority(-data) is another CA of the same name; copy the cluster's current CA \
         there",
    ),
    (
        &["certificate expired", "Expired"],
        "the server's certificate has expired; renew it, or correct this node's clock",
    ),
    (
        &["certificate not valid yet", "NotValidYet"],
        "the server's certificate is not valid yet; correct this node's clock",
    ),
    (
        &["certificate not valid for name", "NotValidForName"],
        "the server's certificate is for other names; set server or tls-server-name to one of them",
    ),
    (
        &["UnsupportedSignatureAlgorithm", "UnsupportedCertificateSignature"],
        "the server's certificate has a signature that this client does not support; issue one with RSA of at least \
         2048 bits, ECDSA P-256 or P-384, or Ed25519",
    ),
];

/// The alerts about a client's certificate (RFC 8446, section 6).
const CLIENT_ALERTS: [&str; 9] = [
    "BadCertificate",
    "UnsupportedCertificate",
    "CertificateRevoked",
    "CertificateExpired",
    "CertificateUnknown",
    "UnknownCA",
    "AccessDenied",
    "CertificateRequired",
    "NoCertificate",
];

/// The alerts of a server, and the text of rustls, if client and server have no parameter in common.
const NOTHING_IN_COMMON: [&str; 4] = [
    "received fatal alert: HandshakeFailure",
    "received fatal alert: ProtocolVersion",
    "received fatal alert: InsufficientSecurity",
    "peer is incompatible: ",
];

/// Returns the next step for a TLS error; `None` if a retry may help.
pub(super) fn tls_step(cause: &str) -> Option<&'static str> {
    if let Some((_, reason)) = cause.split_once(SERVER_CERTIFICATE) {
        let known = SERVER_STEPS.iter().find(|(texts, _)| texts.iter().any(|text| reason.contains(text)));
        let other = "the server's certificate can't be verified; issue one that its clients can verify";
        return Some(known.map_or(other, |(_, step)| step));
    }
    if NOTHING_IN_COMMON.iter().any(|text| cause.contains(text)) {
        return Some(
            "the server offers no TLS parameters that this client supports; enable one of each on the server: TLS 1.3 or \
             1.2; X25519, P-256 or P-384; AES-GCM or ChaCha20-Poly1305 with ECDHE; a certificate with RSA of at least \
             2048 bits, ECDSA P-256 or P-384, or Ed25519",
        );
    }
    let (_, alert) = cause.split_once(ALERT)?;
    CLIENT_ALERTS.contains(&alert).then_some(
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
            (CertificateError::UnknownIssuer, "did not sign"),
            (CertificateError::BadSignature, "another CA of the same name"),
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
