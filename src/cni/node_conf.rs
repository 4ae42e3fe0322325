//! The node configuration: the keys that belong to the node, so that the author of an attachment's
//! configuration can't set them. It is a file on the node or, for the primary plugin, the runtime's own
//! configuration.

use super::list::shown;
use super::netconf::{Kubernetes, SUB_PLUGINS, absolute, default_chain, delegate_timeout, is_primary, kind};
use super::{Block, Code, Error, List, NetConf, wrong_type};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The file that the plugin reads at every call. Its owner is root, and only root can change it.
pub const NODE_CONFIGURATION: &str = "/var/lib/cni/detour/node.json";
/// The size limit of that file, in bytes; one with a hundred namespaces has 3 KiB.
pub const NODE_CONFIGURATION_LIMIT: u64 = 64 << 10;

/// The node's keys of the block `kubernetes`, each with the key at the top level that istio-cni has for it.
const KUBERNETES: [(&str, Option<&str>); 7] = [
    ("kubeconfig", Some("cni_agent_run_dir")),
    ("agent_socket", None),
    ("manifests_dir", None),
    ("cni_bin_dir", None),
    ("timeout_seconds", None),
    ("agent_namespace", Some("pod_namespace")),
    ("agent_pod_prefixes", None),
];
/// Where facts come from: a node that states one of these states all of them.
const SOURCES: [&str; 3] = ["kubeconfig", "agent_socket", "manifests_dir"];
/// The node's keys at the top level.
const TOP: [&str; 2] = ["log_file", "delegate_timeout_seconds"];
const EXCLUDED: &str = "exclude_namespaces";
const MAY_EXCLUDE: &str = "attachments_may_exclude_namespaces";

/// What the node states, and what it leaves to its attachments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeConf {
    /// Where it is stated, for messages.
    place: String,
    /// The keys of [`TOP`].
    top: Map<String, Value>,
    /// The keys of [`KUBERNETES`].
    kubernetes: Map<String, Value>,
    exclude_namespaces: Vec<String>,
    /// Sub-plugins whose `pod_overrides` is false for every attachment.
    pinned: Vec<String>,
    attachments_may_exclude_namespaces: bool,
    /// Whether the runtime calls this plugin as the primary plugin.
    primary: bool,
    /// Whether attachments can't set the keys that are not stated either.
    complete: bool,
}

impl NodeConf {
    /// What a configuration states that the node's administrator wrote. Attachments can't set other keys
    /// of the node either.
    #[must_use]
    pub fn of(conf: &NetConf) -> Self {
        let Kubernetes { timeout, agent_namespace, agent_pod_prefixes, exclude_namespaces, .. } = &conf.kubernetes;
        let path = |path: &Option<std::path::PathBuf>| path.as_ref().map(|path| json!(path.to_string_lossy()));
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
        ];
        let is_pinned = |kind: &&str| {
            let of_kind = |block: &&Block| block.keys.get("type").is_some_and(|own| own == kind);
            conf.chain.iter().filter(of_kind).any(|block| block.keys.get("pod_overrides") == Some(&Value::Bool(false)))
        };
        Self {
            place: "the node's own configuration".to_owned(),
            top: present(top),
            kubernetes: present(kubernetes),
            exclude_namespaces: exclude_namespaces.clone(),
            pinned: SUB_PLUGINS.iter().copied().filter(is_pinned).map(str::to_owned).collect(),
            attachments_may_exclude_namespaces: conf.attachments_may_exclude_namespaces,
            primary: conf.primary.is_some(),
            complete: true,
        }
    }

    /// The text of a node configuration file.
    #[must_use]
    pub fn text(&self) -> String {
        let mut keys = self.top.clone();
        let mut kubernetes = self.kubernetes.clone();
        kubernetes.insert(EXCLUDED.into(), json!(self.exclude_namespaces));
        keys.insert("kubernetes".into(), kubernetes.into());
        keys.insert("pinned".into(), json!(self.pinned));
        keys.insert(MAY_EXCLUDE.into(), self.attachments_may_exclude_namespaces.into());
        keys.insert("primary".into(), self.primary.into());
        format!("{:#}\n", Value::Object(keys))
    }

    /// Parses the text of a node configuration file; returns it with its warnings, one line each. Unknown
    /// keys are ignored with a warning, so that a later version can add keys.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`] with `place`, the key and the accepted values.
    pub fn parse(place: &str, text: &[u8]) -> Result<(Self, Vec<String>), Error> {
        let about = |error: Error| Error { msg: format!("{place}: {}", error.msg), ..error };
        let not_json = |error| Error::new(Code::InvalidConfig, format!("{place}: it is not JSON: {error}"));
        let value: Value = serde_json::from_slice(text).map_err(not_json)?;
        let block = Block::new("", &value).map_err(|_| about(wrong_type("node configuration", &value, "an object")))?;
        Self::read(place, &block).map_err(about)
    }

    fn read(place: &str, block: &Block) -> Result<(Self, Vec<String>), Error> {
        let keys = block.reader();
        let mut warnings = Vec::new();
        let read = Kubernetes::read(&keys, &mut warnings)?;
        absolute(&keys, "log_file")?;
        delegate_timeout(&keys)?;
        let written = keys.block("kubernetes")?.map(|block| block.keys).unwrap_or_default();
        let stated = |from: &Map<String, Value>, key: &str| from.get(key).filter(|value| !value.is_null()).cloned();
        let node = Self {
            place: place.to_owned(),
            top: present(TOP.map(|key| (key, stated(&block.keys, key)))),
            kubernetes: present(KUBERNETES.map(|(key, _)| (key, stated(&written, key)))),
            exclude_namespaces: read.exclude_namespaces,
            pinned: keys.list("pinned")?.map(|list| list.items).unwrap_or_default(),
            attachments_may_exclude_namespaces: keys.boolean(MAY_EXCLUDE)?.unwrap_or(false),
            primary: keys.boolean("primary")?.unwrap_or(false),
            complete: false,
        };
        // Keys that are attachments' to set, or istio-cni's spelling of the node's.
        for key in ["cni_agent_run_dir", "pod_namespace"] {
            if block.keys.contains_key(key) {
                warnings.push(format!("{key}: unknown key, ignored"));
            }
        }
        if written.contains_key("cluster_dns") {
            warnings.push("kubernetes.cluster_dns: unknown key, ignored".to_owned());
        }
        warnings.extend(keys.unknown().into_iter().map(|key| format!("{key}: unknown key, ignored")));
        let unknown = node.pinned.iter().filter(|kind| !SUB_PLUGINS.contains(&kind.as_str()));
        let accepted = SUB_PLUGINS.join(", ");
        warnings.extend(unknown.map(|kind| format!("pinned: {kind:?} is ignored; accepted: {accepted}")));
        Ok((node, warnings.into_iter().map(|warning| format!("{place}: {warning}")).collect()))
    }

    /// The keys that it states, for people.
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
        format!("{keys}{excluded}{pinned}")
    }

    /// Whether the runtime calls this plugin as the primary plugin of the node.
    #[must_use]
    pub const fn is_primary(&self) -> bool {
        self.primary
    }

    /// Puts the node's keys into an attachment's configuration, in place of its own. Returns what is
    /// ignored of those, one line each. `program` is the name under which the binary was started.
    pub fn govern(&self, conf: &mut Map<String, Value>, program: &str) -> Vec<String> {
        let mut ignored = Vec::new();
        let mut kubernetes = match conf.get("kubernetes") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(own)) => own.clone(),
            // The plugin refuses the configuration.
            Some(_) => return ignored,
        };
        for key in TOP.into_iter().filter(|key| self.complete || self.top.contains_key(*key)) {
            let stated = self.top.get(key);
            self.replace(conf, key, key, stated, &mut ignored);
            conf.extend(stated.map(|value| (key.to_owned(), value.clone())));
        }
        let states_a_source = SOURCES.iter().any(|key| self.kubernetes.contains_key(*key));
        for (key, alias) in KUBERNETES {
            let is_the_nodes =
                self.complete || self.kubernetes.contains_key(key) || (states_a_source && SOURCES.contains(&key));
            if !is_the_nodes {
                continue;
            }
            let stated = self.kubernetes.get(key);
            self.replace(&mut kubernetes, key, &format!("kubernetes.{key}"), stated, &mut ignored);
            if let Some(alias) = alias {
                let stated = if key == "kubeconfig" { stated.and_then(directory) } else { stated.cloned() };
                self.replace(conf, alias, alias, stated.as_ref(), &mut ignored);
            }
            kubernetes.extend(stated.map(|value| (key.to_owned(), value.clone())));
        }
        self.exclude(conf, &mut kubernetes, &mut ignored);
        conf.insert("kubernetes".to_owned(), kubernetes.into());
        self.pin(conf, program, &mut ignored);
        ignored
    }

    /// Removes `key`; its value is worth a line if the node states another.
    fn replace(
        &self,
        keys: &mut Map<String, Value>,
        key: &str,
        place: &str,
        stated: Option<&Value>,
        ignored: &mut Vec<String>,
    ) {
        let Some(written) = keys.shift_remove(key).filter(|value| !value.is_null() && *value != "") else { return };
        if !stated.is_some_and(|stated| is_same(stated, &written)) {
            let instead = stated.map_or_else(
                || "does not let attachments set it".to_owned(),
                |stated| format!("states {}", shown(stated)),
            );
            ignored.push(format!("{place}: {} is ignored: {} {instead}", shown(&written), self.place));
        }
    }

    /// The node's excluded namespaces, and those of the attachment if it may exclude any.
    fn exclude(&self, conf: &mut Map<String, Value>, kubernetes: &mut Map<String, Value>, ignored: &mut Vec<String>) {
        let mut names = self.exclude_namespaces.clone();
        for keys in [kubernetes as &mut Map<_, _>, conf] {
            let Some(written) = keys.get(EXCLUDED).filter(|value| !value.is_null()) else { continue };
            // The plugin refuses what is not a list.
            let Ok(list) = List::from_json(EXCLUDED, written) else { return };
            keys.shift_remove(EXCLUDED);
            for name in list.items {
                if names.contains(&name) || self.exclude_namespaces.iter().any(|all| all == "*") {
                    continue;
                }
                if self.attachments_may_exclude_namespaces {
                    names.push(name);
                } else {
                    ignored.push(format!(
                        "{EXCLUDED}: {name:?} is ignored: {} does not exclude it; add it there, or set \
                         \"{MAY_EXCLUDE}\": true",
                        self.place
                    ));
                }
            }
        }
        kubernetes.insert(EXCLUDED.to_owned(), json!(names));
    }

    /// Sets `pod_overrides` to false for the sub-plugins that the node pins.
    fn pin(&self, conf: &mut Map<String, Value>, program: &str, ignored: &mut Vec<String>) {
        if self.pinned.is_empty() {
            return;
        }
        let mut chain = match conf.get("chain") {
            Some(Value::Array(chain)) => chain.clone(),
            None | Some(Value::Null) => {
                let own = Block { path: String::new(), keys: conf.clone() };
                let kind = kind(&own.reader(), program).ok();
                let blocks = kind.and_then(|kind| default_chain(&kind)).unwrap_or_default();
                blocks.into_iter().map(|block| Value::Object(block.keys)).collect()
            }
            // The plugin refuses the configuration.
            Some(_) => return,
        };
        let is_pinned = |block: &Map<String, Value>| {
            block.get("type").and_then(Value::as_str).is_some_and(|kind| self.pinned.iter().any(|own| own == kind))
        };
        for (i, block) in chain.iter_mut().enumerate() {
            let Some(block) = block.as_object_mut().filter(|block| is_pinned(block)) else { continue };
            if block.insert("pod_overrides".to_owned(), false.into()) == Some(Value::Bool(true)) {
                let kind = block.get("type").map(shown).unwrap_or_default();
                ignored.push(format!("chain[{i}].pod_overrides: true is ignored: {} pins {kind}", self.place));
            }
        }
        if !chain.is_empty() {
            conf.insert("chain".to_owned(), chain.into());
        }
    }

    /// Does the same as [`Self::govern`] to every configuration whose type is `own` in an attachment's:
    /// its own, those of its plugin list, and those of executables in their chains. Returns `None` if it has
    /// none, so that nothing changes.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`]: one of them would make the plugin a primary plugin.
    pub fn govern_all(&self, conf: &Value, own: &dyn Fn(&str) -> bool) -> Result<Option<(Value, Vec<String>)>, Error> {
        let (mut conf, mut ignored, mut found) = (conf.clone(), Vec::new(), false);
        let plugins = match conf.get("type") {
            Some(Value::String(kind)) if !kind.is_empty() => vec![&mut conf],
            _ => conf.get_mut("plugins").and_then(Value::as_array_mut).into_iter().flatten().collect(),
        };
        for plugin in plugins {
            found |= self.govern_nested(plugin, own, &mut ignored)?;
        }
        Ok(found.then_some((conf, ignored)))
    }

    fn govern_nested(
        &self,
        plugin: &mut Value,
        own: &dyn Fn(&str) -> bool,
        ignored: &mut Vec<String>,
    ) -> Result<bool, Error> {
        let Some(keys) = plugin.as_object_mut() else { return Ok(false) };
        let kind = keys.get("type").and_then(Value::as_str).unwrap_or_default();
        let mut found = own(kind);
        if found {
            if is_primary(keys) {
                return Err(primary_in_attachment());
            }
            ignored.extend(self.govern(keys, ""));
        }
        for nested in keys.get_mut("chain").and_then(Value::as_array_mut).into_iter().flatten() {
            found |= self.govern_nested(nested, own, ignored)?;
        }
        Ok(found)
    }
}

/// The error for an attachment's configuration that would make this the primary plugin, whose every key is the
/// node's.
#[must_use]
pub fn primary_in_attachment() -> Error {
    Error::new(Code::InvalidConfig, "clusterNetwork and delegates are for the runtime's own configuration")
}

fn present<const N: usize>(keys: [(&str, Option<Value>); N]) -> Map<String, Value> {
    keys.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

/// The directory in which istio-cni would look for this kubeconfig.
fn directory(kubeconfig: &Value) -> Option<Value> {
    let path = Path::new(kubeconfig.as_str()?);
    (path.file_name()? == super::netconf::ISTIO_KUBECONFIG).then(|| Some(json!(path.parent()?.to_str()?)))?
}

/// Whether two values mean the same: a list can be written as a string, a number too.
fn is_same(a: &Value, b: &Value) -> bool {
    let items = |value| List::from_json("", value).map(|list| list.items);
    a == b || matches!((items(a), items(b)), (Ok(a), Ok(b)) if a == b)
}
