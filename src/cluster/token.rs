//! A service account's token.

use super::kubeconfig::base64;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;

/// A bearer token, and until when it is accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// What a request carries.
    pub text: String,
    /// From when on it is refused.
    pub expires: Timestamp,
}

/// What such a token says of itself (RFC 7519; the subject is `system:serviceaccount:NAMESPACE:NAME`).
#[derive(Deserialize)]
struct TokenClaims {
    sub: String,
    exp: i64,
}

impl Token {
    /// The token `text`, if it is one of the service account `name` in `namespace`. Only the API server
    /// can tell whether it is genuine.
    #[must_use]
    pub fn of_account(text: &str, namespace: &str, name: &str) -> Option<Self> {
        let claims = text.split('.').nth(1)?.replace('-', "+").replace('_', "/");
        let padding = "=".repeat((4 - claims.len() % 4) % 4);
        let claims: TokenClaims = serde_json::from_slice(&base64(&(claims + &padding)).ok()?).ok()?;
        let subject = format!("system:serviceaccount:{namespace}:{name}");
        let expires = Timestamp::from_second(claims.exp).ok()?;
        (claims.sub == subject).then(|| Self { text: text.to_owned(), expires })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_known_by_its_subject() {
        // {"sub":"system:serviceaccount:kube-system:detour-plugin","exp":1800000000,"a":"??>>"}
        let text = "e30.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6a3ViZS1zeXN0ZW06ZGV0b3VyLXBsdWdpbiIsImV4cCI6MTgwMDAwMDAwMC\
                    wiYSI6Ij8_Pj4ifQ.c2ln";
        let token = Token::of_account(text, "kube-system", "detour-plugin").expect("its token");
        assert_eq!((token.text.as_str(), token.expires.as_second()), (text, 1_800_000_000));
        assert_eq!(Token::of_account(text, "kube-system", "detour-agent"), None);
        for other in ["", "first-token", "a.b.c", "a.e30.c"] {
            assert_eq!(Token::of_account(other, "kube-system", "detour-plugin"), None, "{other}");
        }
    }
}
