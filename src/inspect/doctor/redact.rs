//! Texts without what opens doors: what is known to be a secret, and what looks like one.

use serde_json::Value;

const GONE: &str = "(removed)";
/// Keys whose values are secrets, in the spelling of kubeconfigs, certificates and environments, `_` as
/// `-`; those that end so, too.
const KEYS: [&str; 14] = [
    "token",
    "password",
    "passwd",
    "passphrase",
    "secret",
    "client-key-data",
    "client-certificate-data",
    "certificate-authority-data",
    "access-key",
    "private-key",
    "api-key",
    "apikey",
    "cookie",
    "bearer",
];
/// After what a secret follows, in small letters, and how much of it stays: `{"` in base64url, by which JSON Web
/// Tokens start; OpenShift's own tokens; and the schemes of RFC 6750 and RFC 7617.
const MARKS: [(&str, usize); 4] = [("eyj", 0), ("sha256~", 0), ("bearer ", 7), ("authorization: basic ", 21)];
/// What of a user in a kubeconfig is no secret: names, paths, and what kind of credential it is.
const OPEN: [&str; 7] =
    ["name", "tokenFile", "client-certificate", "client-key", "command", "apiVersion", "interactiveMode"];
/// What of a kubeconfig is of use.
const SECTIONS: [&str; 4] = ["current-context", "contexts", "clusters", "users"];
const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";

/// The text without any of `known` and without what looks like a token, a key or a certificate.
pub(super) fn redact(text: &str, known: &[String]) -> String {
    let mut text = text.to_owned();
    for secret in known.iter().filter(|secret| !secret.is_empty()) {
        text = text.replace(secret.as_str(), GONE);
    }
    let text = without_pem(&text);
    let lines: Vec<String> = text.lines().map(|line| without_tokens(&without_user(&without_values(line)))).collect();
    let mut text = lines.join("\n");
    text.push('\n');
    text
}

/// A kubeconfig as JSON, with nothing of its users but what is known to be no secret: a program's arguments and
/// environment may hold one under any name.
pub(super) fn without_credentials(kubeconfig: &str) -> Option<String> {
    let mut file: Value = serde_saphyr::from_str(kubeconfig).ok()?;
    let sections = file.as_object_mut()?;
    sections.retain(|key, _| SECTIONS.contains(&key.as_str()));
    sections.get_mut("users").into_iter().for_each(close);
    serde_json::to_string_pretty(&file).ok()
}

fn close(value: &mut Value) {
    match value {
        Value::Object(members) => {
            let closed = members.iter_mut().filter(|(key, _)| !OPEN.contains(&key.as_str()));
            closed.for_each(|(_, value)| close(value));
        }
        Value::Array(elements) => elements.iter_mut().for_each(close),
        Value::Null | Value::Bool(_) => {}
        Value::Number(_) | Value::String(_) => *value = GONE.into(),
    }
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
    let lower = line.to_ascii_lowercase().replace('_', "-");
    for (at, mark) in line.char_indices().filter(|(_, c)| matches!(c, ':' | '=')) {
        let key = lower[..at].trim_end_matches(['"', '\'', ' ']);
        let value = line[at + mark.len_utf8()..].trim_start();
        if !KEYS.iter().any(|secret| key.ends_with(secret)) || value.is_empty() || value.starts_with(['{', '[']) {
            continue;
        }
        let head = &line[..line.len() - value.len()];
        let (open, rest) = match value.strip_prefix('"').and_then(after_string) {
            Some(rest) => ("\"", format!("\"{}", without_values(rest))),
            None => ("", String::new()),
        };
        return format!("{head}{open}{GONE}{rest}");
    }
    line.to_owned()
}

/// What follows a string's end, of which `inner` is past the beginning.
fn after_string(inner: &str) -> Option<&str> {
    let mut is_escaped = false;
    let end = inner.find(|c| {
        let ends = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        ends
    })?;
    Some(&inner[end + 1..])
}

/// `https://user:password@host`: who it is goes.
fn without_user(line: &str) -> String {
    let mut pieces = line.split("://");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| {
        let end =
            piece.find(|c: char| c.is_whitespace() || matches!(c, '/' | '"' | '\'' | '?' | ',')).unwrap_or(piece.len());
        match piece[..end].rfind('@') {
            Some(at) => format!("{text}://{GONE}{}", &piece[at..]),
            None => format!("{text}://{piece}"),
        }
    })
}

/// `eyJ….….…`, and what follows `Bearer`.
fn without_tokens(line: &str) -> String {
    let is_token = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+' | '/' | '=' | '~');
    let mut out = String::new();
    let mut rest = line;
    loop {
        let lower = rest.to_ascii_lowercase();
        let next = MARKS.iter().filter_map(|(mark, keep)| Some((lower.find(mark)?, *keep))).min();
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
            "\"token\": \"s3cr3t-l\\\"s3cr3t-m\", \"y\": 2\n",
            "AWS_SECRET_ACCESS_KEY=s3cr3t-n\n",
            "authorization: basic czNjcjN0OnMzY3IzdA== to\n",
            "logged in with sha256~s3cr3t-o\n",
            "proxy-url: http://s3cr3t-p:s3cr3t-q@proxy:3128/x\n",
            "-----BEGIN CERTIFICATE-----\ns3cr3t-k",
        );
        let text = redact(text, &["known-s3cr3t-j".to_owned(), String::new()]);
        assert!(!text.contains("s3cr3t") && !text.contains("czNjcjN0"), "{text}");
        for kept in [
            "https://a",
            "rest",
            "from",
            "\nx\n",
            "\ny\n",
            "\"z\": 1",
            "\"y\": 2",
            "@proxy:3128/x",
            "\"token\": \"(removed)\"",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
    }

    #[test]
    fn of_a_kubeconfigs_users_only_what_is_no_secret_stays() {
        let text = concat!(
            "current-context: c\nclusters: [{name: c, cluster: {server: 'https://a:6443'}}]\n",
            "users:\n- name: u\n  user:\n    tokenFile: /var/run/t\n    token: >-\n      s3cr3t-a\n      s3cr3t-b\n",
            "    auth-provider: {name: oidc, config: {anything: s3cr3t-c}}\n",
            "    exec: {command: login, args: [-p, s3cr3t-d], env: [{name: PIN, value: s3cr3t-e}, {name: N, value: 12345}]}\n",
            "extensions: [{name: x, extension: s3cr3t-f}]\n",
        );
        let text = without_credentials(text).expect("a kubeconfig");
        assert!(!text.contains("s3cr3t") && !text.contains("12345"), "{text}");
        for kept in ["https://a:6443", "/var/run/t", "login", "PIN", "oidc"] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        assert_eq!(without_credentials("token: [s3cr3t"), None);
    }

    #[test]
    fn what_is_none_stays() {
        let text = "{\"tokenFile\": \"/var/run/token\"}\npod=shop/token-0 next: see token-valid\nwarning: no\n";
        assert_eq!(redact(text, &[]), text);
    }
}
