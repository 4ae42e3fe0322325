//! Limits of JSON that other users write: a value takes up to 72 bytes of memory and as few as two of text.

/// The largest configuration, in bytes: with a previous result of every interface of a pod, the pod's
/// annotations (256 KiB, six times that when escaped) and a list of 10,000 attachments.
pub const MAX_CONFIGURATION: usize = 4 << 20;
/// The most values in one document: a list of 20,000 attachments has 60,000.
const MAX_VALUES: usize = 100_000;

/// Returns why `text` is too much to be parsed.
#[must_use]
pub fn excess(text: &[u8]) -> Option<String> {
    if text.len() > MAX_CONFIGURATION {
        return Some(format!("expected at most {MAX_CONFIGURATION} bytes"));
    }
    (values(text) > MAX_VALUES).then(|| format!("expected at most {MAX_VALUES} values"))
}

/// Counts the values of a document by what begins or separates them.
fn values(text: &[u8]) -> usize {
    // A value takes two bytes at least.
    if text.len() <= 2 * MAX_VALUES {
        return 0;
    }
    let (mut values, mut in_string, mut escaped) = (0, false, false);
    for byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' if !in_string => values += 1,
            _ => {}
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_values_are_limited() {
        assert_eq!(excess(&vec![b' '; MAX_CONFIGURATION]), None);
        assert_eq!(excess(&vec![b' '; MAX_CONFIGURATION + 1]), Some("expected at most 4194304 bytes".into()));
        let list = |count: usize, item: &str| format!("[{}]", vec![item; count].join(","));
        assert_eq!(excess(list(MAX_VALUES, "0").as_bytes()), None);
        assert_eq!(excess(list(MAX_VALUES + 1, "0").as_bytes()), Some("expected at most 100000 values".into()));
        assert!(excess(list(MAX_VALUES, "[]").as_bytes()).is_some());
    }

    #[test]
    fn what_is_in_a_string_is_no_value() {
        let string = format!("\"{}\"", r#",\"[{\\"#.repeat(MAX_VALUES / 2));
        assert_eq!(excess(string.as_bytes()), None);
        assert!(excess(format!("[{string},{}0]", "0,".repeat(MAX_VALUES)).as_bytes()).is_some());
    }
}
