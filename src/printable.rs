//! Escapes text from other sources, so that terminals display it and do not interpret it: names in a pod, Events, log
//! lines, messages of other plugins, manifests. Also removes secrets ([`without_secrets`]).
//!
//! Everything that this program prints for people is a [`Text`]. It is the only type that `main` writes to stdout and
//! stderr, and the only code that writes colors.

use regex_lite::Regex;
use std::borrow::Cow;
use std::fmt::{self, Display, Formatter, Write as _};
use std::sync::LazyLock;

/// Returns whether terminals or viewers interpret the character, or display nothing for it.
///
/// These are the characters that [`char::escape_debug`] escapes: controls (C0, DEL, C1), format
/// characters (bidi controls, zero-width characters), line and paragraph separators, blanks other than
/// U+0020, combining marks, private and unassigned characters.
#[must_use]
pub fn is_interpreted(c: char) -> bool {
    !matches!(c, ' '..='~') && c.escape_debug().len() > 1
}

/// Returns the text as one line: such characters are written as `\u{1b}`, `\n`, `\u{202e}`.
#[must_use]
pub fn line(text: &str) -> Cow<'_, str> {
    escape(text, |_| false, |c, to| to.extend(c.escape_debug()))
}

/// Returns the text with such characters escaped, except for line breaks and tabs.
#[must_use]
pub fn lines(text: &str) -> Cow<'_, str> {
    escape(text, |c| matches!(c, '\n' | '\t'), |c, to| to.extend(c.escape_debug()))
}

/// Returns an equivalent JSON document in which strings escape such characters.
#[must_use]
pub fn json(document: &str) -> Cow<'_, str> {
    let escaped = |c: char, to: &mut String| {
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string can't fail.
            let _ = write!(to, "\\u{unit:04x}");
        }
    };
    // A line break can only be between values: JSON strings contain none.
    escape(document, |c| c == '\n', escaped)
}

/// Returns an equivalent YAML document, if each string with such a character is in double quotes.
fn yaml(document: &str) -> Cow<'_, str> {
    let escaped = |c: char, to: &mut String| {
        // Writing to a string can't fail.
        let _ = write!(to, "\\U{:08X}", u32::from(c));
    };
    escape(document, |c| c == '\n', escaped)
}

/// Returns the text as the content of an XML element or attribute.
#[must_use]
pub fn xml(text: &str) -> String {
    let text = line(text).replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

/// Returns the text without user and password in URLs (`https://(redacted)@host/`), also if an unescaped `/`, `?` or `#`
/// makes the URL invalid, and without bearer tokens: the word after `Bearer`, except for prose such as `invalid bearer
/// token`, and tokens of known form (JSON Web Tokens, those of OpenShift). A server may quote the request's header
/// `Authorization` in its answer.
#[must_use]
pub fn without_secrets(text: &str) -> String {
    /// What ends a token: blanks, all that is not ASCII, and marks that quote it.
    const END: &str = r#"\x00-\x20\x7f-\x{10ffff}"',\\<>"#;
    static SECRETS: LazyLock<Vec<Regex>> = LazyLock::new(|| {
        compiled(&[
            r#"(://)(?:[^\s"'<>/?#]*:[^\s"'<>]*|[^\s"'<>/?#]*)(@)"#,
            &format!("((?:(?i:bearer)[:=]*[{END}]+)+)[a-z.:;)=]*[^a-z.:;)={END}][^{END}]*"),
            &format!("(?:eyJ|sha256~)[^{END}]*"),
        ])
    });
    redacted(text, &SECRETS)
}

/// Returns a line without what follows the name of a password or key: the word after `password=` or `--password`, and the
/// rest of the line after `"password":` or `Authorization:`, since the end of a header is unknown, or if the value or the
/// name has a quote, since a quoted value can contain spaces.
#[must_use]
pub fn without_passwords(line: &str) -> String {
    const NAME: &str = "[^ =:]*(?i:passw|passphrase|secret|api[-_]?key|authorization|cookie)[^ =:]*";
    static PASSWORDS: LazyLock<Vec<Regex>> = LazyLock::new(|| {
        compiled(&[
            &format!("((?:^| ){NAME}:).*"),
            &format!(r#"((?:^| )[^ =:]*["']{NAME}=).*"#),
            &format!(r#"((?:^| ){NAME}=)(?:[^ ]*["'].*|[^ ]*)"#),
            &format!(r#"((?:^| )--{NAME} )(?:[^ ]*["'].*|[^ ]+)"#),
        ])
    });
    redacted(line, &PASSWORDS)
}

/// An invalid pattern would find nothing: each one has a case in the tests.
fn compiled(patterns: &[&str]) -> Vec<Regex> {
    patterns.iter().flat_map(|pattern| Regex::new(pattern)).collect()
}

/// Replaces what the patterns match by `(redacted)`, except for their groups, which remain around it.
fn redacted(text: &str, patterns: &[Regex]) -> String {
    let replace = |text: String, pattern: &Regex| pattern.replace_all(&text, "${1}(redacted)${2}").into_owned();
    patterns.iter().fold(text.to_owned(), replace)
}

/// Returns at most `bytes` bytes of the text; a longer text ends in `…`.
#[must_use]
pub fn cut(text: &str, bytes: usize) -> Cow<'_, str> {
    if text.len() <= bytes {
        return Cow::Borrowed(text);
    }
    let end = text.floor_char_boundary(bytes.saturating_sub('…'.len_utf8()));
    Cow::Owned(format!("{}…", &text[..end]))
}

fn escape(text: &str, allow: impl Fn(char) -> bool, escaped: impl Fn(char, &mut String)) -> Cow<'_, str> {
    let is_bad = |c: char| is_interpreted(c) && !allow(c);
    if !text.contains(is_bad) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_bad(c) { escaped(c, &mut out) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// Text without characters that terminals interpret, except for line breaks, tabs and colors that this program
/// adds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Text(String);

impl Text {
    /// Returns the text as one line, as by [`line()`].
    #[must_use]
    pub fn line(text: &str) -> Self {
        Self(line(text).into_owned())
    }

    /// Returns lines that this program wrote, as by [`lines`].
    #[must_use]
    pub fn lines(text: &str) -> Self {
        Self(lines(text).into_owned())
    }

    /// Returns a message as by [`lines`] with all lines but the first indented, so that text from another source
    /// cannot look like a separate message.
    #[must_use]
    pub fn message(text: &str) -> Self {
        Self(lines(text.trim_end()).replace('\n', "\n  "))
    }

    /// Returns a JSON document, as by [`json`].
    #[must_use]
    pub fn json(document: &str) -> Self {
        Self(json(document).into_owned())
    }

    /// Returns a YAML document in which each string with escaped characters is in double quotes.
    #[must_use]
    pub fn yaml(document: &str) -> Self {
        Self(yaml(document).into_owned())
    }

    /// Appends text, as by [`line()`].
    pub fn push(&mut self, text: &str) {
        self.0 += &line(text);
    }

    /// Appends text in a color (Select Graphic Rendition, ECMA-48, 8.3.117).
    pub fn push_colored(&mut self, code: u8, text: &str) {
        // Writing to a string can't fail.
        let _ = write!(self.0, "\u{1b}[{code}m{}\u{1b}[0m", line(text));
    }

    /// Ends a line and removes blanks at its end.
    pub fn end_line(&mut self) {
        self.0.truncate(self.0.trim_end_matches(' ').len());
        self.0.push('\n');
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Display for Text {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// ESC, BEL, DEL, C1 (CSI), bidi controls, zero-width characters, separators, BOM, tags, noncharacters.
    const BAD: &str = "\0\u{7}\u{8}\r\u{1b}\u{7f}\u{85}\u{9b}\u{61c}\u{200b}\u{200d}\u{200e}\u{200f}\u{2028}\u{2029}\
        \u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2060}\u{2066}\u{2067}\u{2068}\u{2069}\u{ad}\u{feff}\u{fff9}\
        \u{fffe}\u{ffff}\u{e0001}\u{e0041}\u{a0}\u{fe0f}";

    #[test]
    fn bearer_tokens_are_removed() {
        for (text, expected) in [
            ("Authorization: Bearer s3cr3t", "Authorization: Bearer (redacted)"),
            ("{\"Authorization\":\"Bearer s3/cr+3t==\"}", "{\"Authorization\":\"Bearer (redacted)\"}"),
            ("[\"bearer\", \"s3cr3t\"] x", "[\"bearer\", \"(redacted)\"] x"),
            ("invalid token \\\"Bearer S\\\"", "invalid token \\\"Bearer (redacted)\\\""),
            ("x=eyJhbGciOiJub25lIn0.s3.cr3t, no", "x=(redacted), no"),
            ("sha256~s3cr3t", "(redacted)"),
            ("Authorization: Bearer Bearer s3cr3t", "Authorization: Bearer Bearer (redacted)"),
            ("Bearer\u{a0}s3cr3t\u{a0}x", "Bearer\u{a0}(redacted)\u{a0}x"),
        ] {
            assert_eq!(without_secrets(text), expected);
        }
        let prose = "401, invalid bearer token, the service account token has expired; BEARER";
        assert_eq!(without_secrets(prose), prose);
    }

    #[test]
    fn only_characters_that_terminals_interpret_are_escaped() {
        assert!(BAD.chars().all(is_interpreted));
        for text in ["a-b_c.d/e", "\"it's\" \\ [x] {y} ~", "é ä 日本 → … ✓ 🦀"] {
            assert!(matches!(line(text), Cow::Borrowed(same) if same == text), "{text}");
        }
        assert_eq!(line("a\u{1b}[2J\n\t\u{202e}\u{9b}b"), "a\\u{1b}[2J\\n\\t\\u{202e}\\u{9b}b");
        assert_eq!(lines("a\n\tb\rc\u{7}"), "a\n\tb\\rc\\u{7}");
        assert_eq!(xml("<a href=\"\u{ffff}\">&\u{1b}"), "&lt;a href=&quot;\\u{ffff}&quot;&gt;&amp;\\u{1b}");
    }

    #[test]
    fn further_lines_of_a_message_are_indented() {
        let text = Text::message("pod a\ndetour: all is well\n");
        assert_eq!(text.as_str(), "pod a\n  detour: all is well");
    }

    #[test]
    fn escaped_documents_are_equivalent() {
        let value = serde_json::json!({"k\u{202e}": BAD, "c": "\u{10ffff}\\\u{202e}\\"});
        let text = Text::json(&serde_json::to_string_pretty(&value).expect("JSON"));
        assert!(!text.as_str().chars().any(|c| is_interpreted(c) && c != '\n'), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(text.as_str()).expect("JSON"), value);
        assert!(text.as_str().contains("\\u202e") && text.as_str().contains("\\udbff\\udfff"), "{text}");
    }

    #[test]
    fn colored_text_is_escaped() {
        let mut text = Text::default();
        text.push_colored(31, "a\u{1b}[32mb");
        text.push("  ");
        text.end_line();
        assert_eq!(text.as_str(), "\u{1b}[31ma\\u{1b}[32mb\u{1b}[0m\n");
    }

    #[test]
    fn a_long_text_ends_between_characters() {
        assert_eq!((cut("äbc", 4), cut("äääää", 8), cut("ä", 2)), ("äbc".into(), "ää…".into(), "ä".into()));
    }

    #[test]
    fn passwords_are_removed_with_what_may_belong_to_them() {
        for (line, expected) in [
            ("DB_PASSWORD=s3cr3t pod=a", "DB_PASSWORD=(redacted) pod=a"),
            ("run --password s3cr3t --verbose", "run --password (redacted) --verbose"),
            ("password=\"two s3cr3t\" x", "password=(redacted)"),
            ("{\"clientSecret\": \"s3cr3t\"}", "{\"clientSecret\":(redacted)"),
            ("Authorization: Basic s3cr3t", "Authorization:(redacted)"),
            ("secret \"a\" not found: 404", "secret \"a\" not found: 404"),
            ("run --password \"two s3cr3t\" x", "run --password (redacted)"),
            ("\"password=two s3cr3t\" x", "\"password=(redacted)"),
            ("[\"--password=my s3cr3t\"] x", "[\"--password=(redacted)"),
            ("https://vault-secrets:8200/v1: refused", "https://vault-secrets:8200/v1: refused"),
            (
                "image=reg/my-secret-app:1.2 error=\"no such image\"",
                "image=reg/my-secret-app:1.2 error=\"no such image\"",
            ),
            (
                "password=a secret=b --token-password c d",
                "password=(redacted) secret=(redacted) --token-password (redacted) d",
            ),
        ] {
            assert_eq!(without_passwords(line), expected);
        }
    }

    #[test]
    fn user_and_password_are_removed_from_urls() {
        for (text, wanted) in [
            ("at https://u:pw@host:6443/x, no", "at https://(redacted)@host:6443/x, no"),
            ("http://u@h and ftp://a:b@c", "http://(redacted)@h and ftp://(redacted)@c"),
            ("\"http://u:p@h\" '://x:y@z'", "\"http://(redacted)@h\" '://(redacted)@z'"),
            ("http://u:p/a@s?w@host/x", "http://(redacted)@host/x"),
            ("http://u:p@w@host/", "http://(redacted)@host/"),
            ("http://u:1/2@host/", "http://(redacted)@host/"),
            ("https://host:6443/a and https://host/a@b", "https://host:6443/a and https://host/a@b"),
            ("https://[2001:db8::1]:6443/a", "https://[2001:db8::1]:6443/a"),
            ("docker://quay.io/x@sha256:0", "docker://quay.io/x@sha256:0"),
            ("no url: a@b", "no url: a@b"),
        ] {
            assert_eq!(without_secrets(text), wanted);
        }
    }

    proptest! {
        #[test]
        fn escaped_text_has_no_character_that_terminals_interpret(text in "\\PC{0,20}|(.|\n){0,40}", bad in proptest::sample::select(BAD.chars().collect::<Vec<_>>())) {
            let text = format!("{text}{bad}{text}");
            let harmless = |text: &str| !text.chars().any(is_interpreted);
            prop_assert!(harmless(&line(&text)));
            prop_assert!(harmless(&lines(&text).replace(['\n', '\t'], "")));
            prop_assert!(harmless(&xml(&text)));
            let escaped = line(&text);
            prop_assert_eq!(line(&escaped), Cow::Borrowed(&*escaped), "escaping twice has no effect");
            // Log lines quote values in this form.
            let quoted = format!("{text:?}");
            prop_assert!(harmless(&quoted));
            let document = serde_json::to_string(&text).expect("JSON");
            prop_assert!(harmless(&json(&document)));
            prop_assert_eq!(serde_json::from_str::<String>(&json(&document)).expect("JSON"), text);
        }
    }
}
