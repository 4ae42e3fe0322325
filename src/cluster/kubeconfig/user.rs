//! The kubeconfigs of a user of kubectl: as kubectl reads them, with all keys, credential plugins and the proxy
//! variables of the environment.

use super::token_file::check_token;
use super::{credential_plugin, limited_client, parse, server_address};
use k8s_openapi::jiff::Timestamp;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use secrecy::ExposeSecret;
use serde_json::Value;
use std::env;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

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
        let expiry = plugin.map(|plugin| credential_plugin::run_for(user, &plugin)).transpose()?.flatten();
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
