//! The JSON object on stdin, before anything but its version is understood: what is needed to
//! answer at all, even with an error.
//!
//! Limits of JSON that other users write: a value takes up to 72 bytes of memory and as few as two of text.
//!
//! Limits on what others than the node's administrator write down, and how much of it messages quote.

use super::list::wrong_type;
use super::netconf::{PRIMARY_KEYS, is_primary};
use super::{Block, Code, Error, NodeConf, version};
use serde_json::{Map, Value};

/// A network configuration as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// `cniVersion`; absent or empty is `0.1.0` (SPEC.md).
    pub cni_version: String,
    pub(super) block: Block,
}

impl Document {
    /// Reads stdin's text.
    ///
    /// # Errors
    /// [`Code::Decode`]: it is not a JSON object; [`Code::InvalidConfig`]: it is too large, or `cniVersion`
    /// is no string.
    pub fn parse(stdin: &[u8]) -> Result<Self, Error> {
        if let Some(excess) = excess(stdin) {
            return Err(Error::new(Code::InvalidConfig, format!("network configuration on stdin: {excess}, got more")));
        }
        let keys: Map<String, Value> = serde_json::from_slice(stdin)
            .map_err(|error| Error::new(Code::Decode, format!("error unmarshall network config: {error}")))?;
        let cni_version = match keys.get("cniVersion") {
            None | Some(Value::Null) => "",
            Some(Value::String(version)) => version,
            Some(other) => return Err(wrong_type("cniVersion", other, "a string")),
        };
        let cni_version = if cni_version.is_empty() { version::UNSTATED } else { cni_version }.to_owned();
        Ok(Self { cni_version, block: Block { path: String::new(), keys } })
    }

    /// Whether it makes this the primary plugin.
    #[must_use]
    pub fn is_primary(&self) -> bool {
        is_primary(&self.block.keys)
    }

    /// Removes the networks that make this the primary plugin.
    pub fn remove_networks(&mut self) {
        PRIMARY_KEYS.iter().for_each(|key| drop(self.block.keys.shift_remove(*key)));
    }

    /// Puts the node's keys in place of its own, as [`NodeConf::govern`].
    pub fn govern(&mut self, node: &NodeConf, program: &str) -> Vec<String> {
        node.govern(&mut self.block.keys, program)
    }

    /// The version to answer in: the configuration's, where it is spoken here.
    #[must_use]
    pub fn spoken_version(&self) -> &str {
        version::SUPPORTED.into_iter().find(|v| *v == self.cni_version).unwrap_or(version::NEWEST)
    }
}

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

/// The most items of a list: of an annotation, of `args.cni`, or of a key of the configuration.
pub const LIST_ITEMS: usize = 2000;
/// The longest text of a list, in bytes.
pub(super) const LIST_BYTES: usize = 64 * 1024;
/// So much of a value is quoted, in characters.
const QUOTED: usize = 80;

/// Refuses more than `limit` of what is at `place`.
///
/// # Errors
/// [`Code::InvalidConfig`] with the place, the limit and the number.
pub fn at_most(limit: usize, what: &str, place: &str, got: usize) -> Result<(), Error> {
    if got <= limit {
        return Ok(());
    }
    Err(Error::new(Code::InvalidConfig, format!("{place}: expected at most {limit} {what}, got {got}")))
}

/// Returns the start of `text`, up to as much as messages quote of a value.
#[must_use]
pub fn excerpt(text: &str) -> String {
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> String {
        Document::parse(text.as_bytes()).expect("a document").cni_version
    }

    #[test]
    fn no_version_is_the_first() {
        assert_eq!(version("{}"), "0.1.0");
        assert_eq!(version(r#"{"cniVersion":""}"#), "0.1.0");
        assert_eq!(version(r#"{"cniVersion":null}"#), "0.1.0");
        assert_eq!(version(r#"{"cniVersion":"1.0.0"}"#), "1.0.0");
    }

    #[test]
    fn the_answer_is_in_a_version_that_is_spoken_here() {
        let spoken = |text: &str| Document::parse(text.as_bytes()).expect("a document").spoken_version().to_owned();
        assert_eq!(spoken(r#"{"cniVersion":"0.3.0"}"#), "0.3.0");
        assert_eq!(spoken(r#"{"cniVersion":"7.0.0"}"#), "1.1.0");
    }

    #[test]
    fn what_is_no_object_can_not_be_decoded() {
        for text in ["", "x", "[]", "7", "null", "{} x", "{\"a\":"] {
            let error = Document::parse(text.as_bytes()).expect_err("refused");
            assert_eq!(error.code, Code::Decode, "{text}");
            assert!(error.msg.starts_with("error unmarshall network config: "), "{error}");
        }
        assert_eq!(Document::parse(br#"{"cniVersion":1}"#).expect_err("refused").code, Code::InvalidConfig);
        assert_eq!(Document::parse(b"{\"a\":\"\xff\"}").expect_err("refused").code, Code::Decode);
    }

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

    #[test]
    fn a_count_over_the_limit_is_refused_with_both_numbers() {
        assert_eq!(at_most(2, "items", "k", 2), Ok(()));
        let error = at_most(2, "items", "k", 3).expect_err("too many");
        assert_eq!(error, Error::new(Code::InvalidConfig, "k: expected at most 2 items, got 3"));
    }

    #[test]
    fn quotes_are_cut_between_characters() {
        assert_eq!(excerpt("short"), "short");
        let long = "ä".repeat(100_000);
        assert_eq!(excerpt(&long), "ä".repeat(QUOTED) + "…");
    }
}
