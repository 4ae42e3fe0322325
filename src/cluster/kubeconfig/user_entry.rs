//! `users[].user` of a kubeconfig: the client's credentials.

use super::cluster_entry::{MAX_PEM, without_whitespace};
use super::files::{EntryLocation, non_empty};
use crate::cluster::resources::jwt_claims;
use crate::cluster::wire::null_is_empty;
use crate::cni::Error;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kube::config::AuthInfo;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::path::{Path, PathBuf};

/// The maximum size of a token file: a token is part of a request's header, which servers limit.
pub(super) const MAX_TOKEN: u64 = 64 << 10;

const SUPPORTED: &str = "token, tokenFile, or client-certificate(-data) with client-key(-data)";

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(super) struct UserEntry {
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

/// The kind of a client's credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialsSummary {
    /// `token`.
    Token,
    /// `tokenFile`.
    TokenFile(PathBuf),
    /// `client-certificate(-data)`.
    Certificate,
    /// None: requests are anonymous.
    Nothing,
}

impl UserEntry {
    /// Returns a user with the token in a file.
    pub(super) fn with_token_file(file: &Path) -> Self {
        Self { token_file: file.display().to_string(), ..Self::default() }
    }

    /// Returns the credentials for a client, including the contents of the files that the entry names.
    ///
    /// # Errors
    /// A key is not supported, a value is invalid, or half of a pair is missing.
    pub(super) fn credentials(&self, location: &EntryLocation<'_>) -> Result<AuthInfo, Error> {
        if let Some(key) = self.unsupported() {
            return Err(location.error(key, format!("not supported; expected {SUPPORTED}")));
        }
        let certificate = ("client-certificate", self.client_certificate.as_str());
        let key = ("client-key", self.client_key.as_str());
        let info = AuthInfo {
            token: self.token(location)?.map(Into::into),
            client_certificate_data: base64_data(location, &self.client_certificate_data, certificate)?,
            client_key_data: base64_data(location, &self.client_key_data, key)?.map(Into::into),
            ..AuthInfo::default()
        };
        match (info.client_certificate_data.is_some(), info.client_key_data.is_some()) {
            (true, false) => {
                Err(location.error("client-key(-data)", "missing; required with client-certificate(-data)"))
            }
            (false, true) => {
                Err(location.error("client-certificate(-data)", "missing; required with client-key(-data)"))
            }
            _ => Ok(info),
        }
    }

    /// Returns the kind of the credentials, and the token if they contain one.
    ///
    /// # Errors
    /// As [`Self::credentials`].
    pub(super) fn summary(&self, location: &EntryLocation<'_>) -> Result<(CredentialsSummary, Option<String>), Error> {
        let info = self.credentials(location)?;
        let token = self.token(location)?;
        let kind = match (&token, non_empty(&self.token_file)) {
            (Some(_), Some(file)) => CredentialsSummary::TokenFile(file.into()),
            (Some(_), None) => CredentialsSummary::Token,
            (None, _) if info.client_certificate_data.is_some() => CredentialsSummary::Certificate,
            (None, _) => CredentialsSummary::Nothing,
        };
        Ok((kind, token))
    }

    /// Returns the token. `tokenFile` takes precedence over `token` if the file can be read (client-go, `transport`,
    /// `NewBearerAuthWithRefreshRoundTripper`).
    fn token(&self, location: &EntryLocation<'_>) -> Result<Option<String>, Error> {
        let file = non_empty(&self.token_file).map(|file| location.read("tokenFile", file, MAX_TOKEN));
        let (key, token) = match (file, non_empty(&self.token)) {
            (Some(Ok(text)), _) => ("tokenFile", text),
            (_, Some(token)) => ("token", token.to_owned()),
            (Some(Err(error)), None) => return Err(error),
            (None, None) => return Ok(None),
        };
        let token = token.trim();
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(location.error(key, "invalid token; expected visible ASCII characters"));
        }
        Ok(Some(token.to_owned()))
    }

    /// Returns the first key that is not supported: `exec` and `auth-provider` run programs, Kubernetes 1.19 removed
    /// passwords, and the plugin does not impersonate other users.
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

/// Returns the base64 of an embedded value, or of the file that `key` names.
fn base64_data(location: &EntryLocation<'_>, data: &str, (key, file): (&str, &str)) -> Result<Option<String>, Error> {
    match (non_empty(data), non_empty(file)) {
        (Some(data), _) => Ok(Some(without_whitespace(data))),
        (None, Some(file)) => Ok(Some(BASE64_STANDARD.encode(location.read(key, file, MAX_PEM)?))),
        (None, None) => Ok(None),
    }
}

#[derive(Deserialize)]
struct ExpiryClaim {
    exp: Option<f64>,
}

/// Returns the claim `exp` of a JSON Web Token (RFC 7519, section 4.1.4), in seconds since 1970; `None` if the token
/// is opaque or does not expire.
pub(super) fn expiry(token: &str) -> Option<i64> {
    let claims: ExpiryClaim = jwt_claims(token)?;
    // The number may have a fraction; the cast saturates.
    claims.exp.map(|seconds| seconds as i64)
}

#[cfg(test)]
mod tests {
    use super::expiry;

    #[test]
    fn the_expiry_is_read_from_the_claims() {
        // {"exp":1893456000,"aud":["??>"]}
        assert_eq!(expiry("e30.eyJleHAiOjE4OTM0NTYwMDAsImF1ZCI6WyI_Pz4iXX0.c2ln"), Some(1_893_456_000));
        for none in ["opaque", "e30.e30.c2ln", "a.b", "e30.%%.c", "e30.eyJleHAiOjF9.c.d"] {
            assert_eq!(expiry(none), None, "{none}");
        }
    }
}
