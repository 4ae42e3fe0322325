//! The configuration on stdin as a JSON object, of which only the version has been checked.

use super::block::Block;
use super::block::{json_error, wrong_type};
use super::error::{Code, Error};
use super::version;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// The maximum size of a configuration, in bytes. It leaves room for a previous result with every interface of a
/// pod, the pod's annotations (256 KiB, six times that when escaped) and a list of 10,000 attachments.
pub const MAX_CONFIGURATION: usize = 4 << 20;
/// The maximum number of values in a document: a list of 20,000 attachments has 60,000. A value takes up to
/// 72 bytes of memory for as few as two bytes of text.
const MAX_VALUES: usize = 100_000;

/// A network configuration that is not parsed further, sufficient to answer a call with an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// `cniVersion`; `0.1.0` if absent or empty (SPEC.md).
    pub cni_version: String,
    pub(super) block: Block,
}

impl Document {
    /// Parses the text of a network configuration.
    ///
    /// # Errors
    /// [`Code::Decode`] if it is not a JSON object; [`Code::InvalidConfig`] if it is too large or `cniVersion` is
    /// not a string.
    pub fn parse(stdin: &[u8]) -> Result<Self, Error> {
        if let Some(excess) = excess(stdin) {
            return Err(Error::new(Code::InvalidConfig, format!("network configuration on stdin: {excess}, got more")));
        }
        // The text of the reference library (`pkg/skel`).
        let keys: Map<String, Value> = serde_json::from_slice(stdin).map_err(|error| {
            Error::new(Code::Decode, format!("error unmarshall network config: {}", json_error(&error)))
        })?;
        let cni_version = match keys.get("cniVersion") {
            None | Some(Value::Null) => "",
            Some(Value::String(version)) => version,
            Some(other) => return Err(wrong_type("cniVersion", other, "a string")),
        };
        let cni_version = if cni_version.is_empty() { version::UNSTATED } else { cni_version }.to_owned();
        Ok(Self { cni_version, block: Block { path: String::new(), keys } })
    }

    /// Returns the version to answer in: that of the configuration if it is supported, else the newest.
    #[must_use]
    pub fn answer_version(&self) -> &str {
        version::SUPPORTED.into_iter().find(|v| *v == self.cni_version).unwrap_or(version::NEWEST)
    }
}

/// Deserializes `null` as the default value: Go writes empty lists and maps as `null`.
///
/// # Errors
/// The value has another type.
pub fn null_is_empty<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Returns the limit that `text` exceeds, as an error message; `None` if it can be parsed.
#[must_use]
pub fn excess(text: &[u8]) -> Option<String> {
    if text.len() > MAX_CONFIGURATION {
        return Some(format!("expected at most {MAX_CONFIGURATION} bytes"));
    }
    (count_values(text) > MAX_VALUES).then(|| format!("expected at most {MAX_VALUES} values"))
}

/// Estimates the number of values in a document from the characters that start or separate them.
fn count_values(text: &[u8]) -> usize {
    // A value takes at least two bytes.
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

    fn version(text: &str) -> String {
        Document::parse(text.as_bytes()).expect("a document").cni_version
    }

    #[test]
    fn a_missing_version_is_0_1_0() {
        assert_eq!(version("{}"), "0.1.0");
        assert_eq!(version(r#"{"cniVersion":""}"#), "0.1.0");
        assert_eq!(version(r#"{"cniVersion":null}"#), "0.1.0");
        assert_eq!(version(r#"{"cniVersion":"1.0.0"}"#), "1.0.0");
    }

    #[test]
    fn the_answer_is_in_a_supported_version() {
        let spoken = |text: &str| Document::parse(text.as_bytes()).expect("a document").answer_version().to_owned();
        assert_eq!(spoken(r#"{"cniVersion":"0.3.0"}"#), "0.3.0");
        assert_eq!(spoken(r#"{"cniVersion":"7.0.0"}"#), "1.1.0");
    }

    #[test]
    fn text_that_is_not_an_object_is_a_decode_error() {
        for text in ["", "x", "[]", "7", "null", "{} x", "{\"a\":"] {
            let error = Document::parse(text.as_bytes()).expect_err("refused");
            assert_eq!(error.code, Code::Decode, "{text}");
            assert!(error.msg.starts_with("error unmarshall network config: "), "{error}");
        }
        assert_eq!(Document::parse(br#"{"cniVersion":1}"#).expect_err("refused").code, Code::InvalidConfig);
        assert_eq!(Document::parse(b"{\"a\":\"\xff\"}").expect_err("refused").code, Code::Decode);
    }

    #[test]
    fn size_and_number_of_values_are_limited() {
        assert_eq!(excess(&vec![b' '; MAX_CONFIGURATION]), None);
        assert_eq!(excess(&vec![b' '; MAX_CONFIGURATION + 1]), Some("expected at most 4194304 bytes".into()));
        let list = |count: usize, item: &str| format!("[{}]", vec![item; count].join(","));
        assert_eq!(excess(list(MAX_VALUES, "0").as_bytes()), None);
        assert_eq!(excess(list(MAX_VALUES + 1, "0").as_bytes()), Some("expected at most 100000 values".into()));
        assert!(excess(list(MAX_VALUES, "[]").as_bytes()).is_some());
    }

    #[test]
    fn separators_in_strings_are_not_counted() {
        let string = format!("\"{}\"", r#",\"[{\\"#.repeat(MAX_VALUES / 2));
        assert_eq!(excess(string.as_bytes()), None);
        assert!(excess(format!("[{string},{}0]", "0,".repeat(MAX_VALUES)).as_bytes()).is_some());
    }
}
