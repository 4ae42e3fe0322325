//! The kubeconfigs of a user of kubectl: as kubectl reads them, with all keys, credential plugins and the proxy
//! variables of the environment.
//!
//! kube runs credential plugins (k8s.io/client-go, `pkg/apis/clientauthentication`) too, but three times for each client.
//! It does not send the token of a plugin that supplies a certificate as well, and its error for a plugin that fails
//! contains the plugin's output.

use super::entries::check_token;
use super::{connect_address, limited_client, parse, server_address};
use crate::cluster::yaml::{documents, typed};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::jiff::Timestamp;
use kube::config::{AuthInfo, ExecConfig, ExecInteractiveMode, KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use secrecy::ExposeSecret;
use serde::Deserialize;
use serde_json::{Value, json};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

/// The kubeconfigs of a user of kubectl.
pub(in crate::cluster) struct UserKubeconfig {
    config: Config,
}

impl UserKubeconfig {
    /// Reads these kubeconfigs and selects a context, or else uses the service account of this process's pod if there
    /// is no file.
    ///
    /// # Errors
    /// A file is invalid, or there is no context of that name.
    pub(in crate::cluster) async fn read(files: &[PathBuf], context: Option<&str>) -> Result<Self, String> {
        if files.is_empty() && env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
            return Ok(Self { config: Config::incluster().map_err(|error| error.to_string())? });
        }
        let merged = merged(files)?;
        let names: Vec<_> = merged.contexts.iter().map(|context| context.name.clone()).collect();
        let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
        let config = Config::from_custom_kubeconfig(merged, &options).await;
        Ok(Self { config: config.map_err(|error| format!("{error}; contexts: {}", names.join(", ")))? })
    }

    /// Returns the namespace of the context.
    pub(in crate::cluster) fn namespace(&self) -> &str {
        &self.config.default_namespace
    }

    /// Returns the API server's address for messages, without a slash at its end.
    pub(in crate::cluster) fn server(&self) -> String {
        server_address(&self.config)
    }

    /// Returns where the client connects.
    pub(in crate::cluster) fn address(&self) -> (String, u16) {
        connect_address(&self.config)
    }

    /// Runs the credential plugin, and returns a client with its credentials and when they expire.
    ///
    /// # Errors
    /// The plugin fails, or a certificate, a key or a token can't be used.
    pub(in crate::cluster) fn client(&self) -> Result<(Client, Option<Timestamp>), String> {
        let mut config = self.config.clone();
        let user = &mut config.auth_info;
        // kube would run the program of this provider.
        if let Some(provider) = user.auth_provider.as_ref().filter(|provider| provider.name != "oidc") {
            let name = &provider.name;
            return Err(format!(
                "auth-provider {name}: Kubernetes 1.26 removed it; expected a credential plugin (exec)"
            ));
        }
        if let Some(file) = user.token_file.take().filter(|_| user.token.is_none()) {
            user.token = Some(read_text(Path::new(&file))?.trim().into());
        }
        user.token = user.token.take().filter(|token| !token.expose_secret().is_empty());
        let has_others = user.token.is_some() || user.username.is_some() || user.auth_provider.is_some();
        let plugin = user.exec.take().filter(|_| !has_others);
        let expiry = plugin.map(|plugin| run_for(user, &plugin)).transpose()?.flatten();
        if let Some(token) = &user.token {
            check_token(token.expose_secret())?;
        }
        let client = limited_client(config, None).map_err(|error| error.to_string())?;
        Ok((client, expiry))
    }
}

/// Reads and merges kubeconfigs: for each key, the first file that sets it takes precedence.
fn merged(files: &[PathBuf]) -> Result<Kubeconfig, String> {
    if files.is_empty() {
        return Err("no such file; add --kubeconfig, set KUBECONFIG, or create ~/.kube/config".to_owned());
    }
    let mut merged = Kubeconfig::default();
    for file in files {
        let failed = |cause: &dyn Display| format!("{}: {cause}", file.display());
        let text = read_text(file)?;
        let resolve = |document: &mut Value| resolve_paths(document, file.parent().unwrap_or(Path::new("")));
        for mut next in parse(&text, resolve).map_err(|error| failed(&error))? {
            next.current_context = next.current_context.filter(|name| !name.is_empty());
            merged = merged.merge(next).map_err(|error| failed(&error))?;
        }
    }
    Ok(merged)
}

fn read_text(file: &Path) -> Result<String, String> {
    let failed = |cause: &dyn Display| format!("{}: {cause}", file.display());
    #[expect(clippy::disallowed_methods, reason = "the user may name a pipe, such as <(kubectl config view --raw)")]
    let text = fs::read(file).map_err(|error| failed(&error))?;
    String::from_utf8(text).map_err(|error| failed(&error))
}

/// Makes the relative paths in a kubeconfig absolute, which are relative to its directory; `command` only if it has a
/// slash, otherwise it is found in `PATH` (k8s.io/client-go, `tools/clientcmd`, `GetAuthInfoFileReferences`).
fn resolve_paths(document: &mut Value, directory: &Path) {
    for (list, path) in [
        ("clusters", "/cluster/certificate-authority"),
        ("users", "/user/client-certificate"),
        ("users", "/user/client-key"),
        ("users", "/user/tokenFile"),
        ("users", "/user/exec/command"),
    ] {
        let entries = document.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten();
        for value in entries.filter_map(|entry| entry.pointer_mut(path)) {
            let found = value.as_str().filter(|text| !path.ends_with("command") || text.contains('/'));
            if let Some(resolved) = found.and_then(|text| directory.join(text).to_str().map(str::to_owned)) {
                *value = resolved.into();
            }
        }
    }
}

/// The output of a credential plugin.
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

/// Runs a credential plugin and adds its credentials to `user`. Returns when they expire.
///
/// # Errors
/// The plugin fails, or its output is invalid. The error contains what the plugin wrote to stderr, and no credentials.
pub(super) fn run_for(user: &mut AuthInfo, plugin: &ExecConfig) -> Result<Option<Timestamp>, String> {
    let status = run(plugin).map_err(|cause| {
        let name = plugin.command.as_deref().unwrap_or_default();
        format!("credential plugin {name}: {cause}")
    })?;
    user.token = status.token.map(Into::into);
    if let (Some(certificate), Some(key)) = (status.client_certificate_data, status.client_key_data) {
        user.client_certificate_data = Some(BASE64_STANDARD.encode(certificate));
        user.client_key_data = Some(BASE64_STANDARD.encode(key).into());
    }
    let expiry = status.expiration_timestamp.map(|time| {
        time.parse::<Timestamp>().map_err(|error| format!("credential plugin: expirationTimestamp {time:?}: {error}"))
    });
    expiry.transpose()
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
