//! Applies the node's keys to the configurations of attachments. An attachment may set the keys of an allow-list; all
//! others belong to the node.

use super::{EXCLUDED, KUBERNETES, MAY_EXCLUDE, NodeConf, SOURCES, TOP, primary_in_attachment};
use crate::cni::block::Block;
use crate::cni::document::Document;
use crate::cni::error::Error;
use crate::cni::list::{ItemList, quoted};
use crate::cni::netconf::{
    ALLOW, Bounds, ISTIO_KUBECONFIG, Kubernetes, NODE_BOUNDS, OUTSIDE_BOUNDS, SUB_PLUGINS, default_chain,
    is_of_this_plugin, is_primary, kind,
};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::HashSet;
use std::path::Path;

/// The keys at the top level that every attachment may set: its own policy. [`CNI_CONF_DIR`](crate::cni::CNI_CONF_DIR)
/// is written by the agent into the copy of the cluster network's list. Keys that this plugin does not read, such as
/// those of the CNI specification, are unchanged.
const ATTACHMENT: [&str; 9] = [
    "ambient_enabled",
    "chain",
    "cni_conf_dir",
    "dialect",
    EXCLUDED,
    "kubernetes",
    "log_level",
    "native_nftables",
    "plugin_log_level",
];

/// The keys in `kubernetes` that every attachment may set.
const ATTACHMENT_IN_KUBERNETES: [&str; 2] = ["cluster_dns", EXCLUDED];

/// The keys of istio-cni at the top level, each with the key in `kubernetes` that means the same.
const ISTIO: [(&str, &str); 2] = [("cni_agent_run_dir", "kubeconfig"), ("pod_namespace", "agent_namespace")];

impl Document {
    /// Replaces the node's keys in the configuration, as [`NodeConf::govern`] does.
    pub fn govern(&mut self, node: &NodeConf, program: &str) -> Vec<String> {
        node.govern(&mut self.block.keys, None, program)
    }
}

impl NodeConf {
    /// Replaces the node's keys in an attachment's configuration. Returns a warning for each value of the attachment
    /// that is ignored. `network` is the name of its configuration list, and `program` the name under which the binary
    /// was started.
    pub fn govern(&self, conf: &mut Map<String, Value>, network: Option<&str>, program: &str) -> Vec<String> {
        let mut ignored = Vec::new();
        let mut kubernetes = match conf.get("kubernetes") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(own)) => own.clone(),
            // The plugin refuses the configuration later.
            Some(_) => return ignored,
        };
        let name = conf.get("name").and_then(Value::as_str).or(network).map(str::to_owned);
        let bounds = self.bounds(name.as_deref());
        let may_set = |key: &str| self.may_set(key);
        let may_set_in_kubernetes = |key: &str| self.may_set_in_kubernetes(key);
        self.replace("", conf, may_set, |key| self.value_at_the_top(key, bounds), &mut ignored);
        let node_value = |key: &str| self.kubernetes.get(key).map(Cow::Borrowed);
        self.replace("kubernetes.", &mut kubernetes, may_set_in_kubernetes, node_value, &mut ignored);
        conf.extend(self.top.clone());
        kubernetes.extend(self.kubernetes.clone());
        let excluded = self.excluded(name.as_deref()).to_vec();
        self.exclude(conf, &mut kubernetes, excluded, &mut ignored);
        conf.insert("kubernetes".to_owned(), kubernetes.into());
        self.pin(conf, program, &mut ignored);
        self.bound(conf, bounds, &mut ignored);
        ignored
    }

    /// Returns whether an attachment may set a key at the top level.
    fn may_set(&self, key: &str) -> bool {
        if let Some((_, same)) = ISTIO.iter().find(|(istio, _)| *istio == key) {
            return self.may_set_in_kubernetes(same);
        }
        if [ALLOW, OUTSIDE_BOUNDS].contains(&key) {
            return !self.exhaustive && !self.sets_bounds();
        }
        let is_left = TOP.contains(&key) && !self.exhaustive && !self.top.contains_key(key);
        is_left || ATTACHMENT.contains(&key) || !is_of_this_plugin(key)
    }

    fn may_set_in_kubernetes(&self, key: &str) -> bool {
        let sets_a_source = || SOURCES.iter().any(|source| self.kubernetes.contains_key(*source));
        let is_set = || self.kubernetes.contains_key(key) || (SOURCES.contains(&key) && sets_a_source());
        let is_left = KUBERNETES.contains(&key) && !self.exhaustive && !is_set();
        is_left || ATTACHMENT_IN_KUBERNETES.contains(&key) || !Kubernetes::knows(key)
    }

    /// Returns the node's value of a key at the top level.
    fn value_at_the_top<'a>(&'a self, key: &str, bounds: Option<&'a Bounds>) -> Option<Cow<'a, Value>> {
        match key {
            ALLOW => bounds?.allow.as_ref().map(Cow::Borrowed),
            OUTSIDE_BOUNDS => Some(Cow::Owned(json!(bounds?.outside))),
            NODE_BOUNDS => Some(Cow::Owned(json!(bounds?))),
            "cni_agent_run_dir" => self.kubernetes.get("kubeconfig").and_then(directory).map(Cow::Owned),
            "pod_namespace" => self.kubernetes.get("agent_namespace").map(Cow::Borrowed),
            MAY_EXCLUDE => Some(Cow::Owned(self.attachments_may_exclude_namespaces.into())),
            _ => self.top.get(key).map(Cow::Borrowed),
        }
    }

    /// Removes the keys that an attachment may not set, with a warning for each value that differs from the node's.
    fn replace<'a>(
        &self,
        place: &str,
        keys: &mut Map<String, Value>,
        may_set: impl Fn(&str) -> bool,
        node_value: impl Fn(&str) -> Option<Cow<'a, Value>>,
        ignored: &mut Vec<String>,
    ) {
        keys.retain(|key, written| {
            if may_set(key) {
                return true;
            }
            let is_unset = written.is_null() || *written == "";
            let reason = match node_value(key) {
                Some(value) if is_same(&value, written) => return false,
                Some(value) => format!("sets {}", quoted(&value)),
                None => "does not let attachments set it".to_owned(),
            };
            if !is_unset {
                ignored.push(format!("{place}{key}: {} is ignored: {} {reason}", quoted(written), self.place));
            }
            false
        });
    }

    /// Sets the node's excluded namespaces, and those of the attachment if it may exclude any.
    fn exclude(
        &self,
        conf: &mut Map<String, Value>,
        kubernetes: &mut Map<String, Value>,
        mut names: Vec<String>,
        ignored: &mut Vec<String>,
    ) {
        let excludes_all = names.iter().any(|all| all == "*");
        // Both lists can be long, and the author of a definition decides on one of them.
        let mut known: HashSet<String> = names.iter().cloned().collect();
        for keys in [kubernetes as &mut Map<_, _>, conf] {
            let Some(written) = keys.get(EXCLUDED).filter(|value| !value.is_null()) else { continue };
            // The plugin refuses a value that is not a list later.
            let Ok(list) = ItemList::from_json(EXCLUDED, written) else { return };
            keys.shift_remove(EXCLUDED);
            for name in list.items {
                if known.contains(&name) || excludes_all {
                    continue;
                }
                if self.attachments_may_exclude_namespaces {
                    known.insert(name.clone());
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
            // The plugin refuses the configuration later.
            Some(_) => return,
        };
        let is_pinned = |block: &Map<String, Value>| {
            block.get("type").and_then(Value::as_str).is_some_and(|kind| self.pinned.iter().any(|own| own == kind))
        };
        for (i, block) in chain.iter_mut().enumerate() {
            let Some(block) = block.as_object_mut().filter(|block| is_pinned(block)) else { continue };
            if block.insert("pod_overrides".to_owned(), false.into()) == Some(Value::Bool(true)) {
                let kind = block.get("type").map(quoted).unwrap_or_default();
                ignored.push(format!("chain[{i}].pod_overrides: true is ignored: {} pins {kind}", self.place));
            }
        }
        if !chain.is_empty() {
            conf.insert("chain".to_owned(), chain.into());
        }
    }

    /// Replaces the bounds of an attachment by the node's.
    fn bound(&self, conf: &mut Map<String, Value>, bounds: Option<&Bounds>, ignored: &mut Vec<String>) {
        if bounds.is_none() && !self.exhaustive {
            return;
        }
        let blocks = conf.get_mut("chain").and_then(Value::as_array_mut);
        for (i, block) in blocks.into_iter().flatten().enumerate() {
            let Some(block) = block.as_object_mut() else { continue };
            let kind = block.get("type").and_then(Value::as_str).unwrap_or_default();
            // Blocks of executables have keys of their own.
            if !SUB_PLUGINS.contains(&kind) {
                continue;
            }
            let of_node = bounds.and_then(|bounds| bounds.blocks.iter().find(|own| own.kind == kind));
            let of_node = of_node.map(|own| own.allow.clone());
            let Some(written) = block.shift_remove(ALLOW).filter(|written| !written.is_null()) else { continue };
            if of_node.as_ref() != Some(&written) {
                let place = &self.place;
                ignored.push(format!("chain[{i}].{ALLOW}: {} is ignored: {place} sets the bounds", quoted(&written)));
            }
        }
        if let Some(bounds) = bounds {
            conf.insert(NODE_BOUNDS.to_owned(), json!(bounds));
        }
    }

    /// Applies [`Self::govern`] to every configuration of an attachment whose type is `own`: the attachment's own
    /// configuration, those of its configuration list, and nested ones in `chain`. Returns `None` if there is no such
    /// configuration.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`](crate::cni::Code::InvalidConfig): a configuration would make this the primary plugin.
    pub fn govern_all(&self, conf: &Value, own: &dyn Fn(&str) -> bool) -> Result<Option<(Value, Vec<String>)>, Error> {
        let (mut conf, mut ignored, mut found) = (conf.clone(), Vec::new(), false);
        let name = conf.get("name").and_then(Value::as_str).map(str::to_owned);
        let plugins = match conf.get("type") {
            Some(Value::String(kind)) if !kind.is_empty() => vec![&mut conf],
            _ => conf.get_mut("plugins").and_then(Value::as_array_mut).into_iter().flatten().collect(),
        };
        for plugin in plugins {
            found |= self.govern_nested(plugin, name.as_deref(), own, &mut ignored)?;
        }
        Ok(found.then_some((conf, ignored)))
    }

    fn govern_nested(
        &self,
        plugin: &mut Value,
        network: Option<&str>,
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
            ignored.extend(self.govern(keys, network, ""));
        }
        for nested in keys.get_mut("chain").and_then(Value::as_array_mut).into_iter().flatten() {
            found |= self.govern_nested(nested, network, own, ignored)?;
        }
        Ok(found)
    }
}

/// Returns the value of `cni_agent_run_dir` with which istio-cni uses this kubeconfig.
fn directory(kubeconfig: &Value) -> Option<Value> {
    let path = Path::new(kubeconfig.as_str()?);
    (path.file_name()? == ISTIO_KUBECONFIG).then(|| Some(json!(path.parent()?.to_str()?)))?
}

/// Returns whether two values are equivalent: a list or a number can also be written as a string.
fn is_same(a: &Value, b: &Value) -> bool {
    let items = |value| ItemList::from_json("", value).map(|list| list.items);
    a == b || matches!((items(a), items(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::node_conf::tests::node;
    use crate::cni::{CniCommand, NetConf, OutsideBounds};

    /// Returns an attachment's configuration after [`NodeConf::govern`], with the warnings.
    fn governed(node: &NodeConf, conf: &Value) -> (Value, Vec<String>) {
        let mut keys = conf.as_object().expect("an object").clone();
        let ignored = node.govern(&mut keys, None, "detour");
        (Value::Object(keys), ignored)
    }

    /// Returns a node configuration that sets all keys.
    fn all_keys() -> Value {
        json!({
            "log_file": "/var/log/detour.log",
            "delegate_timeout_seconds": 60,
            "auto_dialect": "nftables",
            "kubernetes": {
                "kubeconfig": "/var/lib/cni/detour/kubeconfig", "agent_socket": "/run/detour/agent.sock",
                "manifests_dir": "/m", "cni_bin_dir": "/opt/cni/bin", "timeout_seconds": 10,
                "agent_namespace": "istio-system", "agent_pod_prefixes": ["detour-agent-"],
                "exclude_namespaces": ["kube-system"],
            },
            "pinned": ["istio-redirect"], "attachments_may_exclude_namespaces": false, "primary": false,
        })
    }

    #[test]
    fn each_key_of_the_node_takes_precedence_with_a_warning() {
        for (at, key, attempt) in [
            ("", "log_file", json!("/root/.ssh/authorized_keys")),
            ("", "delegate_timeout_seconds", json!(300)),
            ("", "auto_dialect", json!("iptables")),
            ("kubernetes", "kubeconfig", json!("/home/a/kubeconfig")),
            ("kubernetes", "agent_socket", json!("/home/a/socket")),
            ("kubernetes", "manifests_dir", json!("/home/a")),
            ("kubernetes", "cni_bin_dir", json!("/home/a/bin")),
            ("kubernetes", "timeout_seconds", json!(300)),
            ("kubernetes", "agent_namespace", json!("shop")),
            ("kubernetes", "agent_pod_prefixes", json!("web-")),
            ("", "cni_agent_run_dir", json!("/home/a")),
            ("", "pod_namespace", json!("shop")),
        ] {
            let conf = if at.is_empty() { json!({key: attempt}) } else { json!({at: {key: attempt}}) };
            let (governed, ignored) = governed(&node(&all_keys()), &conf);
            assert_eq!(governed["kubernetes"], all_keys()["kubernetes"], "{key}");
            assert_eq!(governed["log_file"], "/var/log/detour.log");
            assert_eq!(governed["delegate_timeout_seconds"], 60);
            assert_eq!(governed["auto_dialect"], "nftables");
            assert!(governed.get("cni_agent_run_dir").or(governed.get("pod_namespace")).is_none(), "{governed}");
            let place = if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") };
            let wanted = format!("{place}: {attempt} is ignored: /node.json ");
            assert!(ignored.len() == 1 && ignored[0].starts_with(&wanted), "{ignored:?}");
        }
    }

    #[test]
    fn an_equivalent_value_causes_no_warning() {
        let mut node_conf = all_keys();
        node_conf["kubernetes"]["kubeconfig"] = json!("/var/run/istio-cni/istio-cni-kubeconfig");
        let conf = json!({
            "cni_agent_run_dir": "/var/run/istio-cni", "pod_namespace": "istio-system",
            "exclude_namespaces": "kube-system", "log_file": "",
            "kubernetes": {"timeout_seconds": "10", "agent_pod_prefixes": "detour-agent-", "exclude_namespaces": null},
        });
        assert_eq!(governed(&node(&node_conf), &conf).1, [""; 0]);
    }

    #[test]
    fn keys_that_the_node_does_not_set_are_unchanged() {
        let node = node(&json!({"kubernetes": {"cni_bin_dir": "/opt/cni/bin"}}));
        let conf = json!({
            "log_file": "/var/log/a", "cni_agent_run_dir": "/run/i", "other": [1],
            "kubernetes": {"timeout_seconds": 3, "cni_bin_dir": "/opt/cni/bin", "node_name": "n"},
        });
        let (governed, ignored) = governed(&node, &conf);
        let mut wanted = conf;
        wanted["kubernetes"]["exclude_namespaces"] = json!([]);
        assert_eq!((governed, ignored.len()), (wanted, 0));
    }

    #[test]
    fn an_attachment_can_set_only_the_keys_of_the_allow_list() {
        for key in ["chain_types", "in_process_types", "merge_addresses", "network_status", "binDir"] {
            let (governed, ignored) = governed(&node(&json!({})), &json!({key: ["x"], "dialect": "auto"}));
            assert_eq!((governed.get(key), &governed["dialect"]), (None, &json!("auto")));
            let wanted = format!("{key}: [\"x\"] is ignored: /node.json does not let attachments set it");
            assert_eq!(ignored, [wanted]);
        }
    }

    #[test]
    fn a_node_that_sets_one_source_of_facts_sets_all() {
        let node = node(&json!({"kubernetes": {"agent_socket": "/run/detour/agent.sock"}}));
        let conf = json!({"kubernetes": {"kubeconfig": "/k", "manifests_dir": "/m"}, "cni_agent_run_dir": "/i"});
        let (governed, ignored) = governed(&node, &conf);
        let wanted = json!({"agent_socket": "/run/detour/agent.sock", "exclude_namespaces": []});
        assert_eq!(governed["kubernetes"], wanted);
        assert_eq!(ignored.len(), 3, "{ignored:?}");
        assert!(ignored[1].starts_with("kubernetes.kubeconfig: \"/k\" is ignored: /node.json does not let"));
    }

    #[test]
    fn attachments_exclude_namespaces_only_if_the_node_allows_it() {
        let conf =
            json!({"exclude_namespaces": ["shop", "kube-system", "shop"], "kubernetes": {"exclude_namespaces": "*"}});
        let mut text = all_keys();
        let (own, ignored) = governed(&node(&text), &conf);
        assert_eq!(own["kubernetes"]["exclude_namespaces"], json!(["kube-system"]));
        assert!(own.get("exclude_namespaces").is_none(), "{own}");
        assert!(ignored.len() == 3 && ignored[1].starts_with("exclude_namespaces: \"shop\" is ignored"), "{ignored:?}");
        text["attachments_may_exclude_namespaces"] = json!(true);
        let (own, ignored) = governed(&node(&text), &conf);
        assert_eq!(own["kubernetes"]["exclude_namespaces"], json!(["kube-system", "*", "shop"]));
        assert_eq!(ignored, [""; 0]);
        let all = node(&json!({"kubernetes": {"exclude_namespaces": "*"}}));
        assert_eq!(governed(&all, &conf).1, [""; 0], "all are excluded already");
    }

    #[test]
    fn a_pinned_sub_plugin_ignores_pod_overrides() {
        let node = node(&all_keys());
        let chain =
            json!([{"type": "istio-redirect", "pod_overrides": true, "proxy_port": 1}, {"type": "uid-exclude"}]);
        let (own, ignored) = governed(&node, &json!({"chain": chain}));
        let wanted =
            json!([{"type": "istio-redirect", "pod_overrides": false, "proxy_port": 1}, {"type": "uid-exclude"}]);
        assert_eq!(own["chain"], wanted);
        assert_eq!(ignored, ["chain[0].pod_overrides: true is ignored: /node.json pins \"istio-redirect\""]);
        let (own, ignored) = governed(&node, &json!({"type": "istio-cni"}));
        assert_eq!(own["chain"], json!([{"type": "istio-redirect", "pod_overrides": false}]), "the default chain");
        assert_eq!(ignored, [""; 0]);
        for left in [json!({"type": "excludedns", "chain": []}), json!({"type": "bridge"})] {
            assert_eq!(governed(&node, &left).0.get("chain"), left.get("chain"));
        }
    }

    #[test]
    fn the_nodes_bounds_replace_those_of_attachments() {
        let chain = json!([{"type": "uid-exclude", "allow": {"uids": 7}}]);
        let bounded = node(&json!({"allow": {"uids": 8}, "chain": chain}));
        let conf = json!({
            "name": "n", "type": "detour", "allow": {}, "outside_bounds": "ignore",
            "chain": [{"type": "dns-exclude", "allow": {}}, {"type": "own", "allow": 1}],
        });
        let (own, ignored) = governed(&bounded, &conf);
        let conf_of = |own: &Value| NetConf::parse(own.to_string().as_bytes(), CniCommand::Add, "").expect("accepted");
        let bounds = conf_of(&own).bounds;
        assert_eq!(Some(&bounds), bounded.bounds(None));
        assert_eq!(
            (bounds.allow, bounds.set_by.as_str()),
            (Some(json!({"uids": 8})), "the node configuration /node.json")
        );
        assert_eq!((bounds.blocks.len(), bounds.outside), (1, OutsideBounds::Reject));
        assert_eq!(own["chain"], json!([{"type": "dns-exclude"}, {"type": "own", "allow": 1}]));
        let wanted = [
            "allow: {} is ignored: /node.json sets {\"uids\":8}",
            "outside_bounds: \"ignore\" is ignored: /node.json sets \"reject\"",
            "chain[0].allow: {} is ignored: /node.json sets the bounds",
        ];
        assert_eq!(ignored, wanted);
        let same = json!({"type": "detour", "allow": {"uids": 8}, "outside_bounds": "reject", "chain": chain});
        assert_eq!(governed(&bounded, &same).1, [""; 0]);
        // A node without bounds leaves them to attachments, unless its configuration is exhaustive.
        let (own, ignored) = governed(&node(&json!({})), &conf);
        assert_eq!((conf_of(&own).bounds, ignored.len()), (conf_of(&conf).bounds, 0));
        let exhaustive = NodeConf { exhaustive: true, ..node(&json!({})) };
        let (own, ignored) = governed(&exhaustive, &conf);
        assert_eq!((conf_of(&own).bounds.is_set(), ignored.len()), (false, 3));
    }

    #[test]
    fn every_sub_plugin_can_be_pinned() {
        for kind in SUB_PLUGINS {
            let node = node(&json!({"pinned": [kind]}));
            let (own, _) = governed(&node, &json!({"chain": SUB_PLUGINS.map(|kind| json!({"type": kind}))}));
            let is_pinned = |block: &&Value| block["pod_overrides"] == false;
            let pinned = own["chain"].as_array().expect("a chain").iter().filter(is_pinned);
            assert_eq!(pinned.map(|block| &block["type"]).collect::<Vec<_>>(), [kind]);
        }
    }

    #[test]
    fn invalid_values_are_unchanged_so_that_the_plugin_refuses_them() {
        for (conf, key) in [
            (json!({"kubernetes": []}), "kubernetes"),
            (json!({"chain": {}}), "chain"),
            (json!({"exclude_namespaces": {"a": 1}}), "exclude_namespaces"),
        ] {
            assert_eq!(governed(&node(&all_keys()), &conf).0[key], conf[key]);
        }
    }

    #[test]
    fn configuration_lists_and_nested_chains_are_governed() {
        let node = NodeConf { exhaustive: true, ..node(&json!({"kubernetes": {"cni_bin_dir": "/opt/cni/bin"}})) };
        let own = |kind: &str| kind == "detour";
        let malicious = || json!({"type": "detour", "kubernetes": {"cni_bin_dir": "/malicious"}});
        let expected = json!({"cni_bin_dir": "/opt/cni/bin", "exclude_namespaces": []});
        let list =
            json!({"name": "n", "plugins": [{"type": "bridge", "kubernetes": {"cni_bin_dir": "/b"}}, malicious()]});
        let (list, ignored) = node.govern_all(&list, &own).expect("accepted").expect("changed");
        assert_eq!((&list["plugins"][1]["kubernetes"], ignored.len()), (&expected, 1));
        assert_eq!(list["plugins"][0]["kubernetes"]["cni_bin_dir"], "/b", "a plugin of another type");
        let nested = json!({"type": "other", "chain": [{"type": "y"}, {"type": "detour", "chain": [malicious()]}]});
        let (nested, _) = node.govern_all(&nested, &own).expect("accepted").expect("changed");
        assert_eq!(nested["chain"][1]["chain"][0]["kubernetes"], expected);
        for none in
            [json!({"type": "bridge"}), json!({"plugins": 1}), json!({"plugins": [1, {"chain": [2]}]}), json!(3)]
        {
            assert_eq!(node.govern_all(&none, &own), Ok(None));
        }
        for key in ["delegates", "clusterNetwork"] {
            let list = json!({"plugins": [{"type": "bridge"}, {"type": "detour", key: "x"}]});
            let error = node.govern_all(&list, &own).expect_err("refused");
            assert_eq!(error, primary_in_attachment());
        }
    }
}
