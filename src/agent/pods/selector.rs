//! Label selectors in the syntax of `kubectl -l` (apimachinery, `pkg/labels/selector.go`).

use kube::core::{Expression, Selector};

const SYNTAX: &str = "KEY=VALUE, KEY!=VALUE, KEY in (A,B), KEY notin (A,B), KEY, !KEY, separated by commas";

/// Parses a selector. An empty text selects all pods.
///
/// # Errors
/// The text is not a selector.
pub fn parse_selector(text: &str) -> Result<Selector, String> {
    let parts = split(text).into_iter().map(str::trim).filter(|part| !part.is_empty());
    let parse = |part| parse_expression(part).ok_or_else(|| format!("invalid value {part:?}; expected {SYNTAX}"));
    parts.map(parse).collect()
}

/// Splits the text at commas that are not in parentheses.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0_i32);
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn parse_expression(part: &str) -> Option<Expression> {
    if let Some((key, value)) = part.split_once("!=") {
        return Some(Expression::NotEqual(parse_key(key)?, parse_value(value)?));
    }
    if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return Some(Expression::Equal(parse_key(key)?, parse_value(value)?));
    }
    if let Some((head, values)) = part.strip_suffix(')').and_then(|part| part.split_once('(')) {
        let values = values.split(',').map(parse_value).collect::<Option<_>>()?;
        return match head.trim().rsplit_once(char::is_whitespace)? {
            (key, "in") => Some(Expression::In(parse_key(key)?, values)),
            (key, "notin") => Some(Expression::NotIn(parse_key(key)?, values)),
            _ => None,
        };
    }
    match part.strip_prefix('!') {
        Some(key) => parse_key(key).map(Expression::DoesNotExist),
        None => parse_key(part).map(Expression::Exists),
    }
}

fn parse_key(text: &str) -> Option<String> {
    parse_value(text).filter(|key| !key.is_empty())
}

fn parse_value(text: &str) -> Option<String> {
    let text = text.trim();
    let is_valid = text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
    is_valid.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::SelectorExt;

    fn selects(text: &str) -> bool {
        let labels = [("app", "web"), ("tier", "front")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        parse_selector(text).expect("accepted").matches(&labels.into())
    }

    #[test]
    fn every_form_of_kubectl_is_supported() {
        for text in ["", "app=web", "app == web,tier", "app!=db", "other!=x", "!other", "app in (db, web),tier=front"] {
            assert!(selects(text), "{text}");
        }
        for text in ["app=db", "other=web", "other", "!app", "app!=web", "app notin (web)", "app=web,tier=back"] {
            assert!(!selects(text), "{text}");
        }
    }

    #[test]
    fn invalid_selectors_are_refused_with_the_syntax() {
        for text in ["app in web", "=x", "app>1", "a b", "app like (x)", "app=(x"] {
            let error = parse_selector(text).expect_err(text);
            assert!(error.contains("expected KEY=VALUE"), "{error}");
        }
    }
}
