//! The entries of a kubeconfig for the plugin and the agent: the server of `clusters[].cluster` and the credentials of
//! `users[].user`, with the contents of the files that they name. Keys that run a program are not supported.
//!
//! kube reads a token file that the kubelet replaces again, too, but rejects a line break at its end, which
//! `kubectl create token` writes.

use super::files::{EntryLocation, non_empty};
use crate::cni::Error;
use crate::trusted_file;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hyper::Request;
use hyper::header::{AUTHORIZATION, HeaderValue};
use kube::Config;
use kube::config::{AuthInfo, Cluster};
use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use secrecy::{ExposeSecret, SecretString};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tower::{Layer, Service};

/// The maximum size of a file of certificates; the system's bundle has 150 of them in 220 KiB.
const MAX_PEM: u64 = 1 << 20;

const SUPPORTED: &str = "token, tokenFile, or client-certificate(-data) with client-key(-data)";

/// Returns the configuration of a client without credentials. The environment has no effect on it.
///
/// # Errors
/// A value is invalid, or a file can't be read.
pub(super) fn server_config(cluster: &Cluster, location: &EntryLocation<'_>) -> Result<Config, Error> {
    let invalid = |key: &str, url: &str| {
        let url = without_userinfo(url);
        location.error(key, format!("invalid URL {url:?}; expected https://HOST:PORT or http://HOST:PORT"))
    };
    let parse = |key: &str, url: &str| match url.parse::<hyper::Uri>() {
        Ok(uri) if matches!(uri.scheme_str(), Some("http" | "https")) => Ok(uri),
        _ => Err(invalid(key, url)),
    };
    let is_insecure = cluster.insecure_skip_tls_verify.unwrap_or_default();
    let mut config = Config::new(parse("server", non_empty(&cluster.server).unwrap_or_default())?);
    config.proxy_url = non_empty(&cluster.proxy_url).map(|url| parse("proxy-url", url)).transpose()?;
    config.root_cert = authorities(cluster, location)?;
    config.accept_invalid_certs = is_insecure;
    config.tls_server_name = non_empty(&cluster.tls_server_name).map(Into::into);
    let urls = [Some(&config.cluster_url), config.proxy_url.as_ref()];
    let uses_tls = urls.into_iter().flatten().any(|url| url.scheme_str() == Some("https"));
    if is_insecure || !uses_tls {
        // An empty list, so that the client does not read the 150 CAs of the system.
        config.root_cert.get_or_insert_default();
    }
    Ok(config)
}

/// Returns the CA certificates in DER; `None` for the system's.
fn authorities(cluster: &Cluster, location: &EntryLocation<'_>) -> Result<Option<Vec<Vec<u8>>>, Error> {
    let data = non_empty(&cluster.certificate_authority_data);
    let (key, pem) = match (data, non_empty(&cluster.certificate_authority)) {
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
    if cluster.insecure_skip_tls_verify == Some(true) {
        return Err(location.error(key, "conflicts with insecure-skip-tls-verify: true; remove one of the two"));
    }
    let certificates = certificates(&String::from_utf8_lossy(&pem));
    if certificates.is_empty() {
        return Err(location.error(key, "no usable PEM certificate found"));
    }
    Ok(Some(certificates))
}

/// The beginning of a certificate in PEM text (RFC 7468, section 5.1).
const BEGIN_CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----";

/// Returns the DER of each certificate in PEM text that a client can use. Others are skipped, as in Go (`crypto/x509`,
/// `AppendCertsFromPEM`), and other text is ignored.
fn certificates(pem: &str) -> Vec<Vec<u8>> {
    let mut usable = RootCertStore::empty();
    let certificate = |rest: &str| {
        let pem = format!("{BEGIN_CERTIFICATE}{rest}");
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
        usable.add(certificate.clone()).ok()?;
        Some(certificate.to_vec())
    };
    pem.split(BEGIN_CERTIFICATE).skip(1).filter_map(certificate).collect()
}

/// Whether a client can use all certificates in a file.
pub(super) fn has_only_usable_certificates(file: &Path) -> bool {
    let text = trusted_file::read(file, MAX_PEM).unwrap_or_default();
    let pem = String::from_utf8_lossy(&text);
    certificates(&pem).len() == pem.matches(BEGIN_CERTIFICATE).count()
}

/// Returns the credentials for a client, including the contents of the files that the entry names.
///
/// # Errors
/// A key is not supported, a value is invalid, or half of a pair is missing.
pub(super) fn credentials(user: &AuthInfo, location: &EntryLocation<'_>) -> Result<AuthInfo, Error> {
    if let Some(key) = unsupported(user) {
        return Err(location.error(key, format!("not supported; expected {SUPPORTED}")));
    }
    let key_data = user.client_key_data.as_ref().map(|data| data.expose_secret().to_owned());
    let info = AuthInfo {
        token: token(user, location)?.map(Into::into),
        client_certificate_data: base64_data(
            location,
            &user.client_certificate_data,
            ("client-certificate", &user.client_certificate),
        )?,
        client_key_data: base64_data(location, &key_data, ("client-key", &user.client_key))?.map(Into::into),
        ..AuthInfo::default()
    };
    match (info.client_certificate_data.is_some(), info.client_key_data.is_some()) {
        (true, false) => Err(location.error("client-key(-data)", "missing; required with client-certificate(-data)")),
        (false, true) => Err(location.error("client-certificate(-data)", "missing; required with client-key(-data)")),
        _ => Ok(info),
    }
}

/// Returns the first key that is not supported: `exec` and `auth-provider` run programs, Kubernetes 1.19 removed
/// passwords, and the plugin does not impersonate other users.
fn unsupported(user: &AuthInfo) -> Option<&'static str> {
    let keys = [
        ("exec", user.exec.is_some()),
        ("auth-provider", user.auth_provider.is_some()),
        ("username", user.username.is_some()),
        ("password", user.password.is_some()),
        ("as", user.impersonate.is_some()),
        ("as-uid", user.impersonate_uid.is_some()),
        ("as-groups", user.impersonate_groups.is_some()),
        ("as-user-extra", user.impersonate_user_extra.is_some()),
    ];
    keys.into_iter().find_map(|(key, is_set)| is_set.then_some(key))
}

/// Returns the token. `tokenFile` takes precedence over `token` if the file can be read (client-go, `transport`,
/// `NewBearerAuthWithRefreshRoundTripper`).
fn token(user: &AuthInfo, location: &EntryLocation<'_>) -> Result<Option<String>, Error> {
    let file = non_empty(&user.token_file).map(|file| location.read("tokenFile", file, MAX_TOKEN));
    let embedded = user.token.as_ref().map(SecretString::expose_secret).filter(|token| !token.is_empty());
    let (key, token) = match (file, embedded) {
        (Some(Ok(text)), _) => ("tokenFile", text),
        (_, Some(token)) => ("token", token.to_owned()),
        (Some(Err(error)), None) => return Err(error),
        (None, None) => return Ok(None),
    };
    let token = token.trim();
    check_token(token).map_err(|why| location.error(key, why))?;
    Ok(Some(token.to_owned()))
}

/// Returns the base64 of an embedded value, or of the file that `key` names.
fn base64_data(
    location: &EntryLocation<'_>,
    data: &Option<String>,
    (key, file): (&str, &Option<String>),
) -> Result<Option<String>, Error> {
    match (non_empty(data), non_empty(file)) {
        (Some(data), _) => Ok(Some(without_whitespace(data))),
        (None, Some(file)) => Ok(Some(BASE64_STANDARD.encode(location.read(key, file, MAX_PEM)?))),
        (None, None) => Ok(None),
    }
}

/// Removes whitespace, which base64 in a kubeconfig may contain.
fn without_whitespace(text: &str) -> String {
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

/// How often the file is read again.
const RELOAD_INTERVAL: Duration = Duration::from_secs(50);
/// The maximum size of a token file: a token is part of a request's header, which servers limit.
pub(super) const MAX_TOKEN: u64 = 64 << 10;

/// Adds the token to each request of a service.
#[derive(Clone)]
pub(super) struct TokenLayer {
    file: PathBuf,
    last: Arc<Mutex<Option<(HeaderValue, Instant)>>>,
}

impl TokenLayer {
    pub(super) fn new(file: PathBuf) -> Self {
        Self { file, last: Arc::default() }
    }

    /// Returns the header. The last token remains in use while the file can't be read, as in client-go (`transport`,
    /// `cachingTokenSource`).
    fn authorization(&self) -> Option<HeaderValue> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|(_, read)| read.elapsed() >= RELOAD_INTERVAL) {
            let value = read(&self.file).or_else(|| last.take().map(|(value, _)| value));
            *last = value.map(|value| (value, Instant::now()));
        }
        last.as_ref().map(|(value, _)| value.clone())
    }
}

fn read(file: &Path) -> Option<HeaderValue> {
    let text = String::from_utf8(trusted_file::read(file, MAX_TOKEN).ok()?).ok()?;
    check_token(text.trim()).ok()?;
    let mut value = HeaderValue::try_from(format!("Bearer {}", text.trim())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

impl<S> Layer<S> for TokenLayer {
    type Service = TokenService<S>;

    fn layer(&self, service: S) -> TokenService<S> {
        TokenService { service, token: self.clone() }
    }
}

/// A service whose requests have the token.
pub(super) struct TokenService<S> {
    service: S,
    token: TokenLayer,
}

impl<B, S: Service<Request<B>>> Service<Request<B>> for TokenService<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> S::Future {
        if let Some(value) = self.token.authorization() {
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        self.service.call(request)
    }
}

/// Checks that a token can be part of a header.
pub(super) fn check_token(token: &str) -> Result<(), &'static str> {
    let is_valid = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
    if is_valid { Ok(()) } else { Err("invalid token: expected visible ASCII characters") }
}

#[cfg(test)]
mod tests {
    use super::{BEGIN_CERTIFICATE, certificates, without_userinfo};

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
    fn certificates_are_found_between_other_text_and_broken_ones() {
        let new = |name: &str| {
            let params = rcgen::CertificateParams::new([name.to_owned()]).expect("a name");
            params.self_signed(&rcgen::KeyPair::generate().expect("a key")).expect("a certificate")
        };
        let (one, other) = (new("a"), new("b"));
        let end = "-----END CERTIFICATE-----";
        let broken = format!("{BEGIN_CERTIFICATE}\n!\n{end}\n{BEGIN_CERTIFICATE}\nAQ==\n{end}\n{BEGIN_CERTIFICATE}\n");
        let text = format!("CN=a\n{}{broken}CN=b\r\n{}", one.pem(), other.pem().replace('\n', "\r\n"));
        assert_eq!(certificates(&text), [one.der().to_vec(), other.der().to_vec()]);
        assert!(certificates("nothing").is_empty() && certificates(&broken).is_empty());
    }
}
