//! Kubeconfigs, understood as client-go does (k8s.io/client-go, `tools/clientcmd`), except for keys that run a program.
//! The environment is ignored, both `KUBECONFIG` and the proxy variables: plugins inherit them from the runtime.

use super::http_client::{self, ClientError};
use super::wire::null_is_empty;
use super::yaml::{documents, typed};
use crate::cni::{Code, Error};
use crate::trusted_file::FileError;
pub use cluster_entry::Authority;
use cluster_entry::{ClusterEntry, without_userinfo};
pub(super) use files::KubeconfigOwner;
use files::{AllowedFiles, EntryLocation};
use kube::config::AuthInfo;
use kube::{Client, Config};
use serde::Deserialize;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;
pub use user_entry::CredentialsSummary;
use user_entry::UserEntry;

mod cluster_entry;
mod files;
mod user_entry;

/// The connection timeout of a client for watches.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The read timeout of a client for watches: a watch ends after 295 s (kube, `watcher::Config::timeout`).
const READ_TIMEOUT: Duration = Duration::from_secs(300);

/// The client configuration that a kubeconfig's current context selects.
pub(super) struct Kubeconfig<'a> {
    config: Config,
    cluster: EntryLocation<'a>,
    user: EntryLocation<'a>,
}

impl<'a> Kubeconfig<'a> {
    /// Reads the kubeconfig at `path` and the CA and token files that it names. Absolute paths in it refer to the file
    /// system that is mounted at `root`; `owner` decides which files are accepted.
    ///
    /// # Errors
    /// 11 if the kubeconfig does not exist yet, 5 if it can't be read, 7 if it is invalid or not trusted.
    pub(super) fn load(root: &'a Path, path: &'a Path, owner: KubeconfigOwner) -> Result<Self, Error> {
        let Context { cluster, cluster_location, user, user_location } = Context::read(root, path, owner)?;
        let mut config = cluster.config(&cluster_location)?;
        config.auth_info = user.credentials(&user_location)?;
        // `api::retry` has its own timeouts and retries.
        config.connect_timeout = None;
        config.write_timeout = None;
        config.default_retry = false;
        Ok(Self { config, cluster: cluster_location, user: user_location })
    }

    /// Returns the configuration for `server` with the service account whose files are in `directory`.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(super) fn of_service_account(server: &str, directory: &'a Path) -> Result<Self, Error> {
        let location = |entry: &str| EntryLocation {
            kubeconfig: directory,
            root: Path::new("/"),
            files: AllowedFiles::Trusted,
            entry: entry.to_owned(),
        };
        let (cluster, user) = (location("ca.crt"), location("token"));
        let mut config = ClusterEntry::with_authority(server, &directory.join("ca.crt")).config(&cluster)?;
        config.auth_info = UserEntry::with_token_file(&directory.join("token")).credentials(&user)?;
        config.default_retry = false;
        Ok(Self { config, cluster, user })
    }

    /// Like [`Self::of_service_account`], for a client that lives long: it reads both files again from time to time,
    /// because the kubelet replaces them (like kube's `Config::incluster`).
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(super) fn of_renewed_account(server: &str, directory: &'a Path) -> Result<Self, Error> {
        let mut kubeconfig = Self::of_service_account(server, directory)?;
        let token = directory.join("token").display().to_string();
        let config = &mut kubeconfig.config;
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = Some(READ_TIMEOUT);
        config.reset_reader_on_write = true;
        config.root_cert_file = Some(directory.join("ca.crt"));
        config.auth_info = AuthInfo { token_file: Some(token), ..AuthInfo::default() };
        Ok(kubeconfig)
    }

    /// Returns the API server's address for messages, without a slash at its end.
    pub(super) fn server(&self) -> String {
        server_address(&self.config)
    }

    /// Returns a client, which connects with its first request. Call it inside a Tokio runtime.
    ///
    /// # Errors
    /// 7 if a certificate, a key or a name can't be used.
    pub(super) fn client(self) -> Result<Client, Error> {
        let Self { config, cluster, user } = self;
        http_client::client(&config).map_err(|error| {
            let (location, key, cause) = match error {
                ClientError::Authority(cause) => (cluster, "certificate-authority(-data)", cause),
                ClientError::ServerName(cause) => (cluster, "tls-server-name", cause),
                ClientError::Certificate(cause) => (user, "client-certificate(-data)", cause),
                ClientError::Key(cause) => (user, "client-key(-data)", cause),
                ClientError::Credentials(cause) => (user, "client-certificate(-data) and client-key(-data)", cause),
            };
            location.error(key, "invalid value").with_details(cause)
        })
    }
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
        let context = Context::read(root, path, KubeconfigOwner::Node)?;
        let server = server_address(&context.cluster.config(&context.cluster_location)?);
        let (credentials, token) = context.user.summary(&context.user_location)?;
        let expires = token.as_deref().and_then(user_entry::expiry);
        Ok(Self { server, authority: context.cluster.authority(), credentials, token, expires })
    }
}

/// Returns the address of an API server for messages, without credentials and without a slash at its end.
pub(super) fn server_address(config: &Config) -> String {
    without_userinfo(config.cluster_url.to_string().trim_end_matches('/'))
}

#[derive(Default, Deserialize)]
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

/// The cluster and the user of a kubeconfig's current context. A context without a user is valid: its requests are
/// anonymous.
struct Context<'a> {
    cluster: ClusterEntry,
    cluster_location: EntryLocation<'a>,
    user: UserEntry,
    user_location: EntryLocation<'a>,
}

impl<'a> Context<'a> {
    fn read(root: &'a Path, path: &'a Path, owner: KubeconfigOwner) -> Result<Self, Error> {
        let (contents, files) = owner.read(path).map_err(|error| read_error(path, &error))?;
        let mut file = parse(path, &contents)?;
        let location = |entry: String| EntryLocation { kubeconfig: path, root, files, entry };

        let NamedContext { name, context } = find("context", &file.current_context, &mut file.contexts, |c| &c.name)
            .map_err(|what| location(String::new()).error("current-context", what))?;
        let context_location = location(format!("contexts[{name}].context"));

        let NamedCluster { name, cluster } = find("cluster", &context.cluster, &mut file.clusters, |c| &c.name)
            .map_err(|what| context_location.error("cluster", what))?;
        let cluster_location = location(format!("clusters[{name}].cluster"));

        let user_location = location(format!("users[{}].user", context.user));
        let user = if context.user.is_empty() {
            UserEntry::default()
        } else {
            let found = find("user", &context.user, &mut file.users, |u| &u.name);
            found.map_err(|what| context_location.error("user", what))?.user
        };
        Ok(Self { cluster, cluster_location, user, user_location })
    }
}

fn read_error(path: &Path, error: &FileError) -> Error {
    let path = path.display();
    match error {
        FileError::Io(error) if error.kind() == ErrorKind::NotFound => Error::new(
            Code::TryAgain,
            format!(
                "kubeconfig {path} is not written yet; check that the pod of the agent that writes it (detour-agent, \
                 or istio-cni's install-cni) runs on this node, or correct kubernetes.kubeconfig"
            ),
        ),
        FileError::Io(error) => {
            Error::new(Code::Io, format!("kubeconfig {path} can't be read")).with_details(error.to_string())
        }
        refused => Error::new(Code::InvalidConfig, format!("kubeconfig {path} is not used: {refused}")),
    }
}

fn parse(path: &Path, contents: &[u8]) -> Result<KubeconfigFile, Error> {
    let invalid = |cause: String| {
        Error::new(Code::InvalidConfig, format!("invalid kubeconfig {}", path.display())).with_details(cause)
    };
    let text = str::from_utf8(contents).map_err(|error| invalid(error.to_string()))?;
    match documents(text).map_err(&invalid)?.as_slice() {
        [] => Ok(KubeconfigFile::default()),
        [document] => typed(document).map_err(&invalid),
        more => Err(invalid(format!("expected one YAML document, got {}", more.len()))),
    }
}

/// Removes the entry called `name` from `entries`; the error names the entries that exist.
fn find<T>(kind: &str, name: &str, entries: &mut Vec<T>, name_of: impl Fn(&T) -> &String) -> Result<T, String> {
    let found = entries.iter().position(|entry| name_of(entry) == name && !name.is_empty());
    found.map(|index| entries.swap_remove(index)).ok_or_else(|| {
        let names = entries.iter().map(|entry| name_of(entry).as_str()).collect::<Vec<_>>().join(", ");
        let fault = if name.is_empty() { "missing".to_owned() } else { format!("unknown {kind} {name:?}") };
        if entries.is_empty() {
            format!("{fault}; the kubeconfig has no {kind}s")
        } else {
            format!("{fault}; expected one of: {names}")
        }
    })
}
