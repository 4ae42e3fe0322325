//! What a TLS peer's complaint about a certificate means and what to do about it. rustls' own
//! errors arrive as text, since `kube` hides the type; the texts are those of rustls 0.23.

/// A certificate of the server is refused here.
const OURS: &str = "invalid peer certificate: ";
/// A certificate of ours is refused by the server.
const THEIRS: &str = "received fatal alert: ";

/// What each complaint contains, and what to do about it.
const SERVER: [(&[&str], &str); 6] = [
    (
        &["CaUsedAsEndEntity"],
        "the server presents a CA certificate as its own: issue it a serving certificate (CA:FALSE)",
    ),
    (
        &["UnknownIssuer"],
        "the kubeconfig's certificate-authority(-data) did not sign it: copy the cluster's current CA there",
    ),
    (
        &["BadSignature"],
        "the kubeconfig's certificate-authority(-data) is another CA of the same name: copy the current one there",
    ),
    (
        &["certificate expired", "Expired"],
        "the server's certificate has expired: renew it, or correct this node's clock",
    ),
    (
        &["certificate not valid yet", "NotValidYet"],
        "the server's certificate is not valid yet: correct this node's clock",
    ),
    (
        &["certificate not valid for name", "NotValidForName"],
        "the certificate is for other names: put one of them into server or tls-server-name",
    ),
];

/// The alerts that speak of a client's certificate (RFC 8446, section 6).
const CLIENT: [&str; 9] = [
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

/// The next step after a failure with this text; `None` where no certificate is at fault.
pub(super) fn next_step(cause: &str) -> Option<&'static str> {
    if let Some((_, complaint)) = cause.split_once(OURS) {
        let known = SERVER.iter().find(|(texts, _)| texts.iter().any(|text| complaint.contains(text)));
        return Some(known.map_or("give the server a certificate that its clients can check", |(_, step)| step));
    }
    let (_, alert) = cause.split_once(THEIRS)?;
    CLIENT
        .contains(&alert)
        .then_some("the server wants another client-certificate(-data) than the kubeconfig's: renew it there")
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
    fn each_complaint_of_rustls_has_its_next_step() {
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
            (CertificateError::BadEncoding, "clients can check"),
        ];
        for (complaint, expected) in rows {
            let found = step(&Error::InvalidCertificate(complaint.clone())).unwrap_or_default();
            assert!(found.contains(expected), "{complaint:?}: {found}");
        }
    }

    #[test]
    fn an_alert_counts_only_where_it_speaks_of_a_certificate() {
        let step = |alert| step(&Error::AlertReceived(alert));
        assert!(step(AlertDescription::CertificateRequired).is_some());
        assert!(step(AlertDescription::UnknownCA).is_some());
        assert_eq!(step(AlertDescription::InternalError), None);
        assert_eq!(next_step("connection refused"), None);
    }
}
