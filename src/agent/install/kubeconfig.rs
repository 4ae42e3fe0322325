//! The kubeconfig that the plugin reads: JSON, which is YAML as well.

use serde_json::{Value, json};
use std::fmt::Write;
use std::net::IpAddr;

/// How the plugin shows who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PluginCredentials {
    /// A bearer token in the kubeconfig itself.
    Token(String),
    /// A file on the node that holds it, read at every call.
    TokenFile(super::HostPath),
}

/// The text of a kubeconfig for the API at `server`, whose certificate the authorities in `ca`
/// (PEM) have signed; `None` where the node's own authorities are to be asked.
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

/// The token in the text of a kubeconfig as [`text()`] writes it.
#[must_use]
pub fn token_in(text: &str) -> Option<String> {
    let config: Value = serde_json::from_str(text).ok()?;
    config["users"][0]["user"]["token"].as_str().map(str::to_owned)
}

/// The API's address as the kubelet tells a pod (`KUBERNETES_SERVICE_HOST` and `_PORT`): an
/// address where it is one, so that the plugin, which runs with the node's resolver, needs none.
#[must_use]
pub fn server(host: &str, port: &str) -> String {
    match host.parse() {
        Ok(IpAddr::V6(address)) => format!("https://[{address}]:{port}"),
        _ => format!("https://{host}:{port}"),
    }
}

/// RFC 4648, with padding, on one line.
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
    fn base64_is_that_of_the_rfc() {
        for (plain, coded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")] {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
        assert_eq!(base64(&[0xfb, 0xff, 0xfe]), "+//+");
    }

    #[test]
    fn an_address_is_written_as_one() {
        assert_eq!(server("10.96.0.1", "443"), "https://10.96.0.1:443");
        assert_eq!(server("fd00::1", "6443"), "https://[fd00::1]:6443");
        assert_eq!(server("api.example", "443"), "https://api.example:443");
    }

    #[test]
    fn a_file_on_the_node_is_named_and_a_token_is_not_beside_it() {
        let path = "/var/run/detour/token".parse().expect("a path");
        let text = text("https://10.0.0.1:443", None, &PluginCredentials::TokenFile(path));
        let config: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(token_in(&text), None);
        assert_eq!(config["users"][0]["user"], json!({ "tokenFile": "/var/run/detour/token" }));
        assert_eq!(config["clusters"][0]["cluster"], json!({ "server": "https://10.0.0.1:443" }));
    }
}
