//! Credential plugins of kubectl's users (k8s.io/client-go, `pkg/apis/clientauthentication`).
//!
//! kube runs them too, but three times for each client. It does not send the token of a plugin that supplies a
//! certificate as well, and its error for a plugin that fails contains the plugin's output.

use crate::cluster::yaml::{documents, typed};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::jiff::Timestamp;
use kube::config::{AuthInfo, ExecConfig, ExecInteractiveMode};
use serde::Deserialize;
use serde_json::{Value, json};
use std::process::{Command, Stdio};

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
