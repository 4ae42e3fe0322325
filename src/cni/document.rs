//! The JSON object on stdin, before anything but its version is understood: what is needed to
//! answer at all, even with an error.

use super::list::wrong_type;
use super::netconf::{PRIMARY_KEYS, is_primary};
use super::{Block, Code, Error, NodeConf, excess, version};
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
}
