//! Texts without what opens doors: what is known to be a secret, and what looks like one.

const GONE: &str = "(removed)";
/// Keys whose values are secrets, in the spelling of kubeconfigs, certificates and environments; those
/// that end so, too.
const KEYS: [&str; 10] = [
    "token",
    "password",
    "passwd",
    "secret",
    "client-key-data",
    "client-certificate-data",
    "certificate-authority-data",
    "api-key",
    "apikey",
    "bearer",
];
/// How a JSON Web Token starts (`{"` in base64url).
const JWT: &str = "eyJ";
const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";

/// The text without any of `known` and without what looks like a token, a key or a certificate.
pub(super) fn redact(text: &str, known: &[String]) -> String {
    let mut text = text.to_owned();
    for secret in known.iter().filter(|secret| !secret.is_empty()) {
        text = text.replace(secret.as_str(), GONE);
    }
    let text = without_pem(&text);
    let lines: Vec<String> = text.lines().map(|line| without_tokens(&without_values(line))).collect();
    let mut text = lines.join("\n");
    text.push('\n');
    text
}

/// From a block's beginning to its end, or to that of the text. Line breaks may be written as `\n`.
fn without_pem(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, block)) = rest.split_once(BEGIN) {
        out += before;
        out += GONE;
        let end = block.split_once(END).and_then(|(_, end)| Some(end.split_once("-----")?.1));
        rest = end.unwrap_or_default();
    }
    out + rest
}

/// `"token": "…"`, `token: …`, `TOKEN=…`: the value goes, to the end of the string or line.
fn without_values(line: &str) -> String {
    let lower = line.to_ascii_lowercase();
    for (at, mark) in line.char_indices().filter(|(_, c)| matches!(c, ':' | '=')) {
        let key = lower[..at].trim_end_matches(['"', '\'', ' ']);
        let value = line[at + mark.len_utf8()..].trim_start();
        if !KEYS.iter().any(|secret| key.ends_with(secret)) || value.is_empty() || value.starts_with(['{', '[']) {
            continue;
        }
        let head = &line[..line.len() - value.len()];
        let (open, rest) = match value.strip_prefix('"').and_then(|inner| inner.split_once('"')) {
            Some((_, rest)) => ("\"", format!("\"{}", without_values(rest))),
            None => ("", String::new()),
        };
        return format!("{head}{open}{GONE}{rest}");
    }
    line.to_owned()
}

/// `eyJ….….…`, and what follows `Bearer`.
fn without_tokens(line: &str) -> String {
    let is_token = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+' | '/' | '=' | '~');
    let mut out = String::new();
    let mut rest = line;
    loop {
        let places = [(JWT, 0), ("Bearer ", 7), ("bearer ", 7)];
        let next = places.iter().filter_map(|(mark, keep)| Some((rest.find(mark)?, *keep))).min();
        let Some((at, keep)) = next else { return out + rest };
        out += &rest[..at + keep];
        out += GONE;
        rest = rest[at + keep..].trim_start_matches(is_token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_secret_stays() {
        let text = concat!(
            "  \"token\": \"s3cr3t-a\", \"server\": \"https://a\"\n",
            "    token: s3cr3t-b\n",
            "    client-key-data: s3cr3t-c==\n",
            "Authorization: Bearer s3cr3t-d rest\n",
            "msg=\"got eyJhbGci.s3cr3t-e.s3cr3t-f from\"\n",
            "DB_PASSWORD=s3cr3t-g\n",
            "x\n-----BEGIN RSA PRIVATE KEY-----\ns3cr3t-h\n-----END RSA PRIVATE KEY-----\ny\n",
            "{\"ca\": \"-----BEGIN CERTIFICATE-----\\ns3cr3t-i\\n-----END CERTIFICATE-----\\n\", \"z\": 1}\n",
            "known-s3cr3t-j\n",
            "-----BEGIN CERTIFICATE-----\ns3cr3t-k",
        );
        let text = redact(text, &["known-s3cr3t-j".to_owned(), String::new()]);
        assert!(!text.contains("s3cr3t"), "{text}");
        for kept in ["https://a", "rest", "from", "\nx\n", "\ny\n", "\"z\": 1", "\"token\": \"(removed)\""] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
    }

    #[test]
    fn what_is_none_stays() {
        let text = "{\"tokenFile\": \"/var/run/token\"}\npod=shop/token-0 next: see token-valid\nwarning: no\n";
        assert_eq!(redact(text, &[]), text);
    }
}
