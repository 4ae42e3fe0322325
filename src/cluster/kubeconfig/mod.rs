//! A kubeconfig: where the API is and who asks. Understood as client-go understands it
//! (k8s.io/client-go, `tools/clientcmd`), less what would run a program. Nothing of the environment
//! counts: neither `KUBECONFIG` nor the proxy variables, which runtimes hand down to plugins.
//!
//! What a kubeconfig says, for people and for checks: without its secrets, but for the token, which
//! must be known to be kept out of what is shown.

use super::body;
use super::wire::null_is_empty;
use crate::cni::{Code, Error};
use crate::trusted_file;
use credentials::{TOKEN, UserEntry};
use endpoint::Files;
use endpoint::KeyPath;
pub(super) use endpoint::KubeconfigOwner;
use endpoint::{ClusterEntry, without_userinfo};
use kube::client::RustlsTlsError;
use kube::config::{AuthInfo, KubeconfigError};
use kube::{Client, Config};
pub(super) use pem::base64;
use serde::Deserialize;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

mod credentials;
mod endpoint;
mod pem;

/// How long a client that stays waits for a connection.
pub(super) const CONNECT: Duration = Duration::from_secs(5);

/// What a kubeconfig's current context says.
pub(super) struct Kubeconfig<'a> {
    config: Config,
    cluster: KeyPath<'a>,
    user: KeyPath<'a>,
}

#[derive(Deserialize)]
struct KubeconfigFile {
    #[serde(rename = "current-context", default, deserialize_with = "null_is_empty")]
    current_context: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    contexts: Vec<NamedContext>,
    #[serde(default, deserialize_with = "null_is_empty")]
    clusters: Vec<NamedCluster>,
    #[serde(default, deserialize_with = "null_is_empty")]
    users: Vec<NamedUser>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    context: ContextEntry,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ContextEntry {
    #[serde(deserialize_with = "null_is_empty")]
    cluster: String,
    #[serde(deserialize_with = "null_is_empty")]
    user: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    cluster: ClusterEntry,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    user: UserEntry,
}

impl<'a> Kubeconfig<'a> {
    /// Reads the file at `path`, and the files of authorities and tokens that it names; absolute paths
    /// in it are those of the file system mounted at `root`. `access` states which files are accepted.
    ///
    /// # Errors
    /// 11 where there is no such file yet, 5 where it can't be read, 7 where it is wrong or not trusted.
    pub(super) fn load(root: &'a Path, path: &'a Path, access: KubeconfigOwner) -> Result<Self, Error> {
        let (cluster, of_cluster, user, of_user) = current(root, path, access)?;
        let mut config = cluster.config(&of_cluster)?;
        config.auth_info = user.credentials(&of_user)?;
        // Time limits and retries are the caller's.
        config.connect_timeout = None;
        config.write_timeout = None;
        config.default_retry = false;
        Ok(Self { config, cluster: of_cluster, user: of_user })
    }

    /// What a service account's files in `account` say of whoever asks `server`.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(super) fn of_service_account(server: &str, account: &'a Path) -> Result<Self, Error> {
        let entry = |place: &str| KeyPath {
            kubeconfig: account,
            root: Path::new("/"),
            files: Files::Trusted,
            place: place.to_owned(),
        };
        let (of_cluster, of_user) = (entry("ca.crt"), entry("token"));
        let mut config = ClusterEntry::with_authority(server, &account.join("ca.crt")).config(&of_cluster)?;
        config.auth_info = UserEntry::with_token_file(&account.join("token")).credentials(&of_user)?;
        config.default_retry = false;
        Ok(Self { config, cluster: of_cluster, user: of_user })
    }

    /// The same for a client that stays: both files are read again from time to time, for the kubelet
    /// replaces them (kube, `Config::incluster` does the same).
    ///
    /// # Errors
    /// As [`Self::load`]; 7 where the token's file holds more than the token, which kube would send as well.
    pub(super) fn of_renewed_account(server: &str, account: &'a Path) -> Result<Self, Error> {
        /// No answer takes longer: a watch ends after 295 s (kube, `watcher::Config::timeout`).
        const READ: Duration = Duration::from_secs(300);
        let mut read = Self::of_service_account(server, account)?;
        let token = account.join("token").display().to_string();
        if read.user.read("tokenFile", &token, TOKEN)?.ends_with(|c: char| c.is_ascii_whitespace()) {
            return Err(read
                .user
                .wrong("tokenFile", format!("{token} ends with a blank or a new line: write the token alone")));
        }
        read.config.connect_timeout = Some(CONNECT);
        read.config.read_timeout = Some(READ);
        read.config.reset_reader_on_write = true;
        read.config.root_cert_file = Some(account.join("ca.crt"));
        read.config.auth_info = AuthInfo { token_file: Some(token), ..AuthInfo::default() };
        Ok(read)
    }

    /// The API server's address for messages, without a slash at its end.
    pub(super) fn server(&self) -> String {
        shown(&self.config)
    }

    /// A client, which connects when it is first used. Needs a runtime around it.
    ///
    /// # Errors
    /// 7 where a certificate, a key or a name can't be used.
    pub(super) fn client(self) -> Result<Client, Error> {
        let Self { config, cluster, user } = self;
        body::client(config).map_err(|error| {
            let (entry, key) = match &error {
                kube::Error::RustlsTls(RustlsTlsError::AddRootCertificate(_)) => {
                    (cluster, "certificate-authority(-data)")
                }
                kube::Error::RustlsTls(RustlsTlsError::InvalidServerName(_)) => (cluster, "tls-server-name"),
                kube::Error::InferKubeconfig(KubeconfigError::LoadClientCertificate(_)) => {
                    (user, "client-certificate(-data)")
                }
                kube::Error::InferKubeconfig(KubeconfigError::LoadClientKey(_)) => (user, "client-key(-data)"),
                _ => (user, "client-certificate(-data) and client-key(-data)"),
            };
            let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            entry.wrong(key, "can't be used").with_details(cause)
        })
    }
}

/// The API server's address for messages, without a slash at its end.
fn shown(config: &Config) -> String {
    without_userinfo(config.cluster_url.to_string().trim_end_matches('/'))
}

/// Cluster and user of the current context, each with where it stands. Without a user, which is fine,
/// whoever asks is anonymous.
fn current<'a>(
    root: &'a Path,
    path: &'a Path,
    access: KubeconfigOwner,
) -> Result<(ClusterEntry, KeyPath<'a>, UserEntry, KeyPath<'a>), Error> {
    let (contents, files) = access.read(path).map_err(|error| unread(path, &error))?;
    let text = str::from_utf8(&contents);
    let text = text.map_err(|_| Error::new(Code::InvalidConfig, format!("kubeconfig {} is not text", path.display())));
    let mut file = parse(path, text?)?;
    let entry = |place: String| KeyPath { kubeconfig: path, root, files, place };

    let NamedContext { name, context } = find("context", &file.current_context, &mut file.contexts, |c| &c.name)
        .map_err(|what| entry(String::new()).wrong("current-context", what))?;
    let place = entry(format!("contexts[{name}].context"));

    let NamedCluster { name, cluster } = find("cluster", &context.cluster, &mut file.clusters, |c| &c.name)
        .map_err(|what| place.wrong("cluster", what))?;
    let of_cluster = entry(format!("clusters[{name}].cluster"));

    let of_user = entry(format!("users[{}].user", context.user));
    let user = if context.user.is_empty() {
        UserEntry::default()
    } else {
        let found = find("user", &context.user, &mut file.users, |u| &u.name);
        found.map_err(|what| place.wrong("user", what))?.user
    };
    Ok((cluster, of_cluster, user, of_user))
}

fn unread(path: &Path, error: &trusted_file::FileError) -> Error {
    let path = path.display();
    match error {
        trusted_file::FileError::Io(error) if error.kind() == ErrorKind::NotFound => Error::new(
            Code::TryAgain,
            format!(
                "kubeconfig {path} is not written yet: the node agent (detour's, or istio-cni's install-cni) writes \
                 it; see whether its pod runs on this node, or correct kubernetes.kubeconfig"
            ),
        ),
        trusted_file::FileError::Io(error) => {
            Error::new(Code::Io, format!("kubeconfig {path} can't be read")).with_details(error.to_string())
        }
        refused => Error::new(Code::InvalidConfig, format!("kubeconfig {path} is not used: {refused}")),
    }
}

fn parse(path: &Path, text: &str) -> Result<KubeconfigFile, Error> {
    // JSON is YAML too, but read as what it is it saves a tenth of a millisecond a call.
    if let Some(file) = text.starts_with('{').then(|| serde_json::from_str(text).ok()).flatten() {
        return Ok(file);
    }
    // Without a snippet: there are secrets in the text.
    let options = serde_saphyr::options! { with_snippet: false };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        Error::new(Code::InvalidConfig, format!("kubeconfig {} is not one", path.display()))
            .with_details(error.to_string())
    })
}

/// The `what` of `all` that has the name `wanted`, or what is wrong with it.
fn find<T>(what: &str, wanted: &str, all: &mut Vec<T>, name: impl Fn(&T) -> &String) -> Result<T, String> {
    let found = all.iter().position(|one| name(one) == wanted && !wanted.is_empty());
    found.map(|index| all.swap_remove(index)).ok_or_else(|| {
        let accepted = all.iter().map(|one| name(one).as_str()).collect::<Vec<_>>().join(", ");
        let fault = if wanted.is_empty() { "is missing".to_owned() } else { format!("there is no {what} {wanted:?}") };
        if all.is_empty() {
            format!("{fault}; there is no {what} at all")
        } else {
            format!("{fault}; accepted: {accepted}")
        }
    })
}

/// What a kubeconfig's current context says.
pub struct KubeconfigSummary {
    /// The API server's address, without a slash at its end.
    pub server: String,
    /// How it is known to be the right one.
    pub authority: Authority,
    /// Who asks.
    pub credentials: CredentialsSummary,
    /// The token that is sent, from wherever it comes.
    pub token: Option<String>,
    /// Until when the token is valid, in seconds since 1970, where it says so: a service account's does.
    pub expires: Option<i64>,
}

/// By what a server's certificate is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authority {
    /// `certificate-authority-data`.
    Embedded,
    /// `certificate-authority`.
    File(PathBuf),
    /// Nothing is said: the system's authorities.
    System,
    /// `insecure-skip-tls-verify`.
    Nobody,
}

/// How whoever asks shows who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialsSummary {
    /// `token`.
    Token,
    /// `tokenFile`.
    TokenFile(PathBuf),
    /// `client-certificate(-data)`.
    Certificate,
    /// It doesn't.
    Nothing,
}

impl KubeconfigSummary {
    /// Reads the kubeconfig at `path`, as this process sees it, and the files that it names; absolute
    /// paths in it are those of the file system mounted at `root`.
    ///
    /// # Errors
    /// 11 where there is no such file yet, 5 where it can't be read, 7 where it is wrong or not trusted.
    pub fn read(root: &Path, path: &Path) -> Result<Self, Error> {
        let (cluster, of_cluster, user, of_user) = current(root, path, KubeconfigOwner::Node)?;
        let server = shown(&cluster.config(&of_cluster)?);
        let (credentials, token) = user.kind(&of_user)?;
        let expires = token.as_deref().and_then(credentials::expiry);
        Ok(Self { server, authority: cluster.authority(), credentials, token, expires })
    }
}
