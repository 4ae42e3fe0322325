//! `clusters[].cluster` of a kubeconfig: the API server's address, and how its certificate is verified.

use super::files::{EntryLocation, non_empty};
use crate::cluster::wire::null_is_empty;
use crate::cni::Error;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kube::Config;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::{self, PemObject};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The maximum size of a file of certificates; the system's bundle has 150 of them in 220 KiB.
pub(super) const MAX_PEM: u64 = 1 << 20;

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(super) struct ClusterEntry {
    #[serde(deserialize_with = "null_is_empty")]
    server: String,
    #[serde(deserialize_with = "null_is_empty")]
    certificate_authority: String,
    #[serde(deserialize_with = "null_is_empty")]
    certificate_authority_data: String,
    #[serde(deserialize_with = "null_is_empty")]
    insecure_skip_tls_verify: bool,
    #[serde(deserialize_with = "null_is_empty")]
    tls_server_name: String,
    #[serde(deserialize_with = "null_is_empty")]
    proxy_url: String,
}

/// How a server's certificate is verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authority {
    /// With the CA in `certificate-authority-data`.
    Embedded,
    /// With the CA in the file of `certificate-authority`.
    File(PathBuf),
    /// With the system's CAs: the kubeconfig names none.
    System,
    /// Not at all: `insecure-skip-tls-verify`.
    Insecure,
}

impl ClusterEntry {
    /// Returns a server whose certificate is signed by the CA in a file.
    pub(super) fn with_authority(server: &str, authority: &Path) -> Self {
        Self { server: server.to_owned(), certificate_authority: authority.display().to_string(), ..Self::default() }
    }

    /// Returns how the server's certificate is verified.
    pub(super) fn authority(&self) -> Authority {
        if self.insecure_skip_tls_verify {
            Authority::Insecure
        } else if non_empty(&self.certificate_authority_data).is_some() {
            Authority::Embedded
        } else {
            non_empty(&self.certificate_authority).map_or(Authority::System, |file| Authority::File(file.into()))
        }
    }

    /// Returns the configuration of a client without credentials.
    ///
    /// # Errors
    /// A value is invalid, or a file can't be read.
    pub(super) fn config(&self, location: &EntryLocation<'_>) -> Result<Config, Error> {
        let is_http = |scheme: Option<&str>| matches!(scheme, Some("http" | "https"));
        let invalid = |key: &str, url: &str| {
            let url = without_userinfo(url);
            location.error(key, format!("invalid URL {url:?}; expected https://HOST:PORT or http://HOST:PORT"))
        };
        let mut config = Config::new(self.server.parse().map_err(|_| invalid("server", &self.server))?);
        if !is_http(config.cluster_url.scheme_str()) {
            return Err(invalid("server", &self.server));
        }
        if let Some(proxy) = non_empty(&self.proxy_url) {
            config.proxy_url = Some(proxy.parse().map_err(|_| invalid("proxy-url", proxy))?);
            if !is_http(config.proxy_url.as_ref().and_then(|url| url.scheme_str())) {
                return Err(invalid("proxy-url", proxy));
            }
        }
        config.root_cert = self.authorities(location)?;
        config.accept_invalid_certs = self.insecure_skip_tls_verify;
        config.tls_server_name = non_empty(&self.tls_server_name).map(Into::into);
        let urls = [Some(&config.cluster_url), config.proxy_url.as_ref()];
        let uses_tls = urls.into_iter().flatten().any(|url| url.scheme_str() == Some("https"));
        if self.insecure_skip_tls_verify || !uses_tls {
            // An empty list, so that the client does not read the 150 CAs of the system.
            config.root_cert.get_or_insert_default();
        }
        Ok(config)
    }

    /// Returns the CA certificates in DER; `None` for the system's.
    fn authorities(&self, location: &EntryLocation<'_>) -> Result<Option<Vec<Vec<u8>>>, Error> {
        let data = non_empty(&self.certificate_authority_data);
        let (key, pem) = match (data, non_empty(&self.certificate_authority)) {
            (Some(data), _) => {
                let key = "certificate-authority-data";
                let pem = BASE64_STANDARD.decode(without_whitespace(data));
                (key, pem.map_err(|error| location.error(key, "invalid base64").with_details(error.to_string()))?)
            }
            (None, Some(file)) => {
                let key = "certificate-authority";
                (key, location.read(key, file, MAX_PEM)?.into_bytes())
            }
            (None, None) => return Ok(None),
        };
        if self.insecure_skip_tls_verify {
            return Err(location.error(key, "conflicts with insecure-skip-tls-verify: true; remove one of the two"));
        }
        let certificates = certificates(&pem);
        let certificates =
            certificates.map_err(|error| location.error(key, "invalid PEM").with_details(error.to_string()))?;
        if certificates.is_empty() {
            return Err(location.error(key, "no PEM certificate found"));
        }
        Ok(Some(certificates))
    }
}

/// Returns the DER of each certificate in PEM text; other text is ignored (RFC 7468, section 2).
fn certificates(pem: &[u8]) -> Result<Vec<Vec<u8>>, pem::Error> {
    CertificateDer::pem_slice_iter(pem).map(|certificate| Ok(certificate?.to_vec())).collect()
}

/// Removes whitespace, which base64 in a kubeconfig may contain.
pub(super) fn without_whitespace(text: &str) -> String {
    text.split_ascii_whitespace().collect()
}

/// Removes user and password from a URL, for messages: all before the last `@` of the authority (RFC 3986, section
/// 3.2), also in text that is not a valid URL.
pub(super) fn without_userinfo(url: &str) -> String {
    let start = url.find("//").map_or(0, |slashes| slashes + "//".len());
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |length| start + length);
    // An unescaped separator in a password ends the authority too early.
    let end = if url[start..end].contains('@') { end } else { url.len() };
    match url[start..end].rfind('@') {
        Some(at) => format!("{}{}", &url[..start], &url[start + at + 1..]),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{certificates, without_userinfo};

    #[test]
    fn urls_in_messages_have_no_user_and_no_password() {
        for (url, shown) in [
            ("https://user:pw@host:6443/a@b", "https://host:6443/a@b"),
            ("https://user:p@w@host", "https://host"),
            ("user:pw@host", "host"),
            ("https://user:p/w@host:1", "https://host:1"),
            ("socks5://user:pw@[fd00::1]:1080", "socks5://[fd00::1]:1080"),
            ("https://host:6443", "https://host:6443"),
            ("", ""),
        ] {
            assert_eq!(without_userinfo(url), shown);
        }
    }

    #[test]
    fn certificates_are_found_between_other_text() {
        const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
        const END: &str = "-----END CERTIFICATE-----";
        let text = format!("CN=a\n{BEGIN}\nAQ\n==\n{END}\nCN=b\r\n{BEGIN}\r\nAgM=\r\n{END}\r\n");
        assert_eq!(certificates(text.as_bytes()).expect("base64"), [vec![1], vec![2, 3]]);
        assert!(certificates(b"nothing").expect("no certificate").is_empty());
        assert!(certificates(format!("{BEGIN}\n!\n{END}").as_bytes()).is_err());
    }
}
