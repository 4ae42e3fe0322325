//! Next steps for TLS errors about certificates. `kube` hides the type of rustls' errors, so they are recognized by
//! their text, that of rustls 0.23.

/// What precedes the reason why this client rejects the server's certificate.
const SERVER_CERTIFICATE: &str = "invalid peer certificate: ";
/// What precedes the alert with which the server rejects this client.
const ALERT: &str = "received fatal alert: ";

/// Texts of rustls' reasons for rejecting the server's certificate, with the next step for each.
const SERVER_STEPS: [(&[&str], &str); 6] = [
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

/// Returns the next step for a TLS error; `None` if `cause` is not about a certificate.
pub(super) fn next_step(cause: &str) -> Option<&'static str> {
    if let Some((_, reason)) = cause.split_once(SERVER_CERTIFICATE) {
        let known = SERVER_STEPS.iter().find(|(texts, _)| texts.iter().any(|text| reason.contains(text)));
        let other = "the server's certificate can't be verified; issue one that its clients can verify";
        return Some(known.map_or(other, |(_, step)| step));
    }
    let (_, alert) = cause.split_once(ALERT)?;
    CLIENT_ALERTS.contains(&alert).then_some(
        "the server requires a client certificate that it accepts; renew client-certificate(-data) in the kubeconfig",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::{AlertDescription, CertificateError, Error, OtherError, pki_types::UnixTime};
    use std::sync::Arc;
    use std::time::Duration;

    fn step(error: &Error) -> Option<&'static str> {
        next_step(&format!("client error (Connect): {error}"))
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
    fn only_alerts_about_certificates_have_a_next_step() {
        let step = |alert| step(&Error::AlertReceived(alert));
        assert!(step(AlertDescription::CertificateRequired).is_some());
        assert!(step(AlertDescription::UnknownCA).is_some());
        assert_eq!(step(AlertDescription::InternalError), None);
        assert_eq!(next_step("connection refused"), None);
    }
}
