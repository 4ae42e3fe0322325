//! The sub-plugin chain of a configuration, which is by default that of its type, and the bounds of what pods may request.
//! The sub-plugins parse the blocks and the grants.

use super::keys::text;
use crate::cni::block::{Block, BlockReader};
use crate::cni::block::{at_most, wrong_type};
use crate::cni::error::{Code, Error};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};

/// The name of the program; an executable of this name is always this plugin.
pub const PROGRAM: &str = "detour";

/// The types of configurations that this plugin has default sub-plugins for.
pub const OWN_TYPES: [&str; 3] = ["detour", "istio-cni", "excludedns"];

/// The types of sub-plugins; a block of any other type runs an executable.
pub const SUB_PLUGINS: [&str; 6] =
    ["istio-redirect", "uid-exclude", "dns-exclude", "container-exclude", "destination-exclude", "mesh-guard"];

/// The maximum number of blocks in `chain`.
const MAX_BLOCKS: usize = 32;

/// Reads `type`; if it is missing, the name under which the binary was started counts.
pub(in crate::cni) fn kind(reader: &BlockReader<'_>, program: &str) -> Result<String, Error> {
    if let Some(kind) = text(reader, "type")? {
        return Ok(kind.to_owned());
    }
    if default_chain(program).is_some() {
        return Ok(program.to_owned());
    }
    let msg = format!(
        "type: missing, and the name of the binary, {program:?}, is not a known type; expected one of {}",
        OWN_TYPES.join(", ")
    );
    Err(Error::new(Code::InvalidConfig, msg))
}

/// Reads the blocks of `chain`, or returns the default ones of the type `kind`.
pub(in crate::cni) fn blocks(reader: &BlockReader<'_>, kind: &str) -> Result<Vec<Block>, Error> {
    let blocks: Vec<Block> = match reader.value("chain") {
        Some(Value::Array(items)) => {
            let chain = reader.place("chain");
            at_most(MAX_BLOCKS, "sub-plugins and executables", &chain, items.len())?;
            let block = |(i, item)| Block::new(format!("{chain}[{i}]"), item);
            items.iter().enumerate().map(block).collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong_type(&reader.place("chain"), other, "an array of objects")),
        None => {
            let expected = || format!("one of {}, or any other type together with chain", OWN_TYPES.join(", "));
            return default_chain(kind).ok_or_else(|| wrong_type("type", &Value::from(kind), &expected()));
        }
    };
    blocks.iter().try_for_each(check_type)?;
    Ok(blocks)
}

/// Returns whether the block is that of the redirection.
pub(super) fn redirects(block: &Block) -> bool {
    block.keys.get("type").and_then(Value::as_str) == Some(SUB_PLUGINS[0])
}

/// Checks the type of a block. The executable of a type is searched in `CNI_PATH`, so a type cannot contain `/`.
fn check_type(block: &Block) -> Result<(), Error> {
    let place = || format!("{}.type", block.path);
    let expected = || format!("one of {}, or the name of an executable, without /", SUB_PLUGINS.join(", "));
    match block.keys.get("type") {
        Some(Value::String(kind)) if !kind.is_empty() && !kind.contains('/') => Ok(()),
        Some(other) => Err(wrong_type(&place(), other, &expected())),
        None => Err(Error::new(Code::InvalidConfig, format!("{}: missing; expected {}", place(), expected()))),
    }
}

/// Returns the default blocks of a type; `None` for a type that requires `chain`.
fn default_chain(kind: &str) -> Option<Vec<Block>> {
    let blocks = match kind {
        "detour" => {
            vec![json!({"type": "istio-redirect"}), json!({"type": "uid-exclude"}), json!({"type": "dns-exclude"})]
        }
        "istio-cni" => vec![json!({"type": "istio-redirect"})],
        "excludedns" => {
            vec![json!({"type": "uid-exclude", "uids": ["1337"]}), json!({"type": "dns-exclude", "uids": ["1337"]})]
        }
        _ => return None,
    };
    let path = |i| format!("default chain[{i}] of type {kind}");
    blocks.iter().enumerate().map(|(i, block)| Block::new(path(i), block).ok()).collect()
}

/// The key with grants, at the top level and in blocks of sub-plugins.
pub const ALLOW: &str = "allow";
/// The key that decides about requests outside the bounds.
pub const OUTSIDE_BOUNDS: &str = "outside_bounds";
/// The key in which the node's bounds replace those of an attachment, only in memory.
pub(in crate::cni) const NODE_BOUNDS: &str = "node_bounds";
/// The key of a block that the bounds limit, because the node did not install it; only in memory.
pub const REQUEST: &str = "is_request";

/// What happens to a pod with a request outside the bounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OutsideBounds {
    /// Its ADD fails.
    #[default]
    Reject,
    /// It starts without the request.
    Ignore,
}

impl OutsideBounds {
    const NAMES: [(&str, Self); 2] = [("reject", Self::Reject), ("ignore", Self::Ignore)];
}

/// The bounds of a configuration or of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Bounds {
    /// Who sets them, for messages.
    pub set_by: String,
    /// Whether that is the node configuration.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub of_node: bool,
    /// `allow` at the top level.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow: Option<Value>,
    /// `allow` in blocks of sub-plugins.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<BlockBounds>,
    /// `outside_bounds`.
    pub outside: OutsideBounds,
}

/// The bounds of one sub-plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockBounds {
    /// The `type` of the block.
    pub kind: String,
    /// The path of its key `allow`.
    pub place: String,
    /// The value.
    pub allow: Value,
}

impl Bounds {
    /// No bounds but the default ones.
    pub const DEFAULT: Self =
        Self { set_by: String::new(), of_node: false, allow: None, blocks: Vec::new(), outside: OutsideBounds::Reject };

    /// Reads the bounds of a configuration: the node's if [`NodeConf::govern`](crate::cni::NodeConf::govern) replaced
    /// them, or its own.
    pub(super) fn of_configuration(keys: &BlockReader<'_>, chain: &[Block], name: &str) -> Result<Self, Error> {
        match keys.value(NODE_BOUNDS) {
            Some(of_node) => serde_json::from_value(of_node.clone())
                .map_err(|_| wrong_type(NODE_BOUNDS, of_node, "no value: it is not a key of configurations")),
            None => Self::read(keys, chain, format!("configuration {name:?}")),
        }
    }

    /// Reads the keys at the top level and those of the blocks in `chain`. `set_by` is for messages.
    pub(in crate::cni) fn read(keys: &BlockReader<'_>, chain: &[Block], set_by: String) -> Result<Self, Error> {
        let of_block = |block: &Block| {
            let allow = block.keys.get(ALLOW).filter(|value| !value.is_null())?.clone();
            let kind = block.keys.get("type")?.as_str()?.to_owned();
            // The key belongs to an executable.
            if !SUB_PLUGINS.contains(&kind.as_str()) {
                return None;
            }
            Some(BlockBounds { kind, place: format!("{}.{ALLOW}", block.path), allow })
        };
        Ok(Self {
            set_by,
            of_node: false,
            allow: keys.value(ALLOW).cloned(),
            blocks: chain.iter().filter_map(of_block).collect(),
            outside: keys.one_of(OUTSIDE_BOUNDS, &OutsideBounds::NAMES)?.unwrap_or_default(),
        })
    }

    /// Returns whether a key of them is set.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.allow.is_some() || !self.blocks.is_empty() || self.outside != OutsideBounds::default()
    }

    /// Writes the keys at the top level as a configuration has them.
    pub(in crate::cni) fn serialize_top<S: Serializer>(bounds: &Self, serializer: S) -> Result<S::Ok, S::Error> {
        let outside = (bounds.outside != OutsideBounds::default()).then(|| json!(bounds.outside));
        let keys = [(ALLOW, bounds.allow.clone()), (OUTSIDE_BOUNDS, outside)];
        serializer.collect_map(keys.into_iter().filter_map(|(key, value)| Some((key, value?))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(conf: &Value, program: &str) -> Result<(String, Vec<Block>), Error> {
        let top = Block::new("", conf).expect("an object");
        let kind = kind(&top.reader(), program)?;
        blocks(&top.reader(), &kind).map(|blocks| (kind, blocks))
    }

    fn types(conf: &Value, program: &str) -> Vec<String> {
        let (_, blocks) = read(conf, program).expect("accepted");
        blocks.iter().map(|b| b.keys["type"].as_str().expect("a string").to_owned()).collect()
    }

    #[test]
    fn each_own_type_has_default_sub_plugins() {
        assert_eq!(types(&json!({"type": "istio-cni"}), "x"), ["istio-redirect"]);
        assert_eq!(types(&json!({"type": "detour"}), "x"), ["istio-redirect", "uid-exclude", "dns-exclude"]);
        let (_, blocks) = read(&json!({"type": "excludedns"}), "x").expect("accepted");
        assert_eq!(Value::Object(blocks[0].keys.clone()), json!({"type": "uid-exclude", "uids": ["1337"]}));
        assert_eq!(Value::Object(blocks[1].keys.clone()), json!({"type": "dns-exclude", "uids": ["1337"]}));
    }

    #[test]
    fn the_name_of_the_binary_counts_only_without_a_type() {
        assert_eq!(types(&json!({}), "istio-cni"), ["istio-redirect"]);
        assert_eq!(types(&json!({"type": ""}), "istio-cni"), ["istio-redirect"]);
        assert_eq!(types(&json!({"type": "istio-cni"}), "excludedns"), ["istio-redirect"]);
        let error = read(&json!({}), "renamed").expect_err("refused");
        assert!(error.msg.starts_with("type: ") && error.msg.contains(r#""renamed""#), "{error}");
    }

    #[test]
    fn the_blocks_of_chain_are_unchanged() {
        let chain = json!([{"type": "uid-exclude", "uids": [7]}, {"type": "my-plugin", "x": {}}]);
        let (kind, blocks) = read(&json!({"type": "v2-5-istio-cni", "chain": chain}), "x").expect("accepted");
        assert_eq!(kind, "v2-5-istio-cni");
        assert_eq!(blocks.iter().map(|b| b.path.as_str()).collect::<Vec<_>>(), ["chain[0]", "chain[1]"]);
        assert_eq!(Value::Object(blocks[1].keys.clone()), chain[1]);
        assert!(types(&json!({"type": "detour", "chain": []}), "x").is_empty());
    }

    #[test]
    fn errors_have_the_path_of_the_key() {
        for (conf, place) in [
            (json!({"type": "flannel"}), r#"type: invalid value "flannel""#),
            (json!({"type": 7}), "type: invalid value 7"),
            (json!({"type": "detour", "chain": {}}), "chain: invalid value {}"),
            (json!({"type": "detour", "chain": ["x"]}), r#"chain[0]: invalid value "x""#),
            (json!({"type": "detour", "chain": [{"type": "a"}, {}]}), "chain[1].type: missing"),
            (json!({"type": "detour", "chain": [{"type": "../sh"}]}), r#"chain[0].type: invalid value "../sh""#),
            (json!({"type": "detour", "chain": [{"type": ""}]}), r#"chain[0].type: invalid value """#),
            (json!({"type": "detour", "chain": [{"type": 7}]}), "chain[0].type: invalid value 7"),
        ] {
            let error = read(&conf, "x").expect_err("refused");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(place) && error.msg.contains("; expected "), "{error}");
        }
    }
}
