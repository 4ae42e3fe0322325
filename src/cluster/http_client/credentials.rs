//! What identifies the client to the API server.

use super::error::ClientError;
use crate::cluster::yaml::{documents, typed};
use crate::trusted_file;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};
use k8s_openapi::jiff::Timestamp;
use kube::config::{AuthInfo, ExecConfig, ExecInteractiveMode};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a token file is read again: the kubelet replaces it.
const RELOAD_INTERVAL: Duration = Duration::from_secs(50);
/// A plugin's token is renewed this long before it expires.
const MARGIN: Duration = Duration::from_secs(60);
/// The maximum size of a file with a token, a certificate or a key.
const MAX_FILE: u64 = 1 << 20;

/// The client's certificate and its key, in PEM.
pub(super) struct Identity {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

/// The source of the header `Authorization`.
pub(super) enum Credentials {
    /// None: the requests are anonymous, or the certificate identifies the client.
    Nothing,
    /// A token or a password.
    Fixed(HeaderValue),
    /// A file with a token, and when it was read.
    File(PathBuf, Mutex<(HeaderValue, Instant)>),
    /// A credential plugin, its last token, and when that expires.
    Plugin(Box<ExecConfig>, Mutex<(HeaderValue, Timestamp)>),
}

impl Credentials {
    /// Returns the credentials and the certificate of a kubeconfig's user. The order of precedence is that of kube.
    pub(super) fn new(user: &AuthInfo) -> Result<(Self, Option<Identity>), ClientError> {
        let of_user = Self::of_user(user);
        let (credentials, of_plugin) = of_user.map_err(ClientError::Credentials)?;
        let identity = match of_plugin {
            Some(identity) => Some(identity),
            None => identity(user)?,
        };
        Ok((credentials, identity))
    }

    fn of_user(user: &AuthInfo) -> Result<(Self, Option<Identity>), String> {
        let credentials = if let Some(provider) = &user.auth_provider {
            let token = provider.config.get("id-token").ok_or_else(|| {
                format!(
                    "auth-provider {}: Kubernetes 1.26 removed it; expected a credential plugin (exec)",
                    provider.name
                )
            })?;
            Self::Fixed(bearer(token)?)
        } else if let (Some(name), Some(password)) = (&user.username, &user.password) {
            let value = BASE64_STANDARD.encode(format!("{name}:{}", password.expose_secret()));
            Self::Fixed(sensitive(&format!("Basic {value}"))?)
        } else if let Some(token) = &user.token {
            Self::Fixed(bearer(token.expose_secret())?)
        } else if let Some(file) = &user.token_file {
            Self::File(file.into(), Mutex::new((read_token(Path::new(file))?, Instant::now())))
        } else if let Some(plugin) = &user.exec {
            return of_plugin(plugin);
        } else {
            Self::Nothing
        };
        Ok((credentials, None))
    }

    /// Returns the header's value, which is renewed if necessary.
    pub(super) fn authorization(&self) -> Result<Option<HeaderValue>, String> {
        match self {
            Self::Nothing => Ok(None),
            Self::Fixed(value) => Ok(Some(value.clone())),
            Self::File(path, last) => {
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                if last.1.elapsed() >= RELOAD_INTERVAL {
                    // The last token remains in use if the file can't be read, as in client-go (`transport`,
                    // `cachingTokenSource`).
                    if let Ok(value) = read_token(path) {
                        last.0 = value;
                    }
                    last.1 = Instant::now();
                }
                Ok(Some(last.0.clone()))
            }
            Self::Plugin(plugin, last) => {
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                if Timestamp::now() + MARGIN >= last.1 {
                    match of_plugin(plugin)? {
                        (Self::Plugin(_, renewed), _) => {
                            *last = renewed.into_inner().unwrap_or_else(PoisonError::into_inner);
                        }
                        (Self::Fixed(value), _) => *last = (value, Timestamp::MAX),
                        _ => return Err("credential plugin: expected another token, got none".to_owned()),
                    }
                }
                Ok(Some(last.0.clone()))
            }
        }
    }
}

fn bearer(token: &str) -> Result<HeaderValue, String> {
    sensitive(&format!("Bearer {token}"))
}

fn sensitive(value: &str) -> Result<HeaderValue, String> {
    let mut value = HeaderValue::try_from(value).map_err(|_| "token: expected visible ASCII characters".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

fn read_token(path: &Path) -> Result<HeaderValue, String> {
    let failed = |error: &dyn std::fmt::Display| format!("token file {}: {error}", path.display());
    let text = trusted_file::read(path, MAX_FILE).map_err(|error| failed(&error))?;
    let text = String::from_utf8(text).map_err(|error| failed(&error))?;
    bearer(text.trim()).map_err(|error| failed(&error))
}

/// Returns the certificate and the key of a kubeconfig's user.
fn identity(user: &AuthInfo) -> Result<Option<Identity>, ClientError> {
    let key_data = user.client_key_data.as_ref().map(SecretString::expose_secret);
    let certificate = data_or_file(user.client_certificate_data.as_deref(), user.client_certificate.as_deref());
    let key = data_or_file(key_data, user.client_key.as_deref());
    match (certificate.map_err(ClientError::Certificate)?, key.map_err(ClientError::Key)?) {
        (None, None) => Ok(None),
        (Some(certificate), Some(key)) => Ok(Some(Identity { certificate, key })),
        (Some(_), None) => Err(ClientError::Key("missing".to_owned())),
        (None, Some(_)) => Err(ClientError::Certificate("missing".to_owned())),
    }
}

fn data_or_file(data: Option<&str>, file: Option<&str>) -> Result<Option<Vec<u8>>, String> {
    match (data, file) {
        (Some(data), _) => BASE64_STANDARD.decode(data).map(Some).map_err(|error| error.to_string()),
        (None, Some(file)) => {
            trusted_file::read(Path::new(file), MAX_FILE).map(Some).map_err(|error| format!("{file}: {error}"))
        }
        (None, None) => Ok(None),
    }
}

/// The output of a credential plugin (k8s.io/client-go, `pkg/apis/clientauthentication`).
#[derive(Deserialize)]
struct ExecCredential {
    status: Option<ExecCredentialStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecCredentialStatus {
    expiration_timestamp: Option<String>,
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
}

/// Runs a credential plugin.
fn of_plugin(plugin: &ExecConfig) -> Result<(Credentials, Option<Identity>), String> {
    let status = run(plugin).map_err(|cause| {
        let name = plugin.command.as_deref().unwrap_or_default();
        format!("credential plugin {name}: {cause}")
    })?;
    let expiry = status.expiration_timestamp.map(|time| {
        time.parse::<Timestamp>().map_err(|error| format!("credential plugin: expirationTimestamp {time:?}: {error}"))
    });
    let expiry = expiry.transpose()?;
    let identity = status
        .client_certificate_data
        .zip(status.client_key_data)
        .map(|(certificate, key)| Identity { certificate: certificate.into_bytes(), key: key.into_bytes() });
    let credentials = match (status.token.as_deref().map(bearer).transpose()?, expiry) {
        (Some(token), Some(expiry)) => Credentials::Plugin(Box::new(plugin.clone()), Mutex::new((token, expiry))),
        (Some(token), None) => Credentials::Fixed(token),
        (None, _) => Credentials::Nothing,
    };
    Ok((credentials, identity))
}

fn run(plugin: &ExecConfig) -> Result<ExecCredentialStatus, String> {
    let mut command = Command::new(plugin.command.as_deref().ok_or("expected a command")?);
    command.args(plugin.args.iter().flatten());
    let variables = plugin.env.iter().flatten();
    command.envs(variables.filter_map(|variable| variable.get("name").zip(variable.get("value"))));
    let is_interactive = plugin.interactive_mode != Some(ExecInteractiveMode::Never);
    let mut spec = json!({"interactive": is_interactive});
    if plugin.provide_cluster_info {
        let cluster = serde_json::to_value(&plugin.cluster).map_err(|error| error.to_string())?;
        spec["cluster"] = cluster;
    }
    let mut info = json!({"kind": "ExecCredential", "spec": spec});
    info["apiVersion"] = plugin.api_version.clone().map_or(Value::Null, Into::into);
    command.env("KUBERNETES_EXEC_INFO", info.to_string());
    if is_interactive {
        command.stdin(Stdio::inherit()).stderr(Stdio::inherit());
    } else {
        command.stdin(Stdio::null());
    }
    let output = command.output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}", output.status, stderr.trim()));
    }
    // client-go accepts YAML too.
    let text = String::from_utf8(output.stdout).map_err(|error| error.to_string())?;
    let document = documents(&text)?.into_iter().next().unwrap_or_else(|| json!({}));
    typed::<ExecCredential>(&document)?.status.ok_or_else(|| "expected an ExecCredential with a status".to_owned())
}

/// Returns the headers with which a client acts as another user (kubernetes.io, "User impersonation").
pub(super) fn impersonation(user: &AuthInfo) -> Result<HeaderMap, ClientError> {
    let mut headers = HeaderMap::new();
    let mut add = |name: &str, value: &str| {
        let invalid = || ClientError::Credentials(format!("{name}: expected visible ASCII characters"));
        let name = HeaderName::try_from(name).map_err(|_| invalid())?;
        headers.append(name, HeaderValue::try_from(value).map_err(|_| invalid())?);
        Ok(())
    };
    for (name, value) in [("impersonate-user", &user.impersonate), ("impersonate-uid", &user.impersonate_uid)] {
        value.iter().try_for_each(|value| add(name, value))?;
    }
    for group in user.impersonate_groups.iter().flatten() {
        add("impersonate-group", group)?;
    }
    for (key, values) in user.impersonate_user_extra.iter().flatten() {
        let name = format!("impersonate-extra-{}", escaped(key));
        values.iter().try_for_each(|value| add(&name, value))?;
    }
    Ok(headers)
}

/// Escapes the characters that a header's name can't have (k8s.io/client-go, `transport`, `headerKeyEscape`).
fn escaped(key: &str) -> String {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$&'*+-.^_`|~".contains(&byte);
    let escape = |byte: u8| if is_valid(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    key.bytes().map(escape).collect()
}
