//! One pass over a line of text that hides what looks like a secret, or follows the name of one.

use crate::printable::REDACTED;

/// Parts of names that hold secrets, in lower case, without separators.
const SECRET: [&str; 13] = [
    "authoritydata",
    "authorization",
    "bearer",
    "certificatedata",
    "cookie",
    "credential",
    "keydata",
    "passphrase",
    "passw",
    "secret",
    "session",
    "signature",
    "token",
];
/// Ends of such names.
const ENDS: [&str; 9] = ["key", "keys", "psk", "pwd", "pass", "pin", "jwt", "sig", "creds"];
/// Names that look like such names.
const HARMLESS: [&str; 3] = ["unauth", "author", "bypass"];
/// Schemes of an Authorization header (RFC 7235): a credential follows behind a blank.
const SCHEMES: [&str; 5] = ["bearer", "basic", "digest", "negotiate", "ntlm"];
/// How a token starts: a JSON Web Token (`{"` in base64url), OpenShift's own.
const STARTS: [&str; 2] = ["eyj", "sha256~"];
/// How long a run of letters and digits can be that is no token.
const LONGEST_RUN: usize = 15;
/// The same of a word with separators, and of a run without digits.
const LONGEST_WORD: usize = 23;
const LONGEST_NAME: usize = 39;

/// The line without what follows the name of a secret, without credentials and tokens of known forms, and,
/// where words that are `harmless` are given, without each other word that looks random.
pub(super) fn scan(line: &str, harmless: Option<&[String]>) -> String {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        if !is_word(first) {
            out.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let (word, behind) = rest.split_at(rest.find(|c| !is_word(c)).unwrap_or(rest.len()));
        let random = harmless.is_some_and(|harmless| is_random(word, harmless));
        out += if random || has_known_form(word) { REDACTED } else { word };
        let (before, secret) = value_behind(word, behind);
        out += &behind[..before];
        if secret > 0 {
            out += REDACTED;
        }
        rest = &behind[before + secret..];
    }
    out
}

const fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+' | '/' | '~' | '%')
}

/// How much behind a word stays, and how much after that is the value of a secret.
fn value_behind(word: &str, behind: &str) -> (usize, usize) {
    let name = word.rsplit(['/', '+', '~', '%']).next().unwrap_or_default();
    let flat: String = name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    if !is_secret(&flat) {
        return (0, 0);
    }
    // `"name": `, `name\":`, `name]=`
    let decorated = skip(behind, |c| matches!(c, '\\' | '"' | '\'' | '`' | ']' | ' ' | '\t'));
    let mark = behind[decorated..].chars().next().filter(|c| matches!(c, '=' | ':'));
    if let Some(mark) = mark {
        let start = decorated + skip(&behind[decorated..], |c| matches!(c, '=' | ':' | '>' | ' ' | '\t'));
        let value = &behind[start..];
        return quoted(behind, start).unwrap_or_else(|| {
            // A header, YAML or a list has no end that is known.
            let is_word = mark == '=' && !value.starts_with(['[', '{', '(']);
            (start, if is_word { value.find(char::is_whitespace).unwrap_or(value.len()) } else { value.len() })
        });
    }
    if flat == "value" {
        return (0, 0);
    }
    let is_flag = word.starts_with('-');
    let blank = skip(behind, |c| matches!(c, ' ' | '\t'));
    // `"--password","…"`, `--password "…"`, `password "…"`
    let between = skip(behind, |c| matches!(c, '\\' | '"' | '\'' | ',' | ' ' | '\t'));
    if is_flag && between > blank {
        let quote = behind[..between].rfind([' ', ',']).map_or(0, |at| at + 1);
        return quoted(behind, quote).unwrap_or((between, word_end(&behind[between..])));
    }
    if blank == 0 {
        return (0, 0);
    }
    if let Some(found) = quoted(behind, blank).filter(|_| contains_secret(&flat)) {
        return found;
    }
    let value = &behind[blank..];
    let end = word_end(value);
    let is_value = match value.chars().next() {
        Some('-') | None => false,
        Some(_) if is_flag || flat == "bearer" => true,
        // Prose, as in `the token is expired`, has no digits or capitals.
        Some(_) => value[..end].contains(|c: char| !c.is_ascii_lowercase() && !matches!(c, '.' | ';' | ':' | ')')),
    };
    if is_value { (blank, end) } else { (0, 0) }
}

/// A value in quotes that begins at `start`; quotes may be escaped, as in a string within a string.
fn quoted(text: &str, start: usize) -> Option<(usize, usize)> {
    let level = skip(&text[start..], |c| c == '\\');
    let quote = text[start + level..].chars().next().filter(|c| matches!(c, '"' | '\'' | '`'))?;
    let open = start + level + quote.len_utf8();
    Some((open, closing(&text[open..], quote, level)))
}

fn word_end(text: &str) -> usize {
    text.find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '\\')).unwrap_or(text.len())
}

fn contains_secret(flat: &str) -> bool {
    SECRET.iter().any(|part| flat.contains(part))
}

fn is_secret(flat: &str) -> bool {
    let is_harmless = HARMLESS.iter().any(|harmless| flat.starts_with(harmless));
    let of_name = flat.contains("auth") || ENDS.iter().any(|end| flat.ends_with(end));
    contains_secret(flat) || of_name && !is_harmless || flat == "value" || SCHEMES.contains(&flat)
}

/// The length of what such characters begin.
fn skip(text: &str, which: impl Fn(char) -> bool) -> usize {
    text.len() - text.trim_start_matches(which).len()
}

/// The length up to a quote that has at most `level` backslashes before it, or up to the end.
fn closing(text: &str, quote: char, level: usize) -> usize {
    let mut backslashes = 0;
    for (at, c) in text.char_indices() {
        if c == quote && backslashes <= level {
            return at - backslashes;
        }
        backslashes = if c == '\\' { backslashes + 1 } else { 0 };
    }
    text.len()
}

fn has_known_form(word: &str) -> bool {
    let starts =
        |part: &str| STARTS.iter().any(|mark| part.get(..mark.len()).is_some_and(|s| s.eq_ignore_ascii_case(mark)));
    word.len() > 8 && word.split(['/', '%', '+']).any(starts)
}

/// Whether a word looks like a key, a hash or a token, and not like a name, a path or a time.
fn is_random(word: &str, harmless: &[String]) -> bool {
    if !looks_random(word) {
        return false;
    }
    let rest = harmless.iter().filter(|known| !known.is_empty()).fold(word.to_owned(), |w, known| w.replace(known, ""));
    looks_random(&rest)
}

fn looks_random(word: &str) -> bool {
    let count = |text: &str, which: fn(&char) -> bool| text.chars().filter(which).count();
    let run_is_random = |run: &str| {
        let (digits, upper) = (count(run, char::is_ascii_digit), count(run, char::is_ascii_uppercase));
        run.len() > LONGEST_RUN && digits > 0 || run.len() > LONGEST_NAME && upper > 1
    };
    let counts = (
        count(word, char::is_ascii_digit),
        count(word, char::is_ascii_uppercase),
        count(word, char::is_ascii_lowercase),
    );
    word.split(|c: char| !c.is_ascii_alphanumeric()).any(run_is_random)
        || word.len() > LONGEST_WORD && counts.0 > 0 && counts.1 > 1 && counts.2 > 1
}
