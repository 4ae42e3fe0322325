//! The kubeconfig that the plugin reads. It is written as JSON, which is valid YAML.

use crate::host_path::HostPath;
use serde_json::{Value, json};
use std::fmt::Write;
use std::net::IpAddr;

/// The credentials of the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PluginCredentials {
    /// A bearer token, stored in the kubeconfig.
    Token(String),
    /// The path of a token file on the node, which the plugin reads at every call.
    TokenFile(HostPath),
}

/// Returns the text of a kubeconfig for the API server at the URL `server`. `ca` are the certificate authorities (PEM)
/// that sign its certificate; `None` for those that the node trusts.
#[must_use]
pub fn text(server: &str, ca: Option<&[u8]>, credentials: &PluginCredentials) -> String {
    let mut cluster = json!({ "server": server });
    if let Some(pem) = ca {
        cluster["certificate-authority-data"] = base64(pem).into();
    }
    let user = match credentials {
        PluginCredentials::Token(token) => json!({ "token": token }),
        PluginCredentials::TokenFile(path) => json!({ "tokenFile": path.to_string() }),
    };
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "local", "cluster": cluster }],
        "users": [{ "name": "detour", "user": user }],
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

/// Encodes bytes as base64 (RFC 4648) with padding, on one line.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    bytes.chunks(3).fold(String::new(), |mut text, chunk| {
        let group = chunk.iter().fold(0_u32, |group, byte| group << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let index = group >> (18 - 6 * place) & 63;
            let digit = if place <= chunk.len() { char::from(ALPHABET[index as usize]) } else { '=' };
            // Writing to a string can't fail.
            let _ = text.write_char(digit);
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_matches_the_examples_of_the_rfc() {
        for (plain, coded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")] {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
    }

    #[test]
    fn ipv6_addresses_are_bracketed_in_the_server_url() {
        assert_eq!(server("10.96.0.1", "443"), "https://10.96.0.1:443");
        assert_eq!(server("fd00::1", "6443"), "https://[fd00::1]:6443");
        assert_eq!(server("api.example", "443"), "https://api.example:443");
    }

    #[test]
    fn a_token_file_is_referenced_and_no_token_is_stored() {
        let path = "/var/run/detour/token".parse().expect("a path");
        let text = text("https://10.0.0.1:443", None, &PluginCredentials::TokenFile(path));
        let config: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(token_in(&text), None);
        assert_eq!(config["users"][0]["user"], json!({ "tokenFile": "/var/run/detour/token" }));
        assert_eq!(config["clusters"][0]["cluster"], json!({ "server": "https://10.0.0.1:443" }));
    }
}
