//! TLS: how the server's certificate is verified, and the client's certificate.

use super::credentials::Identity;
use super::error::ClientError;
use crate::trusted_file;
use kube::Config;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::default_provider;
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the file of the CA is read again (as kube's `Config::incluster`).
const RELOAD_INTERVAL: Duration = Duration::from_secs(60);
/// The maximum size of that file.
const MAX_PEM: u64 = 1 << 20;

/// Returns the TLS configuration for the server of `config`.
pub(super) fn client_config(config: &Config, identity: Option<Identity>) -> Result<ClientConfig, ClientError> {
    let authorities = match &config.root_cert {
        Some(certificates) => {
            let mut store = RootCertStore::empty();
            for certificate in certificates {
                add(&mut store, CertificateDer::from(certificate.as_slice())).map_err(ClientError::Authority)?;
            }
            store
        }
        None => system_authorities()?,
    };
    let builder = ClientConfig::builder().with_root_certificates(authorities);
    let mut tls = match identity {
        None => builder.with_no_client_auth(),
        Some(Identity { certificate, key }) => {
            let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&certificate).collect();
            let chain = chain.map_err(|error| ClientError::Certificate(error.to_string()))?;
            if chain.is_empty() {
                return Err(ClientError::Certificate("no PEM certificate found".to_owned()));
            }
            let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| ClientError::Key(error.to_string()))?;
            let tls = builder.with_client_auth_cert(chain, key);
            tls.map_err(|error| ClientError::Credentials(error.to_string()))?
        }
    };
    if config.accept_invalid_certs {
        tls.dangerous().set_certificate_verifier(Arc::new(Unverified));
    } else if let Some(path) = &config.root_cert_file {
        let verifier = load(path).map_err(ClientError::Authority)?;
        let verifier = Reloading { path: path.clone(), current: Mutex::new((verifier, Instant::now())) };
        tls.dangerous().set_certificate_verifier(Arc::new(verifier));
    }
    Ok(tls)
}

fn add(store: &mut RootCertStore, certificate: CertificateDer<'_>) -> Result<(), String> {
    store.add(certificate.into_owned()).map_err(|error| error.to_string())
}

/// Returns the CAs of the system; invalid ones are ignored, as other programs do.
fn system_authorities() -> Result<RootCertStore, ClientError> {
    let found = rustls_native_certs::load_native_certs();
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(found.certs);
    if store.is_empty() {
        let cause = found.errors.first().map_or_else(|| "no certificates found".to_owned(), ToString::to_string);
        return Err(ClientError::Authority(format!("those of the system: {cause}")));
    }
    Ok(store)
}

/// Returns a verifier with the CAs in a file.
fn load(path: &Path) -> Result<Arc<WebPkiServerVerifier>, String> {
    let pem = trusted_file::read(path, MAX_PEM).map_err(|error| error.to_string())?;
    let mut store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        add(&mut store, certificate.map_err(|error| error.to_string())?)?;
    }
    WebPkiServerVerifier::builder(Arc::new(store)).build().map_err(|error| error.to_string())
}

/// Verifies with the CAs in a file, which it reads again from time to time: the kubelet replaces it when the cluster's
/// CA changes.
#[derive(Debug)]
struct Reloading {
    path: PathBuf,
    current: Mutex<(Arc<WebPkiServerVerifier>, Instant)>,
}

impl Reloading {
    fn current(&self) -> Arc<WebPkiServerVerifier> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.1.elapsed() >= RELOAD_INTERVAL {
            match load(&self.path) {
                Ok(verifier) => current.0 = verifier,
                Err(cause) => {
                    let path = self.path.display();
                    tracing::warn!(cause, "CA certificates not read again: {path}; the earlier ones remain in use");
                }
            }
            current.1 = Instant::now();
        }
        Arc::clone(&current.0)
    }
}

impl ServerCertVerifier for Reloading {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.current().verify_server_cert(certificate, intermediates, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.current().verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.current().verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.current().supported_verify_schemes()
    }
}

/// Accepts each certificate: `insecure-skip-tls-verify`.
#[derive(Debug)]
struct Unverified;

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        default_provider().signature_verification_algorithms.supported_schemes()
    }
}
