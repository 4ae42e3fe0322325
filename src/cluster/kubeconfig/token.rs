//! Until when a token is valid, as it says itself. Nothing is verified: whoever asked has it anyway.

use super::pem::base64;
use serde::Deserialize;

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
