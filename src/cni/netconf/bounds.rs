//! The keys that bound what pods may request: `allow` and `outside_bounds`. The sub-plugins parse the grants.

use super::sub_plugins::SUB_PLUGINS;
use crate::cni::block::{Block, BlockReader};
use crate::cni::error::Error;
use crate::cni::list::wrong_type;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};

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
