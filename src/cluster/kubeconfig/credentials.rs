//! `users[].user`: who asks.
//!
//! Until when a token is valid, as it says itself. Nothing is verified: whoever asked has it anyway.

use super::endpoint::{KeyPath, present};
use super::pem::base64;
use super::{CredentialsSummary, pem};
use crate::cluster::wire::null_is_empty;
use crate::cni::Error;
use kube::config::AuthInfo;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::path::Path;

/// The largest token file: the header of a request, of which a server accepts no more.
pub(super) const TOKEN: u64 = 64 << 10;

const ACCEPTED: &str = "token, tokenFile, client-certificate(-data) together with client-key(-data)";

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

impl UserEntry {
    /// Whoever the token in a file belongs to.
    pub(super) fn with_token_file(file: &Path) -> Self {
        Self { token_file: file.display().to_string(), ..Self::default() }
    }

    /// What a client needs of it, with the contents of the files that it names.
    ///
    /// # Errors
    /// A key that can't be served, a value that is none, half of a pair.
    pub(super) fn credentials(&self, entry: &KeyPath<'_>) -> Result<AuthInfo, Error> {
        if let Some(key) = self.unsupported() {
            return Err(entry.wrong(key, format!("is not supported by a plugin; accepted: {ACCEPTED}")));
        }
        let info = AuthInfo {
            token: self.token(entry)?.map(Into::into),
            client_certificate_data: embedded(
                entry,
                &self.client_certificate_data,
                ("client-certificate", &self.client_certificate),
            )?,
            client_key_data: embedded(entry, &self.client_key_data, ("client-key", &self.client_key))?.map(Into::into),
            ..AuthInfo::default()
        };
        match (info.client_certificate_data.is_some(), info.client_key_data.is_some()) {
            (true, false) => Err(entry.wrong("client-key(-data)", "is missing beside client-certificate(-data)")),
            (false, true) => Err(entry.wrong("client-certificate(-data)", "is missing beside client-key(-data)")),
            _ => Ok(info),
        }
    }

    /// The kind of credentials, and the token where it is one.
    ///
    /// # Errors
    /// As [`Self::credentials`].
    pub(super) fn kind(&self, entry: &KeyPath<'_>) -> Result<(CredentialsSummary, Option<String>), Error> {
        let info = self.credentials(entry)?;
        let token = self.token(entry)?;
        let kind = match (&token, present(&self.token_file)) {
            (Some(_), Some(file)) => CredentialsSummary::TokenFile(file.into()),
            (Some(_), None) => CredentialsSummary::Token,
            (None, _) if info.client_certificate_data.is_some() => CredentialsSummary::Certificate,
            (None, _) => CredentialsSummary::Nothing,
        };
        Ok((kind, token))
    }

    /// The token. One in a file wins while the file can be read (client-go, `transport`,
    /// `NewBearerAuthWithRefreshRoundTripper`).
    fn token(&self, entry: &KeyPath<'_>) -> Result<Option<String>, Error> {
        let file = present(&self.token_file).map(|file| entry.read("tokenFile", file, TOKEN));
        let (key, token) = match (file, present(&self.token)) {
            (Some(Ok(text)), _) => ("tokenFile", text),
            (_, Some(token)) => ("token", token.to_owned()),
            (Some(Err(error)), None) => return Err(error),
            (None, None) => return Ok(None),
        };
        let token = token.trim();
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(entry.wrong(key, "is not a token; accepted: visible ASCII characters"));
        }
        Ok(Some(token.to_owned()))
    }

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

/// The base64 of `data`, else of the file that a key names.
fn embedded(entry: &KeyPath<'_>, data: &str, (key, file): (&str, &str)) -> Result<Option<String>, Error> {
    match (present(data), present(file)) {
        (Some(data), _) => Ok(Some(without_blanks(data))),
        (None, Some(file)) => Ok(Some(pem::to_base64(entry.read(key, file, pem::LARGEST)?.as_bytes()))),
        (None, None) => Ok(None),
    }
}

fn without_blanks(text: &str) -> String {
    text.split_ascii_whitespace().collect()
}

#[derive(Deserialize)]
struct ExpiryClaim {
    exp: Option<f64>,
}

/// The claim `exp` of a JSON Web Token (RFC 7519, section 4.1.4), in seconds since 1970; `None` where
/// the token is none, or says nothing of its end.
pub(super) fn expiry(token: &str) -> Option<i64> {
    let mut parts = token.split('.');
    let (Some(_), Some(claims), Some(_), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
        return None;
    };
    // RFC 7515, section 2: base64url without padding.
    let mut text = claims.replace('-', "+").replace('_', "/");
    while text.len() % 4 != 0 {
        text.push('=');
    }
    let claims: ExpiryClaim = serde_json::from_slice(&base64(&text).ok()?).ok()?;
    // Times are numbers that may have a fraction; what is beyond 64 bits is for ever.
    claims.exp.map(|seconds| seconds as i64)
}

#[cfg(test)]
mod tests {
    use super::expiry;

    #[test]
    fn the_end_is_in_the_second_part() {
        // {"exp":1893456000,"aud":["??>"]}
        assert_eq!(expiry("e30.eyJleHAiOjE4OTM0NTYwMDAsImF1ZCI6WyI_Pz4iXX0.c2ln"), Some(1_893_456_000));
        for none in ["opaque", "e30.e30.c2ln", "a.b", "e30.%%.c", "e30.eyJleHAiOjF9.c.d"] {
            assert_eq!(expiry(none), None, "{none}");
        }
    }
}
