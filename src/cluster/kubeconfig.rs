//! Kubeconfigs, understood as client-go does (k8s.io/client-go, `tools/clientcmd`): kube's structures, with checks of who
//! may own the files, and without keys that run a program. kube's conversion to a [`Config`] is not used: it reads the
//! proxy variables of the environment, which plugins inherit from the runtime.

use super::manifests::{documents, typed};
use crate::cni::{Code, Error};
use crate::host_path::{HostPath, HostRoot};
use crate::trusted_file::{self, FileError};
use base64::Engine;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use k8s_openapi::jiff::Timestamp;
use kube::client::RustlsTlsError::{AddRootCertificate, InvalidServerName, NoValidNativeRootCA};
use kube::config::{AuthInfo, Cluster, Kubeconfig as KubeconfigFile};
use kube::{Client, Config};
use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The maximum size of a kubeconfig, and of a file of certificates: the system's bundle has 150 of them in 220 KiB.
const MAX_FILE: u64 = 1 << 20;
/// The beginning of a certificate in PEM text (RFC 7468, section 5.1).
const BEGIN_CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----";
/// The maximum size of a token file: a token is part of a request's header, which servers limit.
const MAX_TOKEN: u64 = 64 << 10;

/// The cluster and the user of a kubeconfig's current context. A context without a user is valid: its requests are
/// anonymous.
pub(super) struct Kubeconfig<'a> {
    cluster: Cluster,
    cluster_location: EntryLocation<'a>,
    user: AuthInfo,
    user_location: EntryLocation<'a>,
}

impl<'a> Kubeconfig<'a> {
    /// Reads the kubeconfig at `path`. Absolute paths in it refer to the file system that is mounted at `root`.
    ///
    /// # Errors
    /// 11 if the kubeconfig does not exist yet, 5 if it can't be read, 7 if it is invalid or not trusted.
    pub(super) fn read(root: &'a Path, path: &'a Path) -> Result<Self, Error> {
        let file = parse(path, &trusted_file::read_trusted(path, MAX_FILE).map_err(|error| read_error(path, &error))?)?;
        let location = |entry: String| EntryLocation { kubeconfig: path, root, entry };

        let contexts = file.contexts.into_iter().map(|context| (context.name, context.context));
        let name = file.current_context.unwrap_or_default();
        let context = location(String::new()).find("current-context", "context", &name, contexts)?;
        let context_location = location(format!("contexts[{name}].context."));

        let clusters = file.clusters.into_iter().map(|cluster| (cluster.name, cluster.cluster));
        let cluster = context_location.find("cluster", "cluster", &context.cluster, clusters)?;
        let cluster_location = location(format!("clusters[{}].cluster.", context.cluster));

        let name = context.user.unwrap_or_default();
        let users = file.auth_infos.into_iter().map(|user| (user.name, user.auth_info));
        let user =
            if name.is_empty() { AuthInfo::default() } else { context_location.find("user", "user", &name, users)? };
        Ok(Self { cluster, cluster_location, user, user_location: location(format!("users[{name}].user.")) })
    }

    /// Returns the configuration for `server` with the service account whose files are in `directory`.
    pub(super) fn of_service_account(server: &str, directory: &'a Path) -> Self {
        let location =
            |entry: &str| EntryLocation { kubeconfig: directory, root: Path::new("/"), entry: entry.to_owned() };
        let file = |name: &str| Some(directory.join(name).display().to_string());
        let server = Some(server.to_owned());
        Self {
            cluster: Cluster { server, certificate_authority: file("ca.crt"), ..Cluster::default() },
            cluster_location: location("ca.crt."),
            user: AuthInfo { token_file: file("token"), ..AuthInfo::default() },
            user_location: location("token."),
        }
    }

    /// Returns the path of the kubeconfig, or of the service account's directory, for messages.
    pub(super) fn path(&self) -> &'a Path {
        self.cluster_location.kubeconfig
    }

    /// Returns the configuration of a client, with the contents of the files that the kubeconfig names. If the client
    /// `lives_long`, kube reads the files of the service account from time to time: the kubelet replaces them.
    ///
    /// # Errors
    /// 7 if a value is invalid or not supported, or a file can't be read or is not trusted.
    pub(super) fn config(&self, lives_long: bool) -> Result<Config, Error> {
        let mut config = self.server_config()?;
        config.auth_info = self.credentials()?;
        // `api::retry` has its own timeouts and retries.
        (config.connect_timeout, config.write_timeout, config.default_retry) = (None, None, false);
        if let (true, Some(ca)) = (lives_long, &self.cluster.certificate_authority) {
            // The API server ends a watch before the read timeout.
            config.connect_timeout = Some(Duration::from_secs(5));
            config.read_timeout = Some(Duration::from_secs(300));
            config.reset_reader_on_write = true;
            // kube would accept no file with a certificate that can't be used.
            let pem =
                String::from_utf8_lossy(&trusted_file::read(Path::new(ca), MAX_FILE).unwrap_or_default()).into_owned();
            let is_usable = certificates(&pem).len() == pem.matches(BEGIN_CERTIFICATE).count();
            config.root_cert_file = is_usable.then(|| ca.into());
            // kube reads the token again, but accepts none with a line break at its end, which the kubelet does not write.
            let token =
                self.user.token_file.as_ref().and_then(|file| trusted_file::read(Path::new(file), MAX_TOKEN).ok());
            if token.is_some_and(|token| token == token.trim_ascii()) {
                config.auth_info = self.user.clone();
            }
        }
        Ok(config)
    }

    /// Returns a client, which connects with its first request. Call it inside a Tokio runtime.
    ///
    /// # Errors
    /// 7 if a certificate, a key or a name can't be used.
    pub(super) fn client(&self, config: Config) -> Result<Client, Error> {
        let (cluster, user) = (&self.cluster_location, &self.user_location);
        Client::try_from(config).map_err(|error| {
            let (location, key) = match &error {
                kube::Error::RustlsTls(AddRootCertificate(_) | NoValidNativeRootCA(_)) => {
                    (cluster, "certificate-authority(-data)")
                }
                kube::Error::RustlsTls(InvalidServerName(_)) => (cluster, "tls-server-name"),
                _ => (user, "client-certificate(-data) and client-key(-data)"),
            };
            location.error(key, "invalid value").with_details(error.to_string())
        })
    }

    /// Returns the configuration of a client without credentials. The environment has no effect on it.
    fn server_config(&self) -> Result<Config, Error> {
        let Self { cluster, cluster_location: location, .. } = self;
        // The message does not contain the URL, which can have a password.
        let parse = |key: &str, url: &str| {
            let url = url.parse::<hyper::Uri>().ok().filter(|url| matches!(url.scheme_str(), Some("http" | "https")));
            url.ok_or_else(|| location.error(key, "invalid URL; expected https://HOST:PORT or http://HOST:PORT"))
        };
        let is_insecure = cluster.insecure_skip_tls_verify.unwrap_or_default();
        let server = parse("server", non_empty(&cluster.server).unwrap_or_default())?;
        if server.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(location.error("server", "expected a URL without user and password"));
        }
        let mut config = Config::new(server);
        config.proxy_url = non_empty(&cluster.proxy_url).map(|url| parse("proxy-url", url)).transpose()?;
        config.accept_invalid_certs = is_insecure;
        config.tls_server_name = non_empty(&cluster.tls_server_name).map(Into::into);

        let data = non_empty(&cluster.certificate_authority_data);
        let key = if data.is_some() { "certificate-authority-data" } else { "certificate-authority" };
        if let Some(pem) = location.base64(data, key, &cluster.certificate_authority)? {
            if is_insecure {
                return Err(location.error(key, "conflicts with insecure-skip-tls-verify: true; remove one of the two"));
            }
            let pem = BASE64_STANDARD.decode(pem);
            let pem = pem.map_err(|error| location.error(key, "invalid base64").with_details(error.to_string()))?;
            config.root_cert = Some(certificates(&String::from_utf8_lossy(&pem))).filter(|all| !all.is_empty());
            if config.root_cert.is_none() {
                return Err(location.error(key, "no usable PEM certificate found"));
            }
        }
        let urls = [Some(&config.cluster_url), config.proxy_url.as_ref()];
        if is_insecure || !urls.into_iter().flatten().any(|url| url.scheme_str() == Some("https")) {
            // An empty list, so that the client does not read the 150 CAs of the system.
            config.root_cert.get_or_insert_default();
        }
        Ok(config)
    }

    /// Returns the credentials for a client, including the contents of the files that the entry names.
    fn credentials(&self) -> Result<AuthInfo, Error> {
        let Self { user, user_location: location, .. } = self;
        // They run programs, are passwords (removed in Kubernetes 1.19), or impersonate other users.
        let unsupported = [
            ("exec", user.exec.is_some()),
            ("auth-provider", user.auth_provider.is_some()),
            ("username", user.username.is_some()),
            ("password", user.password.is_some()),
            ("as", user.impersonate.is_some()),
            ("as-uid", user.impersonate_uid.is_some()),
            ("as-groups", user.impersonate_groups.is_some()),
            ("as-user-extra", user.impersonate_user_extra.is_some()),
        ];
        if let Some((key, _)) = unsupported.into_iter().find(|(_, is_set)| *is_set) {
            let supported = "token, tokenFile, or client-certificate(-data) with client-key(-data)";
            return Err(location.error(key, format!("not supported; expected {supported}")));
        }
        let certificate = user.client_certificate_data.as_deref();
        let certificate = location.base64(certificate, "client-certificate", &user.client_certificate)?;
        let key = user.client_key_data.as_ref().map(ExposeSecret::expose_secret);
        let key = location.base64(key, "client-key", &user.client_key)?;
        let token = self.token()?.map(Into::into);
        if certificate.is_some() != key.is_some() {
            return Err(location.error("client-certificate(-data)", "expected together with client-key(-data)"));
        }
        let client_key_data = key.map(Into::into);
        Ok(AuthInfo { token, client_certificate_data: certificate, client_key_data, ..AuthInfo::default() })
    }

    /// Returns the token. `tokenFile` takes precedence over `token` if the file can be read (client-go, `transport`,
    /// `NewBearerAuthWithRefreshRoundTripper`).
    fn token(&self) -> Result<Option<String>, Error> {
        let Self { user, user_location: location, .. } = self;
        let embedded = user.token.as_ref().map(SecretString::expose_secret).filter(|token| !token.is_empty());
        let file = non_empty(&user.token_file).map(|file| location.read("tokenFile", file, MAX_TOKEN));
        let (key, token) = match (file, embedded) {
            (Some(Ok(text)), _) => ("tokenFile", text),
            (_, Some(token)) => ("token", token.as_bytes().to_vec()),
            (Some(Err(error)), None) => return Err(error),
            (None, None) => return Ok(None),
        };
        // A file may end with a line break, which can't be part of a header.
        let token = token.trim_ascii();
        if token.is_empty() || !token.iter().all(u8::is_ascii_graphic) {
            return Err(location.error(key, "invalid token: expected visible ASCII characters"));
        }
        Ok(Some(String::from_utf8_lossy(token).into_owned()))
    }
}

/// A kubeconfig's current context. It contains no secret except the token, so that output can be checked for it.
pub struct KubeconfigSummary {
    /// The API server's address, without a slash at its end.
    pub server: String,
    /// How the server's certificate is verified, in words; `None` if it is not: `insecure-skip-tls-verify`.
    pub authority: Option<String>,
    /// The kind of the credentials, in words; `None` if requests are anonymous.
    pub credentials: Option<String>,
    /// The token of the requests, from the kubeconfig or the file that it names.
    pub token: Option<String>,
    /// When the token expires, in seconds since 1970; `None` if it is opaque. A service account's token is not.
    pub expires: Option<i64>,
}

impl KubeconfigSummary {
    /// Reads the kubeconfig at `path` and the files that it names. `path` is a path of this process; absolute paths in
    /// the kubeconfig refer to the file system that is mounted at `root`.
    ///
    /// # Errors
    /// 11 if the kubeconfig does not exist yet, 5 if it can't be read, 7 if it is invalid or not trusted.
    pub fn read(root: &Path, path: &Path) -> Result<Self, Error> {
        let kubeconfig = Kubeconfig::read(root, path)?;
        let (server, user) = (server_address(&kubeconfig.server_config()?), kubeconfig.credentials()?);
        let Kubeconfig { cluster, user: entry, .. } = &kubeconfig;
        let by = match (non_empty(&cluster.certificate_authority_data), non_empty(&cluster.certificate_authority)) {
            (Some(_), _) => "certificate authority embedded".to_owned(),
            (None, Some(file)) => format!("certificate authority in {file}"),
            (None, None) => "no certificate authority; the node's trusted certificates are used".to_owned(),
        };
        let authority = (cluster.insecure_skip_tls_verify != Some(true)).then_some(by);
        let token = user.token.as_ref().map(|token| token.expose_secret().to_owned());
        let credentials = match (&token, non_empty(&entry.token_file)) {
            (Some(_), Some(file)) => Some(format!("the token in {file}")),
            (Some(_), None) => Some("a token".to_owned()),
            (None, _) => user.client_certificate_data.as_ref().map(|_| "a client certificate".to_owned()),
        };
        let expires = token.as_deref().and_then(claims).and_then(|claims| expiry(&claims));
        Ok(Self { server, authority, credentials, token, expires })
    }
}

/// Returns the address of an API server for messages, without a slash at its end.
pub(super) fn server_address(config: &Config) -> String {
    config.cluster_url.to_string().trim_end_matches('/').to_owned()
}

/// The location of an entry in a kubeconfig, for errors about its keys and for the files that they name.
struct EntryLocation<'a> {
    /// The kubeconfig.
    kubeconfig: &'a Path,
    /// The mount point of the file system that absolute paths in the kubeconfig refer to.
    root: &'a Path,
    /// The entry, such as `clusters[local].cluster.`; empty for the top level.
    entry: String,
}

impl EntryLocation<'_> {
    /// Returns the error for a key of this entry.
    fn error(&self, key: &str, what: impl Display) -> Error {
        let (kubeconfig, entry) = (self.kubeconfig.display(), &self.entry);
        Error::new(Code::InvalidConfig, format!("kubeconfig {kubeconfig}: {entry}{key}: {what}"))
    }

    /// Returns the entry that `key` names; the error has the names of all entries.
    fn find<T: Default>(
        &self,
        key: &str,
        kind: &str,
        name: &str,
        entries: impl Iterator<Item = (String, Option<T>)>,
    ) -> Result<T, Error> {
        let entries: Vec<_> = entries.collect();
        let names = entries.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        let found = entries.into_iter().find(|(found, _)| found == name && !name.is_empty());
        found.map(|(_, entry)| entry.unwrap_or_default()).ok_or_else(|| {
            let fault = if name.is_empty() { "missing".to_owned() } else { format!("unknown {kind} {name:?}") };
            let none = || format!("the kubeconfig has no {kind}s");
            let accepted = if names.is_empty() { none() } else { format!("expected one of: {names}") };
            self.error(key, format!("{fault}; {accepted}"))
        })
    }

    /// Reads the file that `key` names, of at most `limit` bytes.
    fn read(&self, key: &str, file: &str, limit: u64) -> Result<Vec<u8>, Error> {
        let failed = |path: &Path, error: io::Error| {
            self.error(key, format!("{} can't be read", path.display())).with_details(error.to_string())
        };
        let path = self.resolve(file).map_err(|error| failed(Path::new(file), error))?;
        trusted_file::read_trusted(&path, limit).map_err(|error| match error {
            FileError::Io(error) => failed(&path, error),
            refused => self.error(key, format!("{} is not used: {refused}", path.display())),
        })
    }

    /// Resolves a path in this entry; relative paths are relative to the kubeconfig. Below another root, symbolic
    /// links lead to where that file system's own processes find them.
    fn resolve(&self, file: &str) -> io::Result<PathBuf> {
        if self.root == Path::new("/") || !file.starts_with('/') {
            return Ok(self.kubeconfig.parent().unwrap_or(Path::new("")).join(file));
        }
        let refused = || io::Error::new(ErrorKind::InvalidInput, "expected a path without \"..\"");
        HostRoot::new(self.root).reach(&HostPath::new(file).ok_or_else(refused)?)
    }

    /// Returns the base64 of a value that is embedded in `KEY-data`, or of the file that `key` names. Embedded base64 may
    /// contain whitespace.
    fn base64(&self, data: Option<&str>, key: &str, file: &Option<String>) -> Result<Option<String>, Error> {
        match (data.filter(|data| !data.is_empty()), non_empty(file)) {
            (Some(data), _) => Ok(Some(data.split_ascii_whitespace().collect())),
            (None, Some(file)) => Ok(Some(BASE64_STANDARD.encode(self.read(key, file, MAX_FILE)?))),
            (None, None) => Ok(None),
        }
    }
}

/// Returns where a client connects: to the server or its proxy.
pub(super) fn connects_to(config: &Config) -> (String, u16) {
    let url = config.proxy_url.as_ref().unwrap_or(&config.cluster_url);
    let port = url.port_u16().unwrap_or(if url.scheme_str() == Some("https") { 443 } else { 80 });
    (url.host().unwrap_or_default().trim_matches(['[', ']']).to_owned(), port)
}

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

/// Returns `None` for an empty value: kubeconfigs may omit a key or leave it empty.
fn non_empty(text: &Option<String>) -> Option<&str> {
    text.as_deref().filter(|text| !text.is_empty())
}

fn read_error(path: &Path, error: &FileError) -> Error {
    let path = path.display();
    match error {
        FileError::Io(error) if error.kind() == ErrorKind::NotFound => {
            let agents = "the pod of the agent that writes it (detour-agent, or istio-cni's install-cni)";
            let next = format!("check that {agents} runs on this node, or correct kubernetes.kubeconfig");
            Error::new(Code::TryAgain, format!("kubeconfig {path} is not written yet; {next}"))
        }
        FileError::Io(error) => Error::new(Code::Io, format!("kubeconfig {path} can't be read: {error}")),
        refused => Error::new(Code::InvalidConfig, format!("kubeconfig {path} is not used: {refused}")),
    }
}

/// Parses a kubeconfig of one YAML document or none.
fn parse(path: &Path, contents: &[u8]) -> Result<KubeconfigFile, Error> {
    let parse = || {
        let documents = documents(str::from_utf8(contents).map_err(|error| error.to_string())?)?;
        match &documents[..] {
            [] => Ok(KubeconfigFile::default()),
            [document] => typed(document),
            more => Err(format!("expected one YAML document, got {}", more.len())),
        }
    };
    parse().map_err(|cause: String| {
        Error::new(Code::InvalidConfig, format!("invalid kubeconfig {}", path.display())).with_details(cause)
    })
}

/// A service account's bearer token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// The value for the `Authorization` header.
    pub text: String,
    /// The time from which the API server refuses it.
    pub expires: Timestamp,
}

impl Token {
    /// Parses `text` as a token of the service account `name` in `namespace`, whose subject is
    /// `system:serviceaccount:NAMESPACE:NAME`; `None` if it is not one.
    #[must_use]
    pub fn of_account(text: &str, namespace: &str, name: &str) -> Option<Self> {
        let claims = claims(text).filter(|it| it["sub"] == format!("system:serviceaccount:{namespace}:{name}"))?;
        let expires = Timestamp::from_second(expiry(&claims)?).ok()?;
        Some(Self { text: text.to_owned(), expires })
    }
}

/// Returns the claims of a JSON Web Token (RFC 7515, section 7.1); `None` if `token` is not one. The signature is not
/// verified: only the API server can do that.
fn claims(token: &str) -> Option<Value> {
    let [_, claims, _] = token.split('.').collect::<Vec<_>>()[..] else { return None };
    serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?).ok()
}

/// Returns when a token with these claims expires, in seconds since 1970; `None` if it does not expire. The time may have a
/// fraction (RFC 7519); the cast saturates.
fn expiry(claims: &Value) -> Option<i64> {
    claims["exp"].as_f64().map(|seconds| seconds as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_token_is_recognized_by_its_subject() {
        // {"sub":"system:serviceaccount:kube-system:detour-plugin","exp":1800000000,"a":"??>>"}
        let text = "e30.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6a3ViZS1zeXN0ZW06ZGV0b3VyLXBsdWdpbiIsImV4cCI6MTgwMDAwMDAwMC\
                    wiYSI6Ij8_Pj4ifQ.c2ln";
        let token = Token::of_account(text, "kube-system", "detour-plugin").expect("its token");
        assert_eq!((token.text.as_str(), token.expires.as_second()), (text, 1_800_000_000));
        assert_eq!(Token::of_account(text, "kube-system", "detour-agent"), None);
        for other in ["", "first-token", "a.b.c", "a.e30.c"] {
            assert_eq!(Token::of_account(other, "kube-system", "detour-plugin"), None, "{other}");
        }
    }

    #[test]
    fn the_expiry_is_read_from_the_claims() {
        let expiry = |token: &str| claims(token).and_then(|claims| expiry(&claims));
        // {"exp":1893456000,"aud":["??>"]}
        assert_eq!(expiry("e30.eyJleHAiOjE4OTM0NTYwMDAsImF1ZCI6WyI_Pz4iXX0.c2ln"), Some(1_893_456_000));
        for none in ["opaque", "e30.e30.c2ln", "a.b", "e30.%%.c", "e30.eyJleHAiOjF9.c.d"] {
            assert_eq!(expiry(none), None, "{none}");
        }
    }
}
