//! Removes secrets from text that users attach to public issues.
//!
//! Structured files (configurations, kubeconfig, records) keep only the values of keys that are known to be harmless
//! ([`Redactor::file`]). Log lines of this program keep the values of its own keys. Other text loses everything that
//! looks like a secret or follows the name of one. In doubt, a value is removed. The time is linear in the length of
//! the text.

mod scan;

use crate::printable::{REDACTED, cut, json, lines, without_userinfo};
use scan::{only_open, scan};
use serde::Serialize;
use serde_json::Value;

/// The maximum length of a line, in bytes.
pub(super) const LINE_LIMIT: usize = 16 << 10;
/// Keys of this program's log lines whose values are names and numbers.
const NAMES: [&str; 20] = [
    "address",
    "attachment",
    "changes",
    "code",
    "command",
    "container",
    "count",
    "cpu_ms",
    "directory",
    "exclusions",
    "facts",
    "file",
    "ifname",
    "level",
    "network",
    "pod",
    "socket",
    "time",
    "uid",
    "wall_ms",
];
/// Keys of this program's log lines whose values are free text.
const TEXTS: [&str; 4] = ["error", "msg", "warnings", "why"];
const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";

/// Removes secrets from text.
#[derive(Debug, Default)]
pub(super) struct Redactor {
    /// Known secrets, which are removed everywhere.
    pub(super) secrets: Vec<String>,
    /// Words that look like secrets but are not: the pod's UID, its container's ID.
    pub(super) harmless: Vec<String>,
}

impl Redactor {
    /// Returns a JSON file with only the values of known keys, and `true`, `false` and `null`.
    pub(super) fn file(&self, mut value: Value) -> String {
        only_open(&mut value);
        self.report(&value)
    }

    /// Returns a report of this program as JSON. Its keys are harmless; its strings may contain text of other programs.
    pub(super) fn report(&self, value: &impl Serialize) -> String {
        let Ok(mut value) = serde_json::to_value(value) else { return String::new() };
        self.clean(&mut value);
        json(&format!("{value:#}\n")).into_owned()
    }

    /// Returns text of this program, such as rules.
    pub(super) fn text(&self, text: &str) -> String {
        self.each_line(text, |line| scan(line, None))
    }

    /// Returns log lines, of this program or of others.
    pub(super) fn log(&self, text: &str) -> String {
        self.each_line(text, |line| self.log_line(line))
    }

    fn each_line(&self, text: &str, redacted: impl Fn(&str) -> String) -> String {
        let text = self.without_known(text);
        let text = without_pem(&text);
        let mut out = String::with_capacity(text.len());
        for line in text.lines() {
            out += &cut(&lines(&redacted(&without_userinfo(line))), LINE_LIMIT);
            out.push('\n');
        }
        out
    }

    fn clean(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                let mut clean = self.text(text);
                clean.truncate(clean.trim_end_matches('\n').len());
                *text = clean;
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.clean(item)),
            Value::Object(members) => {
                let old = std::mem::take(members);
                for (key, mut value) in old {
                    self.clean(&mut value);
                    members.insert(scan(&without_userinfo(&self.without_known(&key)), None), value);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn without_known(&self, text: &str) -> String {
        let known = self.secrets.iter().filter(|secret| !secret.is_empty());
        known.fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), REDACTED))
    }

    /// Returns a log line: of this program's form (`time=… level=… key=value`), the values of its own keys; of any
    /// other line, what [`scan`] leaves.
    fn log_line(&self, line: &str) -> String {
        let Some(pairs) = pairs(line) else { return scan(line, Some(&self.harmless)) };
        let mut out = Vec::new();
        for (key, value) in pairs {
            let shown = match key {
                _ if NAMES.contains(&key) => scan(value, None),
                _ if TEXTS.contains(&key) => scan(value, Some(&self.harmless)),
                _ => REDACTED.to_owned(),
            };
            out.push(format!("{}={shown}", scan(key, Some(&self.harmless))));
        }
        out.join(" ")
    }
}

/// Splits a log line of the form that [`crate::logging`] writes into pairs.
fn pairs(line: &str) -> Option<Vec<(&str, &str)>> {
    let mut rest = line.strip_prefix("time=").map(|_| line)?;
    let mut pairs = Vec::new();
    while !rest.is_empty() {
        let (key, value) = rest.split_once('=')?;
        let end = match value.strip_prefix('"') {
            Some(inner) => 1 + string_end(inner)?,
            None => value.find(' ').unwrap_or(value.len()),
        };
        if key.is_empty() || key.contains([' ', '"']) {
            return None;
        }
        pairs.push((key, &value[..end]));
        rest = &value[end..];
        rest = if rest.is_empty() { rest } else { rest.strip_prefix(' ')? };
    }
    Some(pairs)
}

/// Returns the end of a quoted string, after its closing quote; `inner` begins after the opening quote.
fn string_end(inner: &str) -> Option<usize> {
    let mut is_escaped = false;
    let end = inner.find(|c| {
        let ends = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        ends
    })?;
    Some(end + 1)
}

/// Removes PEM blocks; a block without an end extends to the end of the text. Line breaks may be written as `\n`.
fn without_pem(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, block)) = rest.split_once(BEGIN) {
        out += before;
        out += REDACTED;
        let end = block.split_once(END).and_then(|(_, end)| Some(end.split_once("-----")?.1));
        rest = end.unwrap_or_default();
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use std::time::{Duration, Instant};

    /// Each line holds the secret `hunter2` or `Hunter2`, or `TOP`, which stands for a random word.
    const LEAKS: [&str; 70] = [
        r#"{"accessKey": "hunter2", "z": 1}"#,
        r#"{"secretKey":"hunter2"}"#,
        r#"{"privateKey": "hunter2"}"#,
        r#"{"auth": "hunter2"}"#,
        r#"{"auths": {"quay.io": {"auth": "hunter2"}}}"#,
        r#"{"psk": "hunter2"}"#,
        r#"{"credentials": "hunter2"}"#,
        r#"{"tokens": ["hunter2", "Hunter2"]}"#,
        r#"{"passwords": {"a": "hunter2"}}"#,
        r#"{"Pass-Word": "hunter2 hunter2"}"#,
        r#"{"client_secret": "a\"hunter2"}"#,
        r#"conf="{\"secretKey\":\"hunter2\",\"a\":1}""#,
        r#"conf="{\\\"apiKey\\\": \\\"hunter2\\\"}""#,
        "Authorization: Basic hunter2",
        "authorization: Digest username=hunter2, response=hunter2",
        "Proxy-Authorization: Custom hunter2 hunter2",
        "curl -H 'Authorization: token hunter2'",
        "got Basic aHVudTOP== to",
        "sent Bearer hunter2 to",
        "sent \"bearer hunter2\"",
        "Negotiate YIIhunter2",
        "X-Api-Key: hunter2",
        "Cookie: a=hunter2; b=hunter2",
        "Set-Cookie: session=hunter2",
        "--password hunter2 --verbose",
        "--password=hunter2",
        "--password \"two hunter2\"",
        "args=[\"--password\",\"hunter2\"]",
        "args=[--db-password hunter2]",
        "--client-secret 'hunter2 hunter2'",
        "--token=hunter2",
        "--access_key hunter2",
        "DB_PASSWORD=hunter2",
        "AWS_SECRET_ACCESS_KEY=hunter2",
        "MYSQL_PWD=hunter2",
        "export PGPASSWORD='hunter2 hunter2'",
        "password: correct horse hunter2",
        "Password : hunter2",
        "passwd=hunter2,user=a",
        "PASSPHRASE => hunter2",
        "psk=\"hunter2\"",
        "password hunter2",
        "password \"my hunter2\"",
        "{\"name\":\"PIN\",\"value\":\"hunter2\"}",
        "value: hunter2",
        "jwt=hunter2",
        "otpPin: hunter2",
        "signature=hunter2",
        "?token=hunter2&x=1",
        "https://host/x?sig=hunter2&y",
        "http://user:hunter2@proxy:3128/x",
        "postgres://hunter2@db/x",
        "https://u:p/hunter2@host/",
        "\"proxy-url\": \"http://a:hunter2@b\"",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
        "\"ca\": \"-----BEGIN CERTIFICATE-----\\nhunter2\\n-----END CERTIFICATE-----\\n\"",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2",
        "token eyJhbGciOiJub25lIn0.hunter2.hunter2",
        "/x/eyJhbGciOiJub25lIn0.hunter2",
        "logged in with sha256~hunter2",
        "client-key-data: hunter2==",
        "certificate-authority-data: hunter2",
        "got 7fGk29aLwQ0zXbN1TOPcR5e",
        "got wJalrXUtnFEMI/K7MDENG/bPxRfiCYTOPKEY",
        "id AKIAIOSFODNN7TOPMPLE",
        "ghp_16C7e42F292c6912E7710c838347TOP",
        "xoxb-2345678901234-TOP45678901234567",
        "hash 9f86d081884c7d659a2feaa0c55ad015TOP",
        "time=2026-01-01T00:00:00Z level=info msg=x unknown=hunter2",
        "time=2026-01-01T00:00:00Z level=info msg=\"x --password hunter2\" another=\"a b hunter2\"",
    ];

    fn leaks(text: &str) -> bool {
        ["hunter2", "Hunter2", "TOP"].iter().any(|secret| text.contains(secret))
    }

    #[test]
    fn log_lines_lose_secrets() {
        for line in LEAKS {
            assert!(leaks(line), "{line}");
            let shown = Redactor::default().log(line);
            assert!(!leaks(&shown) && shown.contains(REDACTED), "{line} → {shown}");
        }
        let redactor = Redactor { secrets: vec!["hunter2".into(), String::new()], ..Redactor::default() };
        assert_eq!(redactor.text("known hunter2 here"), "known (redacted) here\n");
    }

    #[test]
    fn what_support_needs_remains() {
        let harmless = vec!["0f86d081884c7d659a2feaa0c55ad015".to_owned()];
        let redactor = Redactor { harmless, ..Redactor::default() };
        for line in [
            "time=2026-11-22T01:02:03.456789Z level=error msg=\"pod shop/web-0: no such file\" pod=shop/web-0 code=11 wall_ms=2.5 container=abc",
            "Nov 22 01:02:03 node-1 crio[812]: failed to find plugin \"istio-cni\" in path [/var/lib/cni/bin]",
            "pod=shop/web-7d4b9c8f6d-x7k2p next: see token-valid",
            "the token is expired; because token-valid failed",
            "https://10.0.0.1:6443/api/v1/namespaces/shop/pods/web-0: Unauthorized: 401",
            "container 0f86d081884c7d659a2feaa0c55ad015 in /run/netns/cni-0c1f2ab3-0011-2233-4455-66778899aabb",
            "ip daddr 2001:db8::1 tcp dport 15001 -m owner --uid-owner 1337 -j ISTIO_REDIRECT",
            "NetworkAttachmentDefinition shop/net: author=me bypass: all",
        ] {
            assert_eq!(redactor.log(line), format!("{line}\n"));
        }
    }

    #[test]
    fn nothing_in_the_output_acts_on_a_terminal() {
        let bad = "a\u{1b}[2J\u{202e}\u{9b}\u{7}";
        let redactor = Redactor::default();
        let value = json!({"name": bad, bad: [bad]});
        for text in [redactor.log(bad), redactor.text(bad), redactor.file(value.clone()), redactor.report(&value)] {
            assert!(!text.chars().any(|c| c != '\n' && crate::printable::is_interpreted(c)), "{text}");
        }
    }

    #[test]
    fn a_configuration_shows_values_of_known_keys_only() {
        let text = Redactor::default().file(json!({
            "cniVersion": "1.1.0", "type": "detour", "name": "istio-cni", "accessKey": "hunter2", "pin": 12345,
            "isFine": true, "none": null, "tokens": ["hunter2", {"name": "hunter2"}],
            "kubernetes": {"kubeconfig": "https://u:hunter2@host/x", "timeout_seconds": 7, "psk": "hunter2"},
            "args": {"cni": {"x": "hunter2", "name": "hunter2"}},
        }));
        assert!(!leaks(&text) && !text.contains("12345"), "{text}");
        for kept in ["1.1.0", "istio-cni", "accessKey", "\"isFine\": true", "https://(redacted)@host/x", ": 7"] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
    }

    #[test]
    fn of_a_kubeconfigs_users_only_what_is_no_secret_remains() {
        let text = concat!(
            "current-context: c\nclusters: [{name: c, cluster: {server: 'https://a:6443'}}]\n",
            "users:\n- name: u\n  user:\n    tokenFile: /var/run/t\n    token: >-\n      hunter2-a\n      hunter2-b\n",
            "    auth-provider: {name: oidc, config: {anything: hunter2-c}}\n",
            "    exec: {command: login, args: [-p, hunter2-d], env: [{name: PIN, value: hunter2-e}, {name: N, value: 12345}]}\n",
            "extensions: [{name: x, extension: hunter2-f}]\n",
        );
        let text = Redactor::default().file(serde_saphyr::from_str(text).expect("YAML"));
        assert!(!leaks(&text) && !text.contains("12345"), "{text}");
        for kept in ["https://a:6443", "/var/run/t", "login", "PIN", "oidc"] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
    }

    /// The bounds are generous: what is linear takes far less than a second, what is not takes minutes.
    #[test]
    fn attacks_on_the_parser_take_linear_time_and_no_stack() {
        let started = Instant::now();
        let (redactor, many) = (Redactor::default(), 1 << 16);
        for piece in [
            "\"token\": \"a\", ",
            "eyJ",
            "bearer ",
            "key key;",
            "://",
            "a:b@",
            "\\\"",
            "-----BEGIN ",
            "-----BEGIN -----END ",
            "[",
            "{\"a\":",
            "password=",
            "token  ",
            "--key ",
            "--key\",",
            "=",
            "value:\"",
            "time=",
            "sha256~",
            "\u{1b}",
            "x",
        ] {
            let text = piece.repeat(many * 4 / piece.len());
            for line in [text.clone(), format!("time={text}"), text.replace(' ', "\n")] {
                assert!(redactor.log(&line).len() <= line.len() * 12 + 100, "{piece}");
            }
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
        let long = redactor.log(&"word ".repeat(many));
        assert!(long.len() <= LINE_LIMIT + 1 && long.ends_with("…\n"), "{}", long.len());
    }

    fn secret() -> impl Strategy<Value = String> {
        "[A-Za-z0-9+/_=!?*#-]{6,60}".prop_map(|secret| format!("S3cr{secret}"))
    }

    proptest! {
        #[test]
        fn a_secret_below_an_unknown_key_is_never_shown(
            key in "[A-Za-z0-9_.-]{1,20}",
            secret in secret(),
            shape in 0..5,
        ) {
            prop_assume!(!scan::is_open(&key));
            let value = match shape {
                0 => json!(secret),
                1 => json!([secret, [secret]]),
                2 => json!({"name": secret, "type": [secret]}),
                3 => json!({"deep": {"kubernetes": {"kubeconfig": secret}}}),
                _ => json!([{"name": "PIN", "value": secret}]),
            };
            let conf = json!({"name": "n", "chain": [{"type": "x", key: value}]});
            let text = Redactor::default().file(conf);
            prop_assert!(!text.contains(&secret), "{}", text);
        }

        #[test]
        fn a_secret_of_an_unknown_log_key_is_never_shown(key in "[a-z][a-z_.]{0,20}", secret in secret(), quote: bool) {
            prop_assume!(!NAMES.contains(&key.as_str()) && !TEXTS.contains(&key.as_str()));
            let value = if quote { format!("\"a {secret} b\"") } else { secret.clone() };
            let line = format!("time=2026-01-01T00:00:00Z level=info msg=\"a b\" {key}={value} pod=a/b");
            let text = Redactor::default().log(&line);
            prop_assert!(!text.contains(&secret), "{}", text);
            prop_assert!(text.starts_with("time=2026-01-01T00:00:00Z level=info msg=\"a b\" "), "{}", text);
        }

        #[test]
        fn a_secret_after_its_name_is_never_shown(
            name in "(db_|DB-|my)?(password|Token|SECRET|apiKey|credentials|auth)",
            separator in "=|: |\": \"|=\"|\\\\\": \\\\\"|:",
            before in "[a-z ,\"]{0,10}",
            secret in secret(),
        ) {
            let text = Redactor::default().log(&format!("{before} {name}{separator}{secret}"));
            prop_assert!(!text.contains(&secret), "{}", text);
        }

        #[test]
        fn any_text_is_taken(text in "(.|\n){0,200}") {
            let _ = (Redactor::default().log(&text), Redactor::default().text(&text));
        }
    }
}
