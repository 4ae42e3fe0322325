//! Kubeconfigs, understood as client-go does (k8s.io/client-go, `tools/clientcmd`): kube's structures, with checks of who
//! may own the files, and without keys that run a program. The environment is ignored, both `KUBECONFIG` and the proxy
//! variables: plugins inherit them from the runtime.

use super::resources::jwt_claims;
use super::response_limit::LimitLayer;
use super::yaml::{documents, typed};
use crate::cni::{Code, Error};
use crate::trusted_file::{self, FileError};
use entries::{TokenLayer, credentials, has_only_usable_certificates, server_config, without_userinfo};
use files::{EntryLocation, MAX_KUBECONFIG, non_empty};
use kube::client::{ClientBuilder, RustlsTlsError};
use kube::config::{AuthInfo, Cluster, Kubeconfig as KubeconfigFile};
use kube::{Client, Config};
use secrecy::ExposeSecret;
use serde::Deserialize;
use serde_json::Value;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

mod entries;
mod files;

/// The connection timeout of a client for watches.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The read timeout of a client for watches: a watch ends after 295 s (kube, `watcher::Config::timeout`).
const READ_TIMEOUT: Duration = Duration::from_secs(300);

/// The client configuration that a kubeconfig's current context selects.
pub(super) struct Kubeconfig<'a> {
    config: Config,
    cluster: EntryLocation<'a>,
    user: EntryLocation<'a>,
    /// The file of the token, if it is replaced while the client lives.
    token_file: Option<PathBuf>,
}

impl<'a> Kubeconfig<'a> {
    /// Reads the kubeconfig at `path` and the CA and token files that it names. Absolute paths in it refer to the file
    /// system that is mounted at `root`.
    ///
    /// # Errors
    /// 11 if the kubeconfig does not exist yet, 5 if it can't be read, 7 if it is invalid or not trusted.
    pub(super) fn load(root: &'a Path, path: &'a Path) -> Result<Self, Error> {
        let Context { cluster, cluster_location, user, user_location } = Context::read(root, path)?;
        let mut config = server_config(&cluster, &cluster_location)?;
        config.auth_info = credentials(&user, &user_location)?;
        // `api::retry` has its own timeouts and retries.
        config.connect_timeout = None;
        config.write_timeout = None;
        config.default_retry = false;
        Ok(Self { config, cluster: cluster_location, user: user_location, token_file: None })
    }

    /// Returns the configuration for `server` with the service account whose files are in `directory`.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(super) fn of_service_account(server: &str, directory: &'a Path) -> Result<Self, Error> {
        let location =
            |entry: &str| EntryLocation { kubeconfig: directory, root: Path::new("/"), entry: entry.to_owned() };
        let file = |name: &str| Some(directory.join(name).display().to_string());
        let entry =
            Cluster { server: Some(server.to_owned()), certificate_authority: file("ca.crt"), ..Cluster::default() };
        let account = AuthInfo { token_file: file("token"), ..AuthInfo::default() };
        let (cluster, user) = (location("ca.crt"), location("token"));
        let mut config = server_config(&entry, &cluster)?;
        config.auth_info = credentials(&account, &user)?;
        config.default_retry = false;
        Ok(Self { config, cluster, user, token_file: None })
    }

    /// Like [`Self::of_service_account`], for a client that lives long: it reads both files again from time to time,
    /// because the kubelet replaces them (like kube's `Config::incluster`).
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(super) fn of_renewed_account(server: &str, directory: &'a Path) -> Result<Self, Error> {
        let mut kubeconfig = Self::of_service_account(server, directory)?;
        let config = &mut kubeconfig.config;
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = Some(READ_TIMEOUT);
        config.reset_reader_on_write = true;
        // kube would accept no file with a certificate that can't be used.
        config.root_cert_file = Some(directory.join("ca.crt")).filter(|file| has_only_usable_certificates(file));
        config.auth_info = AuthInfo::default();
        kubeconfig.token_file = Some(directory.join("token"));
        Ok(kubeconfig)
    }

    /// Returns the API server's address for messages, without a slash at its end.
    pub(super) fn server(&self) -> String {
        server_address(&self.config)
    }

    /// Returns where the client connects.
    pub(super) fn address(&self) -> (String, u16) {
        connect_address(&self.config)
    }

    /// Returns a client, which connects with its first request. Call it inside a Tokio runtime.
    ///
    /// # Errors
    /// 7 if a certificate, a key or a name can't be used.
    pub(super) fn client(self) -> Result<Client, Error> {
        let Self { config, cluster, user, token_file } = self;
        limited_client(config, token_file).map_err(|error| {
            use RustlsTlsError::{AddRootCertificate, InvalidServerName, NoValidNativeRootCA};
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
}

/// Returns kube's client with a limit for the size of responses. Call it inside a Tokio runtime.
fn limited_client(config: Config, token_file: Option<PathBuf>) -> Result<Client, kube::Error> {
    let builder = ClientBuilder::try_from(config)?.with_layer(&LimitLayer);
    Ok(match token_file {
        None => builder.build(),
        Some(file) => builder.with_layer(&TokenLayer::new(file)).build(),
    })
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

/// The kind of a client's credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialsSummary {
    /// `token`.
    Token,
    /// `tokenFile`.
    TokenFile(PathBuf),
    /// `client-certificate(-data)`.
    Certificate,
    /// None: requests are anonymous.
    Nothing,
}

/// What the doctor and the installer need to know about a kubeconfig's current context. It contains no secret except
/// the token, so that output can be checked for it.
pub struct KubeconfigSummary {
    /// The API server's address, without a slash at its end.
    pub server: String,
    /// How the server's certificate is verified.
    pub authority: Authority,
    /// The kind of the credentials.
    pub credentials: CredentialsSummary,
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
        let context = Context::read(root, path)?;
        let server = server_address(&server_config(&context.cluster, &context.cluster_location)?);
        let user = credentials(&context.user, &context.user_location)?;
        let token = user.token.as_ref().map(|token| token.expose_secret().to_owned());
        let credentials = match (&token, non_empty(&context.user.token_file)) {
            (Some(_), Some(file)) => CredentialsSummary::TokenFile(file.into()),
            (Some(_), None) => CredentialsSummary::Token,
            (None, _) if user.client_certificate_data.is_some() => CredentialsSummary::Certificate,
            (None, _) => CredentialsSummary::Nothing,
        };
        let expires = token.as_deref().and_then(expiry);
        Ok(Self { server, authority: context.authority(), credentials, token, expires })
    }

    /// Returns the warning about a server that is not authenticated.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let is_insecure = matches!(self.authority, Authority::Insecure);
        is_insecure
            .then(|| format!("{}: insecure-skip-tls-verify is true: the server is not authenticated", self.server))
    }
}

/// Returns where a client connects: to the API server or its proxy.
pub(super) fn connect_address(config: &Config) -> (String, u16) {
    let url = config.proxy_url.as_ref().unwrap_or(&config.cluster_url);
    let port = match url.scheme_str() {
        Some("https") => 443,
        Some("socks5") => 1080,
        _ => 80,
    };
    (url.host().unwrap_or_default().trim_matches(['[', ']']).to_owned(), url.port_u16().unwrap_or(port))
}

/// Returns the address of an API server for messages, without credentials and without a slash at its end.
pub(super) fn server_address(config: &Config) -> String {
    without_userinfo(config.cluster_url.to_string().trim_end_matches('/'))
}

/// The cluster and the user of a kubeconfig's current context. A context without a user is valid: its requests are
/// anonymous.
struct Context<'a> {
    cluster: Cluster,
    cluster_location: EntryLocation<'a>,
    user: AuthInfo,
    user_location: EntryLocation<'a>,
}

impl<'a> Context<'a> {
    fn read(root: &'a Path, path: &'a Path) -> Result<Self, Error> {
        let contents = trusted_file::read_trusted(path, MAX_KUBECONFIG).map_err(|error| read_error(path, &error))?;
        let file = parse_one(path, &contents)?;
        let location = |entry: String| EntryLocation { kubeconfig: path, root, entry };

        let contexts = file.contexts.into_iter().map(|context| (context.name, context.context));
        let name = file.current_context.unwrap_or_default();
        let context = find("context", &name, contexts.collect());
        let context = context.map_err(|what| location(String::new()).error("current-context", what))?;
        let context_location = location(format!("contexts[{name}].context"));

        let clusters = file.clusters.into_iter().map(|cluster| (cluster.name, cluster.cluster));
        let cluster = find("cluster", &context.cluster, clusters.collect());
        let cluster = cluster.map_err(|what| context_location.error("cluster", what))?;
        let cluster_location = location(format!("clusters[{}].cluster", context.cluster));

        let name = context.user.unwrap_or_default();
        let user_location = location(format!("users[{name}].user"));
        let user = if name.is_empty() {
            AuthInfo::default()
        } else {
            let users = file.auth_infos.into_iter().map(|user| (user.name, user.auth_info));
            find("user", &name, users.collect()).map_err(|what| context_location.error("user", what))?
        };
        Ok(Self { cluster, cluster_location, user, user_location })
    }

    /// Returns how the server's certificate is verified.
    fn authority(&self) -> Authority {
        if self.cluster.insecure_skip_tls_verify == Some(true) {
            Authority::Insecure
        } else if non_empty(&self.cluster.certificate_authority_data).is_some() {
            Authority::Embedded
        } else {
            let file = non_empty(&self.cluster.certificate_authority);
            file.map_or(Authority::System, |file| Authority::File(file.into()))
        }
    }
}

fn read_error(path: &Path, error: &FileError) -> Error {
    let path = path.display();
    match error {
        FileError::Io(error) if error.kind() == ErrorKind::NotFound => {
            let msg = format!(
                "kubeconfig {path} is not written yet; check that the pod of the agent that writes it (detour-agent, \
                 or istio-cni's install-cni) runs on this node, or correct kubernetes.kubeconfig"
            );
            Error::new(Code::TryAgain, msg)
        }
        FileError::Io(error) => {
            Error::new(Code::Io, format!("kubeconfig {path} can't be read")).with_details(error.to_string())
        }
        refused => Error::new(Code::InvalidConfig, format!("kubeconfig {path} is not used: {refused}")),
    }
}

/// Parses a kubeconfig of one YAML document or none.
fn parse_one(path: &Path, contents: &[u8]) -> Result<KubeconfigFile, Error> {
    let invalid = |cause: String| {
        Error::new(Code::InvalidConfig, format!("invalid kubeconfig {}", path.display())).with_details(cause)
    };
    let text = str::from_utf8(contents).map_err(|error| invalid(error.to_string()))?;
    let mut parsed = parse(text, |_| {}).map_err(&invalid)?;
    if parsed.len() > 1 {
        return Err(invalid(format!("expected one YAML document, got {}", parsed.len())));
    }
    Ok(parsed.pop().unwrap_or_default())
}

/// Parses each YAML document of a text, which `change` may change before.
fn parse(text: &str, change: impl Fn(&mut Value)) -> Result<Vec<KubeconfigFile>, String> {
    let mut documents = documents(text)?;
    documents.iter_mut().for_each(change);
    documents.iter().map(typed).collect()
}

/// Returns the entry called `name`; the error has the names of all entries.
fn find<T: Default>(kind: &str, name: &str, mut entries: Vec<(String, Option<T>)>) -> Result<T, String> {
    if let Some(index) = entries.iter().position(|(found, _)| found == name && !name.is_empty()) {
        return Ok(entries.swap_remove(index).1.unwrap_or_default());
    }
    let fault = if name.is_empty() { "missing".to_owned() } else { format!("unknown {kind} {name:?}") };
    if entries.is_empty() {
        return Err(format!("{fault}; the kubeconfig has no {kind}s"));
    }
    let names = entries.into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(", ");
    Err(format!("{fault}; expected one of: {names}"))
}

#[derive(Deserialize)]
struct ExpiryClaim {
    exp: Option<f64>,
}

/// Returns the claim `exp` of a JSON Web Token (RFC 7519, section 4.1.4), in seconds since 1970; `None` if the token
/// is opaque or does not expire.
fn expiry(token: &str) -> Option<i64> {
    let claims: ExpiryClaim = jwt_claims(token)?;
    // The number may have a fraction; the cast saturates.
    claims.exp.map(|seconds| seconds as i64)
}

#[cfg(test)]
mod tests {
    use super::expiry;

    #[test]
    fn the_expiry_is_read_from_the_claims() {
        // {"exp":1893456000,"aud":["??>"]}
        assert_eq!(expiry("e30.eyJleHAiOjE4OTM0NTYwMDAsImF1ZCI6WyI_Pz4iXX0.c2ln"), Some(1_893_456_000));
        for none in ["opaque", "e30.e30.c2ln", "a.b", "e30.%%.c", "e30.eyJleHAiOjF9.c.d"] {
            assert_eq!(expiry(none), None, "{none}");
        }
    }
}
