//! The kubeconfig that the plugin reads. It is written as JSON, which is valid YAML.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::net::IpAddr;

/// Returns the text of a kubeconfig with this token for the API server at the URL `server`. `ca` are the certificate authorities (PEM)
/// that sign its certificate; `None` for those that the node trusts.
#[must_use]
pub fn text(server: &str, ca: Option<&[u8]>, token: &str) -> String {
    let mut cluster = json!({ "server": server });
    if let Some(pem) = ca {
        cluster["certificate-authority-data"] = STANDARD.encode(pem).into();
    }
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "local", "cluster": cluster }],
        "users": [{ "name": "detour", "user": { "token": token } }],
        "contexts": [{ "name": "detour", "context": { "cluster": "local", "user": "detour" } }],
        "current-context": "detour",
    });
    format!("{config:#}\n")
}

/// Returns the token in a kubeconfig that [`text()`] wrote.
#[must_use]
pub fn token_in(text: &str) -> Option<String> {
    let config: Value = serde_json::from_str(text).ok()?;
    config["users"][0]["user"]["token"].as_str().map(str::to_owned)
}

/// Returns the URL of the API server from `KUBERNETES_SERVICE_HOST` and `_PORT`, which the kubelet sets in pods. The
/// host is an IP address there, so the plugin needs no DNS.
#[must_use]
pub fn server(host: &str, port: &str) -> String {
    match host.parse() {
        Ok(IpAddr::V6(address)) => format!("https://[{address}]:{port}"),
        _ => format!("https://{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_addresses_are_bracketed_in_the_server_url() {
        assert_eq!(server("10.96.0.1", "443"), "https://10.96.0.1:443");
        assert_eq!(server("fd00::1", "6443"), "https://[fd00::1]:6443");
        assert_eq!(server("api.example", "443"), "https://api.example:443");
    }
}
