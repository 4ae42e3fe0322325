//! The node configuration: the keys that belong to the node. Its source is a file on the node or, for the primary
//! plugin, the runtime's configuration.
//!
//! An attachment's configuration that the node did not install is a request of its author: the node's blocks replace
//! those of pinned sub-plugins, and the bounds limit the others.

use super::block::{Block, BlockReader};
use super::block::{ItemList, json_error, wrong_type};
use super::document::Document;
use super::error::{Code, Error};
use super::netconf::{
    Bounds, Kubernetes, NODE_BOUNDS, NetConf, REQUEST, SUB_PLUGINS, blocks, is_of_this_plugin, is_primary, kind,
};
use super::request::CniCommand;
use super::version;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashSet};
use std::mem;
use std::path::PathBuf;

/// The node configuration file, which the plugin reads in each call. Only root can change it.
pub const NODE_CONFIGURATION: &str = "/var/lib/cni/detour/node.json";
/// The maximum size of the node configuration file, in bytes; one with a hundred namespaces has 3 KiB.
pub const NODE_CONFIGURATION_LIMIT: u64 = 64 << 10;

const EXCLUDED: &str = "exclude_namespaces";
/// The keys that a configuration does not have.
const NETWORKS: &str = "networks";
const PINNED: &str = "pinned";
const PRIMARY: &str = "primary";

/// The keys of this plugin that an attachment may set. Istio's keys mean the same as others of them, and the agent writes
/// the last one into the copy of the cluster network's list.
const ATTACHMENT: [&str; 7] =
    ["chain", "dialect", "log_level", "ambient_enabled", "native_nftables", "plugin_log_level", "cni_conf_dir"];

/// The keys that the node sets in the configuration of each attachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NodeConf {
    /// The source, for messages.
    #[serde(skip)]
    place: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    log_file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delegate_timeout_seconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    auto_dialect: Option<&'static str>,
    /// The sources of facts, and the excluded namespaces of all networks that are not in `networks`.
    kubernetes: Kubernetes,
    /// All networks that are not in `networks`.
    #[serde(flatten)]
    others: Network,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    networks: BTreeMap<String, Network>,
    /// The sub-plugins with `pod_overrides: false` in all attachments.
    pinned: Vec<String>,
    attachments_may_exclude_namespaces: bool,
    /// Whether the runtime calls this plugin as the primary plugin; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    primary: Option<bool>,
}

/// What the node's administrator decided for the pods of a network.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
struct Network {
    /// `None` for networks without keys of their own: the block `kubernetes` has their namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    exclude_namespaces: Option<Vec<String>>,
    /// The installed sub-plugin chain.
    chain: Vec<Map<String, Value>>,
    /// What pods may request.
    #[serde(flatten, serialize_with = "Bounds::serialize_top")]
    bounds: Bounds,
}

impl Network {
    /// Returns a network with keys of its own.
    fn of(conf: &NetConf) -> Self {
        let exclude_namespaces = Some(conf.kubernetes.exclude_namespaces.clone());
        let chain = conf.chain.iter().map(|block| block.keys.clone()).collect();
        Self { exclude_namespaces, chain, bounds: conf.bounds.clone() }
    }

    /// Returns the installed blocks of a pinned sub-plugin, or one with the defaults.
    fn pinned_blocks(&self, kind: &str) -> Vec<Map<String, Value>> {
        let mut blocks: Vec<_> = self.chain.iter().filter(|block| kind_of(block) == kind).cloned().collect();
        if blocks.is_empty() {
            blocks.push(Map::from_iter([("type".to_owned(), kind.into())]));
        }
        blocks.iter_mut().for_each(pin);
        blocks
    }
}

impl Document {
    /// Sets the node's keys in the configuration, as [`NodeConf::govern`] does.
    pub fn govern(&mut self, node: &NodeConf, program: &str) -> Option<String> {
        node.govern(&mut self.block.keys, None, program)
    }
}

impl NodeConf {
    /// Returns the keys of a configuration that the node's administrator wrote.
    #[must_use]
    pub fn from_configuration(conf: &NetConf) -> Self {
        let is_pinned = |kind: &&str| {
            let of_kind = |block: &&Block| block.kind() == *kind;
            conf.chain.iter().filter(of_kind).any(|block| block.keys.get("pod_overrides") == Some(&Value::Bool(false)))
        };
        Self {
            place: "the runtime's configuration".to_owned(),
            log_file: conf.log_file.clone(),
            delegate_timeout_seconds: Some(conf.delegate_timeout.as_secs()),
            auto_dialect: conf.auto_format.map(|format| format.name()),
            kubernetes: conf.kubernetes.clone(),
            others: Network { exclude_namespaces: None, ..Network::of(conf) },
            networks: BTreeMap::new(),
            pinned: SUB_PLUGINS.iter().copied().filter(is_pinned).map(str::to_owned).collect(),
            attachments_may_exclude_namespaces: conf.attachments_may_exclude_namespaces,
            primary: conf.primary.as_ref().map(|_| true),
        }
    }

    /// Returns the configuration for pods that start while the file `place` can't be used: attachments cannot set keys of
    /// the node, and the agent's pod is still recognized.
    #[must_use]
    pub fn without_file(conf: &NetConf, place: &str) -> Self {
        let Kubernetes { agent_namespace, agent_pod_prefixes, .. } = conf.kubernetes.clone();
        Self {
            place: place.to_owned(),
            kubernetes: Kubernetes { agent_namespace, agent_pod_prefixes, ..Kubernetes::default() },
            pinned: SUB_PLUGINS.map(str::to_owned).into(),
            primary: Some(false),
            ..Self::default()
        }
    }

    /// Returns the text of a node configuration file.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{:#}\n", json!(self))
    }

    /// Parses a node configuration file and returns it with its warnings, one line each. Its keys are parsed as those of a
    /// configuration. Unknown keys are warnings, so that later versions can add keys.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`] with `place`, the key and the expected values.
    pub fn parse(place: &str, text: &[u8]) -> Result<(Self, Vec<String>), Error> {
        let with_place = |error: Error| error.at(place);
        let not_json =
            |error| Error::new(Code::InvalidConfig, format!("{place}: invalid JSON: {}", json_error(&error)));
        match serde_json::from_slice(text).map_err(not_json)? {
            Value::Object(keys) => Self::read(place, keys).map_err(with_place),
            other => Err(with_place(wrong_type("node configuration", &other, "an object"))),
        }
    }

    fn read(place: &str, mut keys: Map<String, Value>) -> Result<(Self, Vec<String>), Error> {
        let own = [PINNED, PRIMARY, NETWORKS].into_iter().filter_map(|key| keys.shift_remove_entry(key)).collect();
        let own = Block { path: String::new(), keys: own };
        let own = own.reader();
        let pinned = own.list(PINNED)?.map(|list| list.items).unwrap_or_default();
        let conf = configuration(place, String::new(), keys)?;
        let mut node =
            Self { place: place.to_owned(), primary: own.boolean(PRIMARY)?, ..Self::from_configuration(&conf) };
        let mut warnings = conf.warnings;
        for (name, value) in own.block(NETWORKS)?.iter().flat_map(BlockReader::all) {
            let Block { path, keys } = Block::new(format!("{NETWORKS}.{name}"), value)?;
            let conf = configuration(place, path.clone(), keys)?;
            warnings.extend(conf.warnings.iter().map(|warning| format!("{path}.{warning}")));
            node.networks.insert(name.clone(), Network::of(&conf));
        }
        for kind in pinned {
            if !SUB_PLUGINS.contains(&kind.as_str()) {
                let expected = SUB_PLUGINS.join(", ");
                warnings.push(format!("{PINNED}: invalid value {kind:?}, ignored; expected one of {expected}"));
            } else if !node.pinned.contains(&kind) {
                node.pinned.push(kind);
            }
        }
        Ok((node, warnings.into_iter().map(|warning| format!("{place}: {warning}")).collect()))
    }

    /// Adds the configurations of further networks, by their names.
    #[must_use]
    pub fn with_networks(mut self, others: impl IntoIterator<Item = (String, Self)>) -> Self {
        for (name, other) in others {
            let is_pinned = |kind: &&str| [&self, &other].iter().any(|conf| conf.pinned.iter().any(|own| own == kind));
            self.pinned = SUB_PLUGINS.iter().copied().filter(is_pinned).map(str::to_owned).collect();
            let [own, other] = [&self, &other].map(|NodeConf { kubernetes, others, .. }| Network {
                exclude_namespaces: Some(kubernetes.exclude_namespaces.clone()),
                ..others.clone()
            });
            if json!(other) != json!(own) {
                self.networks.insert(name, other);
            }
        }
        self
    }

    fn network(&self, name: &str) -> &Network {
        self.networks.get(name).unwrap_or(&self.others)
    }

    /// Returns the bounds for requests to configurations of this network.
    #[must_use]
    pub fn bounds(&self, network: &str) -> &Bounds {
        &self.network(network).bounds
    }

    /// Returns the keys that the node sets, for messages.
    #[must_use]
    pub fn summary(&self) -> String {
        let is_set = |(_, value): &(&String, &Value)| ![json!([]), json!(false), json!({})].contains(value);
        let node = json!(self);
        let keys = node.as_object().into_iter().flatten().filter(is_set).map(|(key, _)| key.as_str());
        keys.collect::<Vec<_>>().join(", ")
    }

    /// Returns the same with `primary`, unless the configuration already sets it.
    #[must_use]
    pub fn with_primary(self, primary: Option<bool>) -> Self {
        Self { primary: self.primary.or(primary), ..self }
    }

    /// Returns whether the runtime does not call this plugin as the primary plugin of the node.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.primary == Some(false)
    }

    /// Sets the node's keys in an attachment's configuration. Returns a warning if the attachment sets keys that only the
    /// node can set. `network` is the name of its configuration list, and `program` the name under which the binary was
    /// started.
    pub fn govern(&self, conf: &mut Map<String, Value>, network: Option<&str>, program: &str) -> Option<String> {
        let name = conf.get("name").and_then(Value::as_str).or(network).unwrap_or_default();
        let network = self.network(name);
        let mut node = self.clone();
        if let Some(excluded) = &network.exclude_namespaces {
            node.kubernetes.exclude_namespaces.clone_from(excluded);
        }
        node.others.bounds.clone_from(&network.bounds);
        let mut ignored = Vec::new();
        node.add_excluded(conf, &mut ignored);
        let node = json!(node);
        let may_set = |key: &str| ATTACHMENT.contains(&key) || !is_of_this_plugin(key);
        let (kept, others): (Map<_, _>, Map<_, _>) = mem::take(conf).into_iter().partition(|(key, _)| may_set(key));
        for (key, written) in others {
            match (key.as_str(), written) {
                (NODE_BOUNDS | EXCLUDED, _) => {}
                ("kubernetes", Value::Object(keys)) => {
                    let others = keys.iter().filter(|(key, _)| *key != EXCLUDED);
                    let different = others.filter(|(key, written)| is_different(&node["kubernetes"][key], written));
                    ignored.extend(different.map(|(key, _)| format!("kubernetes.{key}")));
                }
                (_, written) if is_different(&node[&key], &written) => ignored.push(key),
                _ => {}
            }
        }
        *conf = kept;
        for key in ["log_file", "delegate_timeout_seconds", "auto_dialect", "kubernetes"] {
            conf.extend(node.get(key).map(|value| (key.to_owned(), value.clone())));
        }
        conf.insert(NODE_BOUNDS.to_owned(), json!(network.bounds));
        self.govern_chain(conf, network, program, &mut ignored);
        let place = &self.place;
        (!ignored.is_empty())
            .then(|| format!("ignored keys: {}: only the node can set them, in {place}", ignored.join(", ")))
    }

    /// Adds the namespaces that an attachment excludes to the node's, if it may exclude any.
    fn add_excluded(&mut self, conf: &Map<String, Value>, ignored: &mut Vec<String>) {
        let own = &mut self.kubernetes.exclude_namespaces;
        let places =
            [("kubernetes.", conf.get("kubernetes").and_then(|keys| keys.get(EXCLUDED))), ("", conf.get(EXCLUDED))];
        for (place, written) in places {
            let Some(written) = written.filter(|value| !value.is_null()) else { continue };
            let list = ItemList::from_json(EXCLUDED, written).map(|list| list.items).unwrap_or_default();
            // Both lists can be long, and the author of a definition decides on one of them.
            let mut known: HashSet<String> = own.iter().cloned().collect();
            let excludes_all = known.contains("*");
            let new: Vec<String> =
                list.into_iter().filter(|name| !excludes_all && known.insert(name.clone())).collect();
            if self.attachments_may_exclude_namespaces {
                own.extend(new);
            } else if !new.is_empty() {
                ignored.push(format!("{place}{EXCLUDED}"));
            }
        }
    }

    /// Replaces blocks of pinned sub-plugins, and marks the others as requests, unless the chain is the installed one.
    fn govern_chain(&self, conf: &mut Map<String, Value>, network: &Network, program: &str, ignored: &mut Vec<String>) {
        let keys = BlockReader::of_keys("".into(), conf);
        // The plugin refuses an invalid chain later.
        let written = kind(&keys, program).and_then(|kind| blocks(&keys, &kind));
        let Ok(own) = written else { return };
        let is_installed = own.iter().map(|block| &block.keys).eq(&network.chain);
        for (i, block) in own.iter().enumerate().filter(|(_, block)| self.pins(block) && block.keys.len() > 1) {
            let mut pinned = block.keys.clone();
            pin(&mut pinned);
            if !network.pinned_blocks(block.kind()).contains(&pinned) {
                ignored.push(format!("chain[{i}] ({} is pinned)", block.kind()));
            }
        }
        let mut chain = self.with_blocks_of(network, own, |_| true);
        for block in &mut chain {
            if !is_installed && SUB_PLUGINS.contains(&block.kind()) && !self.pins(block) {
                block.keys.insert(REQUEST.to_owned(), true.into());
            }
        }
        conf.insert("chain".to_owned(), chain.into_iter().map(|block| Value::Object(block.keys)).collect());
    }

    fn pins(&self, block: &Block) -> bool {
        self.pinned.iter().any(|pinned| pinned == block.kind())
    }

    /// Returns the blocks of a recorded configuration with those of the node for pinned sub-plugins; with `only_requests`,
    /// only those that a definition's author requested are replaced.
    #[must_use]
    pub fn with_pinned(&self, network: &str, blocks: Vec<Block>, only_requests: bool) -> Vec<Block> {
        self.with_blocks_of(self.network(network), blocks, |block| !only_requests || block.keys.contains_key(REQUEST))
    }

    /// Replaces the blocks of pinned sub-plugins that `is_replaced` selects.
    fn with_blocks_of(
        &self,
        network: &Network,
        blocks: Vec<Block>,
        is_replaced: impl Fn(&Block) -> bool,
    ) -> Vec<Block> {
        let (mut chain, mut replaced) = (Vec::new(), HashSet::new());
        for block in blocks {
            if !self.pins(&block) || !is_replaced(&block) {
                chain.push(block);
            } else if replaced.insert(block.kind().to_owned()) {
                let of_node = network.pinned_blocks(block.kind()).into_iter();
                chain.extend(of_node.map(|keys| Block { path: block.path.clone(), keys }));
            }
        }
        chain
    }

    /// Applies [`Self::govern`] to every configuration of an attachment whose type is one of `own`: the attachment's own
    /// configuration, those of its configuration list, and nested ones in `chain`. Returns `None` if there is no such
    /// configuration, otherwise the changed one with its warnings.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`]: a configuration would make this the primary plugin.
    pub fn govern_all(&self, conf: &Value, own: &[&str]) -> Result<Option<(Value, Vec<String>)>, Error> {
        let (mut conf, mut warnings, mut found) = (conf.clone(), Vec::new(), false);
        let name = conf.get("name").and_then(Value::as_str).map(str::to_owned);
        let plugins = match conf.get("type") {
            Some(Value::String(kind)) if !kind.is_empty() => vec![&mut conf],
            _ => conf.get_mut("plugins").and_then(Value::as_array_mut).into_iter().flatten().collect(),
        };
        for plugin in plugins {
            found |= self.govern_nested(plugin, name.as_deref(), own, &mut warnings)?;
        }
        Ok(found.then_some((conf, warnings)))
    }

    fn govern_nested(
        &self,
        plugin: &mut Value,
        network: Option<&str>,
        own: &[&str],
        warnings: &mut Vec<String>,
    ) -> Result<bool, Error> {
        let Some(keys) = plugin.as_object_mut() else { return Ok(false) };
        let mut found = own.contains(&kind_of(keys));
        if found {
            if is_primary(keys) {
                return Err(primary_in_attachment());
            }
            warnings.extend(self.govern(keys, network, ""));
        }
        for nested in keys.get_mut("chain").and_then(Value::as_array_mut).into_iter().flatten() {
            found |= self.govern_nested(nested, network, own, warnings)?;
        }
        Ok(found)
    }
}

/// Returns the error for an attachment that would make this the primary plugin, whose keys all belong to the
/// node.
#[must_use]
pub fn primary_in_attachment() -> Error {
    Error::new(Code::InvalidConfig, "clusterNetwork, delegates: only the runtime's configuration can set these keys")
}

/// Parses keys of the node as those of a configuration.
fn configuration(place: &str, path: String, mut keys: Map<String, Value>) -> Result<NetConf, Error> {
    keys.entry("chain").or_insert_with(|| json!([]));
    keys.extend([("name", "node"), ("type", "detour")].map(|(key, value)| (key.to_owned(), value.into())));
    let document = Document { cni_version: version::NEWEST.to_owned(), block: Block { path, keys } };
    let conf = NetConf::from_document(&document, CniCommand::Status, "")?;
    let bounds = Bounds { set_by: format!("the node configuration {place}"), of_node: true, ..conf.bounds };
    Ok(NetConf { bounds, ..conf })
}

fn kind_of(block: &Map<String, Value>) -> &str {
    block.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn pin(block: &mut Map<String, Value>) {
    block.insert("pod_overrides".to_owned(), false.into());
}

/// Returns whether an attachment sets another value than the node. A list or a number can also be written as a string.
fn is_different(node: &Value, written: &Value) -> bool {
    let items = |value| ItemList::from_json("", value).map(|list| list.items);
    let is_same = node == written || matches!((items(node), items(written)), (Ok(a), Ok(b)) if a == b);
    !written.is_null() && written != "" && !is_same
}

#[cfg(test)]
mod tests;
