//! A kubeconfig: where the API is and who asks. Understood as client-go understands it
//! (k8s.io/client-go, `tools/clientcmd`), less what would run a program.

use super::pem;
use super::wire::null_is_empty;
use crate::cni::{Code, Error};
use kube::Config;
use kube::client::RustlsTlsError;
use kube::config::{AuthInfo, KubeconfigError};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::fmt::Display;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

/// Which credentials a user may have.
const CREDENTIALS: &str = "token, tokenFile, client-certificate(-data) together with client-key(-data)";

#[derive(Deserialize)]
struct File {
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
    context: Context,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Context {
    #[serde(deserialize_with = "null_is_empty")]
    cluster: String,
    #[serde(deserialize_with = "null_is_empty")]
    user: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    cluster: Cluster,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Cluster {
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

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    #[serde(default, deserialize_with = "null_is_empty")]
    user: User,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct User {
    #[serde(deserialize_with = "null_is_empty")]
    token: String,
    #[serde(rename = "tokenFile", deserialize_with = "null_is_empty")]
    token_file: String,
    #[serde(deserialize_with = "null_is_empty")]
    client_certificate: String,
    #[serde(deserialize_with = "null_is_empty")]
    client_certificate_data: String,
    #[serde(deserialize_with = "null_is_empty")]
    client_key: String,
    #[serde(deserialize_with = "null_is_empty")]
    client_key_data: String,
    exec: Option<IgnoredAny>,
    auth_provider: Option<IgnoredAny>,
    username: Option<IgnoredAny>,
    password: Option<IgnoredAny>,
    r#as: Option<IgnoredAny>,
    as_uid: Option<IgnoredAny>,
    as_groups: Option<IgnoredAny>,
    as_user_extra: Option<IgnoredAny>,
}

/// What the kubeconfig at `path` says, ready for a client. Nothing of the environment counts:
/// neither `KUBECONFIG` nor the proxy variables, which runtimes pass on to plugins.
///
/// # Errors
/// 11 where there is no such file yet, 5 where it can't be read, 7 where it is wrong.
pub(super) fn load(path: &Path) -> Result<Config, Error> {
    let text = fs::read_to_string(path).map_err(|error| unread(path, &error))?;
    Reading { path }.config(&text)
}

fn unread(path: &Path, error: &io::Error) -> Error {
    let path = path.display();
    match error.kind() {
        ErrorKind::NotFound => Error::new(
            Code::TryAgain,
            format!(
                "kubeconfig {path} is not written yet: the node agent (detour's, or istio-cni's install-cni) writes \
                 it; see whether its pod runs on this node, or correct kubernetes.kubeconfig"
            ),
        ),
        ErrorKind::InvalidData => Error::new(Code::InvalidConfig, format!("kubeconfig {path} is not text")),
        _ => Error::new(Code::Io, format!("kubeconfig {path} can't be read")).with_details(error.to_string()),
    }
}

/// The error for a kubeconfig that was understood and that no client can be made of: a key or a
/// certificate in it is of no use.
pub(super) fn unusable(path: &Path, error: &kube::Error) -> Error {
    let key = match error {
        kube::Error::InferKubeconfig(KubeconfigError::LoadClientKey(_)) => "client-key(-data)",
        kube::Error::InferKubeconfig(KubeconfigError::LoadClientCertificate(_)) => "client-certificate(-data)",
        kube::Error::RustlsTls(RustlsTlsError::AddRootCertificate(_)) => "certificate-authority(-data)",
        kube::Error::RustlsTls(RustlsTlsError::InvalidServerName(_)) => "tls-server-name",
        _ => "client-certificate(-data), client-key(-data)",
    };
    Reading { path }.wrong(key, "can't be used; accepted: PEM that belongs together").with_details(error.to_string())
}

/// A kubeconfig that is being read.
#[derive(Clone, Copy)]
struct Reading<'a> {
    path: &'a Path,
}

impl Reading<'_> {
    fn wrong(self, key: impl Display, what: impl Display) -> Error {
        Error::new(Code::InvalidConfig, format!("kubeconfig {}: {key}: {what}", self.path.display()))
    }

    fn parse(self, text: &str) -> Result<File, Error> {
        if let Some(file) = text.starts_with('{').then(|| serde_json::from_str(text).ok()).flatten() {
            return Ok(file);
        }
        // Without a snippet: there are secrets in the text.
        let options = serde_saphyr::options! { with_snippet: false };
        serde_saphyr::from_str_with_options(text, options).map_err(|error| {
            Error::new(Code::InvalidConfig, format!("kubeconfig {} is not one", self.path.display()))
                .with_details(error.to_string())
        })
    }

    fn config(self, text: &str) -> Result<Config, Error> {
        let file = self.parse(text)?;
        let context = find("current-context", &file.current_context, &file.contexts, |c| &c.name);
        let context = context.map_err(|what| self.wrong("current-context", what))?;
        let place = format!("contexts[{}].context", context.name);
        let cluster = find("cluster", &context.context.cluster, &file.clusters, |c| &c.name);
        let cluster = cluster.map_err(|what| self.wrong(format!("{place}.cluster"), what))?;

        let mut config = self.server(cluster)?;
        if !context.context.user.is_empty() {
            let user = find("user", &context.context.user, &file.users, |u| &u.name);
            config.auth_info = self.credentials(user.map_err(|what| self.wrong(format!("{place}.user"), what))?)?;
        }
        // Time limits and retries are the caller's.
        config.connect_timeout = None;
        config.write_timeout = None;
        config.default_retry = false;
        Ok(config)
    }

    fn server(self, NamedCluster { name, cluster }: &NamedCluster) -> Result<Config, Error> {
        let key = |key: &str| format!("clusters[{name}].cluster.{key}");
        let accepted = "accepted: https://HOST:PORT or http://HOST:PORT";
        let refused = || self.wrong(key("server"), format!("{:?} is not accepted; {accepted}", cluster.server));
        let mut config = Config::new(cluster.server.parse().map_err(|_| refused())?);
        let scheme = config.cluster_url.scheme_str();
        if !matches!(scheme, Some("http" | "https")) || config.cluster_url.host().is_none_or(str::is_empty) {
            return Err(refused());
        }
        config.root_cert = self.authorities(&key, cluster)?;
        // An empty set rather than none, for which the system's would be read, 150 files, in vain.
        if cluster.insecure_skip_tls_verify || scheme == Some("http") {
            config.root_cert.get_or_insert_default();
        }
        config.accept_invalid_certs = cluster.insecure_skip_tls_verify;
        config.tls_server_name = present(&cluster.tls_server_name).map(Into::into);
        if let Some(url) = present(&cluster.proxy_url) {
            let accepted = "accepted: http://HOST:PORT or https://HOST:PORT";
            let refused = || self.wrong(key("proxy-url"), format!("{url:?} is not accepted; {accepted}"));
            config.proxy_url = Some(url.parse().map_err(|_| refused())?);
            let scheme = config.proxy_url.as_ref().and_then(|url| url.scheme_str());
            if !matches!(scheme, Some("http" | "https")) {
                return Err(refused());
            }
        }
        Ok(config)
    }

    /// The DER of the authorities that are trusted; `None` for the system's.
    fn authorities(self, key: &impl Fn(&str) -> String, cluster: &Cluster) -> Result<Option<Vec<Vec<u8>>>, Error> {
        let (key, pem) = if let Some(data) = present(&cluster.certificate_authority_data) {
            let key = key("certificate-authority-data");
            let pem = pem::base64(data).map_err(|e| self.wrong(&key, "is not base64").with_details(e.to_string()))?;
            (key, String::from_utf8_lossy(&pem).into_owned())
        } else if let Some(file) = present(&cluster.certificate_authority) {
            let key = key("certificate-authority");
            let pem = self.read(&key, file)?;
            (key, pem)
        } else {
            return Ok(None);
        };
        if cluster.insecure_skip_tls_verify {
            return Err(self.wrong(key, "contradicts insecure-skip-tls-verify: true; leave one of the two out"));
        }
        let ders = pem::certificates(&pem).map_err(|e| self.wrong(&key, "is not PEM").with_details(e.to_string()))?;
        if ders.is_empty() { Err(self.wrong(key, "holds no PEM certificate")) } else { Ok(Some(ders)) }
    }

    fn credentials(self, NamedUser { name, user }: &NamedUser) -> Result<AuthInfo, Error> {
        let key = |key: &str| format!("users[{name}].user.{key}");
        if let Some(refused) = user.unsupported() {
            return Err(self.wrong(key(refused), format!("is not supported by a plugin; accepted: {CREDENTIALS}")));
        }
        let mut info = AuthInfo::default();
        let token = match (present(&user.token), present(&user.token_file)) {
            (None, None) => None,
            (Some(token), None) => Some((key("token"), token.to_owned())),
            // The file wins while it can be read (client-go, `transport.NewBearerAuthWithRefreshRoundTripper`).
            (token, Some(file)) => match (self.read(&key("tokenFile"), file), token) {
                (Ok(text), _) => Some((key("tokenFile"), text)),
                (Err(_), Some(token)) => Some((key("token"), token.to_owned())),
                (Err(error), None) => return Err(error),
            },
        };
        if let Some((key, token)) = token {
            let token = token.trim();
            if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
                return Err(self.wrong(key, "is not a token; accepted: visible ASCII characters"));
            }
            info.token = Some(token.to_owned().into());
        }
        info.client_certificate_data = present(&user.client_certificate_data).map(without_blanks);
        info.client_key_data = present(&user.client_key_data).map(|data| without_blanks(data).into());
        info.client_certificate = present(&user.client_certificate).map(|file| self.near(file));
        info.client_key = present(&user.client_key).map(|file| self.near(file));
        let certificate = info.client_certificate.is_some() || info.client_certificate_data.is_some();
        let private_key = info.client_key.is_some() || info.client_key_data.is_some();
        match (certificate, private_key) {
            (true, false) => Err(self.wrong(key("client-key(-data)"), "is missing beside client-certificate(-data)")),
            (false, true) => Err(self.wrong(key("client-certificate(-data)"), "is missing beside client-key(-data)")),
            _ => Ok(info),
        }
    }

    /// The text of a file that `key` names.
    fn read(self, key: &str, file: &str) -> Result<String, Error> {
        let path = self.near(file);
        fs::read_to_string(&path)
            .map_err(|e| self.wrong(key, format!("{path} can't be read")).with_details(e.to_string()))
    }

    /// A relative path is relative to the kubeconfig.
    fn near(self, file: &str) -> String {
        self.path.parent().unwrap_or(Path::new("")).join(file).display().to_string()
    }
}

/// The one of `all` that `key` names.
fn find<'a, T>(key: &str, wanted: &str, all: &'a [T], name: impl Fn(&T) -> &String) -> Result<&'a T, String> {
    all.iter().find(|one| name(one) == wanted && !wanted.is_empty()).ok_or_else(|| {
        let accepted = all.iter().map(|one| name(one).as_str()).collect::<Vec<_>>().join(", ");
        if wanted.is_empty() {
            format!("is missing; accepted: {accepted}")
        } else {
            format!("there is no {key} {wanted:?}; accepted: {accepted}")
        }
    })
}

fn present(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

fn without_blanks(text: &str) -> String {
    text.split_ascii_whitespace().collect()
}

impl User {
    /// The first key that this user has and that can't be served: `exec` and `auth-provider` run
    /// programs, passwords are gone from Kubernetes since 1.19, and a plugin is nobody else.
    fn unsupported(&self) -> Option<&'static str> {
        let keys = [
            ("exec", &self.exec),
            ("auth-provider", &self.auth_provider),
            ("username", &self.username),
            ("password", &self.password),
            ("as", &self.r#as),
            ("as-uid", &self.as_uid),
            ("as-groups", &self.as_groups),
            ("as-user-extra", &self.as_user_extra),
        ];
        keys.into_iter().find_map(|(key, value)| value.as_ref().map(|_| key))
    }
}
