//! The node configuration: keys that belong to the node and that configurations of attachments cannot set. Their
//! source is a file on the node or, for the primary plugin, the runtime's configuration.

mod govern;

use super::block::{Block, BlockReader};
use super::error::{Code, Error};
use super::list::wrong_type;
use super::netconf::{
    ALLOW, AUTO_DIALECT, Bounds, Kubernetes, NetConf, RuleFormat, SUB_PLUGINS, absolute, delegate_timeout,
};
use crate::suggest::did_you_mean;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The node configuration file, which the plugin reads in each call. Only root can change it.
pub const NODE_CONFIGURATION: &str = "/var/lib/cni/detour/node.json";
/// The maximum size of the node configuration file, in bytes; one with a hundred namespaces has 3 KiB.
pub const NODE_CONFIGURATION_LIMIT: u64 = 64 << 10;

/// The keys of the file in `kubernetes`, besides [`EXCLUDED`]. Attachments may set those that the file does not set.
const KUBERNETES: [&str; 7] = [
    "kubeconfig",
    "agent_socket",
    "manifests_dir",
    "cni_bin_dir",
    "timeout_seconds",
    "agent_namespace",
    "agent_pod_prefixes",
];
/// The sources of pod facts: a node that sets one of them thereby sets all of them.
const SOURCES: [&str; 3] = ["kubeconfig", "agent_socket", "manifests_dir"];
/// The keys of the file at the top level that attachments may set if the file does not set them.
const TOP: [&str; 3] = ["log_file", "delegate_timeout_seconds", AUTO_DIALECT];
const EXCLUDED: &str = "exclude_namespaces";
/// Excluded namespaces of single networks.
const NETWORKS: &str = "networks";
const MAY_EXCLUDE: &str = "attachments_may_exclude_namespaces";

/// The keys that the node sets, and those that it leaves to attachments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeConf {
    /// The source, for messages.
    place: String,
    /// The keys of [`TOP`].
    top: Map<String, Value>,
    /// The keys of [`KUBERNETES`].
    kubernetes: Map<String, Value>,
    exclude_namespaces: Vec<String>,
    /// What pods may request.
    bounds: Bounds,
    /// The networks for which [`Self::exclude_namespaces`] and [`Self::bounds`] do not apply.
    networks: BTreeMap<String, NetworkKeys>,
    /// Sub-plugins with `pod_overrides: false` in all attachments.
    pinned: Vec<String>,
    attachments_may_exclude_namespaces: bool,
    /// Whether the runtime calls this plugin as the primary plugin; `None` if unknown.
    primary: Option<bool>,
    /// Whether attachments cannot set the node's other keys either.
    exhaustive: bool,
}

/// The keys of one network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct NetworkKeys {
    exclude_namespaces: Vec<String>,
    bounds: Bounds,
}

impl NetworkKeys {
    fn keys(&self) -> Map<String, Value> {
        let mut keys = self.bounds.keys();
        keys.insert(EXCLUDED.into(), json!(self.exclude_namespaces));
        keys
    }
}

impl NodeConf {
    /// Returns the keys of a configuration that the node's administrator wrote. Attachments cannot set the node's other
    /// keys either.
    #[must_use]
    pub fn from_configuration(conf: &NetConf) -> Self {
        let Kubernetes { timeout, agent_namespace, agent_pod_prefixes, exclude_namespaces, .. } = &conf.kubernetes;
        let path = |path: &Option<PathBuf>| path.as_ref().map(|path| json!(path.to_string_lossy()));
        let kubernetes = [
            ("kubeconfig", path(&conf.kubernetes.kubeconfig)),
            ("agent_socket", path(&conf.kubernetes.agent_socket)),
            ("manifests_dir", path(&conf.kubernetes.manifests_dir)),
            ("cni_bin_dir", path(&conf.kubernetes.cni_bin_dir)),
            ("timeout_seconds", Some(timeout.as_secs().into())),
            ("agent_namespace", agent_namespace.as_deref().map(Value::from)),
            ("agent_pod_prefixes", Some(json!(agent_pod_prefixes))),
        ];
        let top = [
            ("log_file", path(&conf.log_file)),
            ("delegate_timeout_seconds", Some(conf.delegate_timeout.as_secs().into())),
            (AUTO_DIALECT, conf.auto_format.map(|format| format.name().into())),
        ];
        let is_pinned = |kind: &&str| {
            let of_kind = |block: &&Block| block.keys.get("type").is_some_and(|own| own == kind);
            conf.chain.iter().filter(of_kind).any(|block| block.keys.get("pod_overrides") == Some(&Value::Bool(false)))
        };
        Self {
            place: "the runtime's configuration".to_owned(),
            top: present(top),
            kubernetes: present(kubernetes),
            exclude_namespaces: exclude_namespaces.clone(),
            bounds: conf.bounds.clone(),
            networks: BTreeMap::new(),
            pinned: SUB_PLUGINS.iter().copied().filter(is_pinned).map(str::to_owned).collect(),
            attachments_may_exclude_namespaces: conf.attachments_may_exclude_namespaces,
            primary: conf.primary.as_ref().map(|_| true),
            exhaustive: true,
        }
    }

    /// Returns the configuration for pods that start while the file `place` can't be used: attachments cannot set keys of
    /// the node, and the agent's pod is still recognized.
    #[must_use]
    pub fn without_file(conf: &NetConf, place: &str) -> Self {
        let mut kubernetes = Self::from_configuration(conf).kubernetes;
        kubernetes.retain(|key, _| ["agent_namespace", "agent_pod_prefixes"].contains(&key.as_str()));
        Self {
            place: place.to_owned(),
            kubernetes,
            pinned: SUB_PLUGINS.map(str::to_owned).into(),
            primary: Some(false),
            exhaustive: true,
            ..Self::default()
        }
    }

    /// Returns the text of a node configuration file.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{:#}\n", self.keys())
    }

    /// Returns the content of a node configuration file.
    fn keys(&self) -> Value {
        let mut keys = self.top.clone();
        let mut kubernetes = self.kubernetes.clone();
        kubernetes.insert(EXCLUDED.into(), json!(self.exclude_namespaces));
        keys.insert("kubernetes".into(), kubernetes.into());
        keys.extend(self.bounds.keys());
        if !self.networks.is_empty() {
            let network = |(name, network): (&String, &NetworkKeys)| (name.clone(), network.keys().into());
            keys.insert(NETWORKS.into(), Map::from_iter(self.networks.iter().map(network)).into());
        }
        keys.insert("pinned".into(), json!(self.pinned));
        keys.insert(MAY_EXCLUDE.into(), self.attachments_may_exclude_namespaces.into());
        keys.extend(self.primary.map(|primary| ("primary".to_owned(), primary.into())));
        Value::Object(keys)
    }

    /// Parses a node configuration file and returns it with its warnings, one line each. Unknown keys are warnings, so
    /// that later versions can add keys.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`] with `place`, the key and the expected values.
    pub fn parse(place: &str, text: &[u8]) -> Result<(Self, Vec<String>), Error> {
        let with_place = |error: Error| Error { msg: format!("{place}: {}", error.msg), ..error };
        let not_json = |error| Error::new(Code::InvalidConfig, format!("{place}: invalid JSON: {error}"));
        let value: Value = serde_json::from_slice(text).map_err(not_json)?;
        let keys = BlockReader::new("", &value)
            .map_err(|_| with_place(wrong_type("node configuration", &value, "an object")))?;
        Self::read(place, &keys).map_err(with_place)
    }

    fn read(place: &str, keys: &BlockReader<'_>) -> Result<(Self, Vec<String>), Error> {
        let mut warnings = Vec::new();
        let read = Kubernetes::read(keys, &mut warnings)?;
        absolute(keys, "log_file")?;
        delegate_timeout(keys)?;
        RuleFormat::read_auto(keys)?;
        let written = keys.block("kubernetes")?;
        let written = written.as_ref().map(BlockReader::all);
        let value_of = |from: &Map<String, Value>, key: &str| from.get(key).filter(|value| !value.is_null()).cloned();
        let node = Self {
            place: place.to_owned(),
            top: present(TOP.map(|key| (key, value_of(keys.all(), key)))),
            kubernetes: present(KUBERNETES.map(|key| (key, written.and_then(|written| value_of(written, key))))),
            exclude_namespaces: read.exclude_namespaces,
            bounds: bounds(keys, place, &mut warnings)?,
            networks: networks(keys, place, &mut warnings)?,
            pinned: keys.list("pinned")?.map(|list| list.items).unwrap_or_default(),
            attachments_may_exclude_namespaces: keys.boolean(MAY_EXCLUDE)?.unwrap_or(false),
            primary: keys.boolean("primary")?,
            exhaustive: false,
        };
        // Keys that belong to attachments, and istio-cni's equivalents of the node's keys.
        for key in ["cni_agent_run_dir", "pod_namespace"] {
            if keys.all().contains_key(key) {
                warnings.push(format!("{key}: unknown key, ignored"));
            }
        }
        if written.is_some_and(|written| written.contains_key("cluster_dns")) {
            warnings.push("kubernetes.cluster_dns: unknown key, ignored".to_owned());
        }
        let known = keys.known();
        let unknown = |key| format!("{key}: unknown key, ignored{}", did_you_mean(key, known.iter().copied()));
        warnings.extend(keys.unknown().into_iter().map(unknown));
        let unknown = node.pinned.iter().filter(|kind| !SUB_PLUGINS.contains(&kind.as_str()));
        let expected = SUB_PLUGINS.join(", ");
        warnings.extend(unknown.map(|kind| {
            let suggestion = did_you_mean(kind, SUB_PLUGINS);
            format!("pinned: invalid value {kind:?}, ignored; expected one of {expected}{suggestion}")
        }));
        Ok((node, warnings.into_iter().map(|warning| format!("{place}: {warning}")).collect()))
    }

    /// Adds the configurations of further networks, by their names.
    #[must_use]
    pub fn with_networks(mut self, others: impl IntoIterator<Item = (String, Self)>) -> Self {
        for (network, other) in others {
            let is_pinned = |kind: &&str| [&self, &other].iter().any(|conf| conf.pinned.iter().any(|own| own == kind));
            self.pinned = SUB_PLUGINS.iter().copied().filter(is_pinned).map(str::to_owned).collect();
            let own = NetworkKeys { exclude_namespaces: self.exclude_namespaces.clone(), bounds: self.bounds.clone() };
            let other = NetworkKeys { exclude_namespaces: other.exclude_namespaces, bounds: other.bounds };
            if other.keys() != own.keys() {
                self.networks.insert(network, other);
            }
        }
        self
    }

    /// Returns the namespaces whose pods are skipped by configurations of this network.
    fn excluded(&self, network: Option<&str>) -> &[String] {
        let of_network = network.and_then(|network| self.networks.get(network));
        of_network.map_or(&self.exclude_namespaces, |network| &network.exclude_namespaces)
    }

    /// Returns the bounds for requests to configurations of this network, if the node sets bounds.
    #[must_use]
    pub fn bounds(&self, network: Option<&str>) -> Option<&Bounds> {
        let of_network = network.and_then(|network| self.networks.get(network));
        self.sets_bounds().then(|| of_network.map_or(&self.bounds, |network| &network.bounds))
    }

    fn sets_bounds(&self) -> bool {
        self.bounds.is_set() || self.networks.values().any(|network| network.bounds.is_set())
    }

    /// Returns a summary of the keys that the node sets, for messages.
    #[must_use]
    pub fn summary(&self) -> String {
        let kubernetes = self.kubernetes.keys().map(|key| format!("kubernetes.{key}"));
        let keys: Vec<_> = self.top.keys().cloned().chain(kubernetes).collect();
        let keys = if keys.is_empty() { "no paths".to_owned() } else { keys.join(", ") };
        let excluded = match self.exclude_namespaces.as_slice() {
            [] => String::new(),
            names => format!("; excludes {}", names.join(", ")),
        };
        let pinned = if self.pinned.is_empty() { String::new() } else { format!("; pins {}", self.pinned.join(", ")) };
        let network = |(name, network): (&String, &NetworkKeys)| {
            format!("; excludes {} for network {name}", network.exclude_namespaces.join(", "))
        };
        let networks: String = self.networks.iter().map(network).collect();
        let bounds = if self.sets_bounds() { "; bounds what pods may request" } else { "" };
        format!("{keys}{excluded}{networks}{pinned}{bounds}")
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
}

/// Returns the error for an attachment that would make this the primary plugin, whose keys all belong to the
/// node.
#[must_use]
pub fn primary_in_attachment() -> Error {
    Error::new(Code::InvalidConfig, "clusterNetwork, delegates: only the runtime's configuration can set these keys")
}

/// Reads [`NETWORKS`].
fn networks(
    keys: &BlockReader<'_>,
    place: &str,
    warnings: &mut Vec<String>,
) -> Result<BTreeMap<String, NetworkKeys>, Error> {
    let Some(block) = keys.block(NETWORKS)? else { return Ok(BTreeMap::new()) };
    let mut networks = BTreeMap::new();
    for (name, value) in block.all() {
        let keys = BlockReader::new(format!("{NETWORKS}.{name}"), value)?;
        let exclude_namespaces = keys.list(EXCLUDED)?.map(|list| list.items).unwrap_or_default();
        let bounds = bounds(&keys, place, warnings)?;
        warnings.extend(keys.unknown().into_iter().map(|key| format!("{NETWORKS}.{name}.{key}: unknown key, ignored")));
        networks.insert(name.clone(), NetworkKeys { exclude_namespaces, bounds });
    }
    Ok(networks)
}

/// Reads the bounds. The blocks in `chain` have no other keys.
fn bounds(keys: &BlockReader<'_>, place: &str, warnings: &mut Vec<String>) -> Result<Bounds, Error> {
    let blocks = match keys.value("chain") {
        None => Vec::new(),
        Some(Value::Array(items)) => {
            let block = |(i, item)| Block::new(format!("{}[{i}]", keys.place("chain")), item);
            items.iter().enumerate().map(block).collect::<Result<Vec<_>, _>>()?
        }
        Some(other) => return Err(wrong_type(&keys.place("chain"), other, "an array of objects")),
    };
    for block in &blocks {
        let others = block.keys.keys().filter(|key| !["type", ALLOW].contains(&key.as_str()));
        warnings.extend(others.map(|key| format!("{}.{key}: unknown key, ignored", block.path)));
    }
    let bounds = Bounds::read(keys, &blocks, format!("the node configuration {place}"))?;
    Ok(Bounds { of_node: true, ..bounds })
}

fn present<const N: usize>(keys: [(&str, Option<Value>); N]) -> Map<String, Value> {
    keys.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cni::CniCommand;

    pub(in crate::cni) fn node(text: &Value) -> NodeConf {
        let (node, warnings) = NodeConf::parse("/node.json", text.to_string().as_bytes()).expect("accepted");
        assert_eq!(warnings, [""; 0]);
        node
    }

    #[test]
    fn the_keys_of_a_configuration_can_be_written_and_read_back() {
        let conf = json!({
            "name": "n", "type": "detour", "log_file": "/var/log/d.log", "exclude_namespaces": ["a"],
            "attachments_may_exclude_namespaces": true, "clusterNetwork": "ovn", "binDir": "/b", "kubeconfig": "/k",
            "chain": [{"type": "uid-exclude", "pod_overrides": false}, {"type": "istio-redirect"},
                {"type": "dns-exclude", "allow": {"resolvers": "all"}}],
            "allow": [{"uids": 7}], "outside_bounds": "ignore",
        });
        let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("accepted");
        let own = NodeConf::from_configuration(&conf);
        let wanted = json!({
            "log_file": "/var/log/d.log", "delegate_timeout_seconds": 60,
            "kubernetes": {
                "kubeconfig": "/k", "cni_bin_dir": "/b", "timeout_seconds": 10,
                "agent_pod_prefixes": ["detour-agent-", "istio-cni-node-"], "exclude_namespaces": ["a"],
            },
            "allow": [{"uids": 7}], "outside_bounds": "ignore",
            "chain": [{"type": "dns-exclude", "allow": {"resolvers": "all"}}],
            "pinned": ["uid-exclude"], "attachments_may_exclude_namespaces": true, "primary": true,
        });
        assert_eq!(serde_json::from_str::<Value>(&own.text()).expect("JSON"), wanted);
        let read = node(&wanted);
        let bounds = read.bounds.clone();
        assert_eq!(read, NodeConf { place: "/node.json".into(), exhaustive: false, bounds, ..own });
        assert!(!read.is_attached() && node(&json!({"primary": false})).is_attached());
        assert_eq!(node(&json!({})).with_primary(Some(false)).primary, Some(false));
        assert_eq!(read.with_primary(Some(false)).primary, Some(true), "by the configuration itself");
    }

    #[test]
    fn an_invalid_file_is_an_error_with_its_path_and_an_unknown_key_is_a_warning() {
        for (text, wanted) in [
            ("{", "/node.json: invalid JSON: EOF"),
            ("[]", "/node.json: node configuration: invalid value []; expected an object"),
            (r#"{"kubernetes": 1}"#, "/node.json: kubernetes: invalid value 1"),
            (r#"{"kubernetes": {"cni_bin_dir": "b"}}"#, "/node.json: kubernetes.cni_bin_dir: invalid value \"b\""),
            (r#"{"log_file": "b"}"#, "/node.json: log_file: invalid value \"b\"; expected an absolute path"),
            (r#"{"delegate_timeout_seconds": 0}"#, "/node.json: delegate_timeout_seconds: invalid value 0"),
            (r#"{"pinned": {}}"#, "/node.json: pinned: invalid value {}"),
            (
                r#"{"outside_bounds": "x"}"#,
                "/node.json: outside_bounds: invalid value \"x\"; expected one of reject, ignore",
            ),
            (r#"{"chain": {}}"#, "/node.json: chain: invalid value {}"),
            (r#"{"primary": "yes"}"#, "/node.json: primary: invalid value \"yes\"; expected true or false"),
        ] {
            let error = NodeConf::parse("/node.json", text.as_bytes()).expect_err(text);
            assert!(error.code == Code::InvalidConfig && error.msg.starts_with(wanted), "{error}");
        }
        let text = br#"{"pined": 1, "kubernetes": {"other": "n", "cluster_dns": []}, "pinned": "istio-redirct"}"#;
        let (_, warnings) = NodeConf::parse("/node.json", text).expect("accepted");
        let unknown = |key: &str| format!("/node.json: {key}: unknown key, ignored");
        let pinned = "/node.json: pinned: invalid value \"istio-redirct\", ignored; expected one of istio-redirect, \
             uid-exclude, dns-exclude, container-exclude, destination-exclude; did you mean \"istio-redirect\"?";
        let misspelled = format!("{}; did you mean \"pinned\"?", unknown("pined"));
        let wanted = [&unknown("kubernetes.other"), &unknown("kubernetes.cluster_dns"), &misspelled, pinned];
        assert_eq!(warnings, wanted);
    }

    #[test]
    fn further_networks_add_their_pinned_sub_plugins_and_excluded_namespaces() {
        let first = json!({
            "log_file": "/var/log/d.log", "kubernetes": {"kubeconfig": "/k", "exclude_namespaces": ["one"]},
            "allow": {"uids": 7},
            "pinned": ["dns-exclude"], "attachments_may_exclude_namespaces": false, "primary": false,
        });
        assert_eq!(node(&first).with_networks([]).text(), format!("{first:#}\n"));
        let second = json!({"kubernetes": {"exclude_namespaces": ["two"]}, "pinned": ["istio-redirect"]});
        let all = node(&first).with_networks([("b".to_owned(), node(&second)), ("c".to_owned(), node(&first))]);
        let mut expected = first;
        expected["networks"] = json!({"b": {"exclude_namespaces": ["two"]}});
        expected["pinned"] = json!(["istio-redirect", "dns-exclude"]);
        assert_eq!(all.keys(), expected);
        assert_eq!(node(&expected), NodeConf { place: "/node.json".into(), ..all });
        // Without its own bounds, the second network has the default ones.
        assert_eq!(node(&expected).bounds(Some("b")).map(Bounds::is_set), Some(false));
        assert_eq!(
            node(&expected).bounds(Some("other")).and_then(|bounds| bounds.allow.clone()),
            Some(json!({"uids": 7}))
        );
    }

    #[test]
    fn networks_with_excluded_namespaces_of_their_own_are_read_and_applied() {
        let conf = node(&json!({
            "kubernetes": {"exclude_namespaces": ["one"]}, "networks": {"b": {"exclude_namespaces": ["two"]}, "c": {}},
        }));
        let excluded = |conf_of: Value| {
            let (conf, _) = conf.govern_all(&conf_of, &|kind| kind == "detour").expect("accepted").expect("governed");
            let plugin = conf.get("plugins").map_or(&conf, |plugins| &plugins[1]);
            plugin["kubernetes"]["exclude_namespaces"].clone()
        };
        for (name, expected) in [("a", json!(["one"])), ("b", json!(["two"])), ("c", json!([]))] {
            assert_eq!(excluded(json!({"name": name, "type": "detour"})), expected);
            let plugins = json!([{"type": "x"}, {"type": "detour"}]);
            assert_eq!(excluded(json!({"name": name, "plugins": plugins})), expected, "in a configuration list");
        }
        for (text, wanted) in [
            (r#"{"networks": []}"#, "/node.json: networks: invalid value []"),
            (r#"{"networks": {"b": 1}}"#, "/node.json: networks.b: invalid value 1"),
            (r#"{"networks": {"b": {"exclude_namespaces": {}}}}"#, "/node.json: networks.b.exclude_namespaces: "),
        ] {
            let error = NodeConf::parse("/node.json", text.as_bytes()).expect_err(text);
            assert!(error.msg.starts_with(wanted), "{error}");
        }
        let (_, warnings) = NodeConf::parse("/node.json", br#"{"networks": {"b": {"x": 1}}}"#).expect("accepted");
        assert_eq!(warnings, ["/node.json: networks.b.x: unknown key, ignored"]);
    }
}
