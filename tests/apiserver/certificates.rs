//! The certificates and keys of the API server, its clients and the tokens of service accounts.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use std::fs;
use std::path::Path;

/// The address of the Service `kubernetes`.
pub(crate) const SERVICE: &str = "10.96.0.1";

/// Writes `ca.crt`, `server.crt`, `server.key`, `tokens.key` and `tokens.pub`. Returns certificate and key of an
/// administrator as PEM.
pub(crate) fn write(directory: &Path) -> (String, String) {
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, key()).expect("an authority");
    let signed = |params: CertificateParams| {
        let key = key();
        let certificate = params.signed_by(&key, &authority).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    };
    let put = |name: &str, text: &str| fs::write(directory.join(name), text).expect("writable");
    put("ca.crt", &authority.pem());
    let addresses = ["127.0.0.1", SERVICE].map(str::to_owned).to_vec();
    let (certificate, server_key) = signed(CertificateParams::new(addresses).expect("addresses"));
    put("server.crt", &certificate);
    put("server.key", &server_key);
    let tokens = key();
    put("tokens.key", &tokens.serialize_pem());
    put("tokens.pub", &tokens.public_key_pem());
    // The group that has all rights without a role (kubernetes.io, "User-facing roles").
    let mut admin = CertificateParams::new(Vec::new()).expect("parameters");
    admin.distinguished_name.push(DnType::OrganizationName, "system:masters");
    admin.distinguished_name.push(DnType::CommonName, "admin");
    signed(admin)
}

fn key() -> KeyPair {
    KeyPair::generate().expect("a key")
}
