//! The inputs of an ADD that the pod's facts do not contain. With them, the node's agent evaluates the policy of a
//! running pod again when its facts or the node's configuration change.

use crate::cni::{Block, Bounds, Code, Error, NetConf, NodeConf, Request};
use crate::pod::{Facts, PodRef};
use crate::policy::{Guard, Policy};
use crate::sub_plugins::{self, ChainInput, RepeatedOutput, Resolvers, StartedWith, SubPlugin, skip_reason};
use crate::trusted_file::read_text;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};
use std::cell::LazyCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::Not;
use std::path::Path;

/// A group file with more bytes is a mistake: NSS serves directories of many users.
const MAX_GROUP_FILE: u64 = 4 << 20;

/// The facts with which a policy was evaluated.
pub(super) enum EvaluatedWith {
    /// None: the pod is skipped without them, for this reason.
    Nothing(String),
    /// None, because no source of facts answered: the pod starts without rules, for this reason.
    MissingFacts(String),
    /// None: the configuration names no source of facts.
    Configuration,
    /// The facts of the pod.
    Facts(Box<Facts>),
}

/// The text of the inputs in a record. The plugin copies it; only [`AddInputs::read`] parses it, so that nothing in it
/// costs time or blocks a DEL.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct SavedInputs(Box<RawValue>);

impl PartialEq for SavedInputs {
    fn eq(&self, other: &Self) -> bool {
        self.0.get() == other.0.get()
    }
}

impl Eq for SavedInputs {}

/// The inputs of one ADD, a part of its record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AddInputs {
    pub(super) pod: PodRef,
    /// The evaluated configurations: one for an attachment, one for each network of a primary plugin; none if the pod
    /// was skipped without facts.
    #[serde(default)]
    evaluated: Vec<EvaluatedConfiguration>,
    /// Whether the configuration names no source of facts.
    #[serde(default, skip_serializing_if = "Not::not")]
    without_facts: bool,
    /// `runtimeConfig.dns.servers`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    runtime_nameservers: Vec<IpAddr>,
    /// `prevResult.dns.nameservers`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    previous_nameservers: Vec<IpAddr>,
}

/// The sub-plugins of one configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct EvaluatedConfiguration {
    /// The name of the network in the configuration of a primary plugin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    network: Option<String>,
    /// The blocks of the sub-plugins, each saved as a pair.
    #[serde(serialize_with = "as_pairs")]
    blocks: Vec<Block>,
    /// `args.cni` of the sub-plugins.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    args: Map<String, Value>,
    /// `allow` and `outside_bounds`.
    #[serde(default, skip_serializing_if = "is_default")]
    bounds: Bounds,
    /// `kubernetes.cluster_dns`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    cluster_dns: Vec<IpAddr>,
}

fn as_pairs<S: Serializer>(blocks: &[Block], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(blocks.iter().map(|Block { path, keys }| (path, keys)))
}

impl EvaluatedConfiguration {
    /// Returns the sub-plugins of `conf`; executables are not evaluated, and their blocks may contain anything.
    fn new(network: Option<&str>, conf: &NetConf) -> Self {
        let blocks = conf.chain.iter().filter(|block| SubPlugin::of(block).is_some());
        let args = conf.args.iter().filter(|(key, _)| SubPlugin::ALL.iter().any(|known| known.name() == *key));
        Self {
            network: network.map(str::to_owned),
            blocks: blocks.cloned().collect(),
            args: args.map(|(key, value)| (key.clone(), value.clone())).collect(),
            bounds: conf.bounds.clone(),
            cluster_dns: conf.kubernetes.cluster_dns.clone(),
        }
    }
}

impl AddInputs {
    /// Returns the inputs of an ADD whose policy was evaluated from `evaluated`: configurations, for a primary plugin with
    /// the names of their networks. Returns `None` if no configuration applies to the pod, or the call names none.
    pub(super) fn new(request: &Request, evaluated: &[(Option<&str>, &NetConf, EvaluatedWith)]) -> Option<Self> {
        let pod = request.args.pod.clone()?;
        // A pod has one call, so all configurations have the same resolvers.
        let (_, conf, _) = evaluated.first()?;
        let applied = evaluated.iter().filter(|(_, _, with)| !matches!(with, EvaluatedWith::Nothing(_)));
        Some(Self {
            pod,
            without_facts: evaluated.iter().any(|(_, _, with)| matches!(with, EvaluatedWith::Configuration)),
            evaluated: applied.map(|(network, conf, _)| EvaluatedConfiguration::new(*network, conf)).collect(),
            runtime_nameservers: conf.runtime_nameservers(),
            previous_nameservers: conf.prev_result_nameservers(),
        })
    }

    /// Reads the inputs in a record. Inputs of a newer version count as missing if this version can't read them.
    pub(super) fn read(saved: &SavedInputs) -> Option<Self> {
        serde_json::from_str(saved.0.get()).ok()
    }

    /// Returns the inputs for a record.
    pub(super) fn to_saved(&self) -> Option<SavedInputs> {
        to_raw_value(self).ok().map(SavedInputs)
    }

    /// Evaluates the policy that an ADD with these inputs would apply now to a pod that has the policy `recorded`. Requests
    /// that are invalid count as absent; without `with_requests`, all do.
    ///
    /// # Errors
    /// The facts are of another pod, or a block is invalid.
    pub(super) fn evaluate(
        &self,
        facts: &Facts,
        node: &NodeInputs<'_>,
        recorded: &Policy,
        with_requests: bool,
    ) -> Result<RepeatedOutput, Error> {
        if !facts.pod.matches(&self.pod) {
            let uid = |uid: &Option<String>| uid.clone().unwrap_or_default();
            let (expected, got) = (uid(&self.pod.uid), uid(&facts.pod.uid));
            let msg = format!("expected UID {expected}, got {got}: the pod was replaced");
            return Err(Error::new(Code::PodUnknown, msg));
        }
        let group_id = group_ids(node.group_file);
        let started = StartedWith {
            redirection: recorded.redirect().is_some(),
            guard: matches!(recorded.guard, Some(Guard::Sidecar(_))),
            ambient_guard: matches!(recorded.guard, Some(Guard::Ambient(_))),
        };
        let mut united = RepeatedOutput::default();
        for EvaluatedConfiguration { network, blocks, args, bounds, cluster_dns } in self.configurations(node) {
            let named = |error: Error| error.of_network(network.as_deref());
            if !sub_plugins::wants(&blocks).pod {
                continue;
            }
            let facts = (!self.without_facts).then_some(facts);
            let resolvers = Resolvers {
                runtime: &self.runtime_nameservers,
                cluster_dns: &cluster_dns,
                previous: &self.previous_nameservers,
            };
            let input = ChainInput { facts, args: &args, bounds: &bounds, resolvers, group_id: &group_id };
            let output = sub_plugins::run_again(&blocks, &input, started, with_requests).map_err(named)?;
            united.policy = Policy::union_of([&united.policy, &output.policy]);
            united.unguarded |= output.unguarded;
            united.absent.extend(output.absent.into_iter().map(named));
        }
        Ok(united)
    }

    /// Returns the configurations that apply now: the installed one with the arguments of the ADD, or the recorded ones
    /// with the blocks of sub-plugins that the node pins. The runtime's configuration of a primary plugin is the node's own;
    /// only requests of definitions are replaced in it.
    fn configurations(&self, node: &NodeInputs<'_>) -> Vec<EvaluatedConfiguration> {
        let mut all = self.evaluated.clone();
        let is_of_primary = all.first().is_some_and(|first| first.network.is_some());
        let installed = node.installed.filter(|_| !is_of_primary);
        if let Some(conf) = installed {
            if skip_reason(conf, &self.pod).is_some() {
                return Vec::new();
            }
            let EvaluatedConfiguration { args, cluster_dns, .. } = all.into_iter().next().unwrap_or_default();
            let now = EvaluatedConfiguration::new(None, conf);
            let cluster_dns = if now.cluster_dns.is_empty() { cluster_dns } else { now.cluster_dns };
            all = vec![EvaluatedConfiguration { args, cluster_dns, ..now }];
        }
        let Some(configuration) = node.configuration else { return all };
        for one in &mut all {
            one.bounds = configuration.bounds(node.network).clone();
            if installed.is_none() {
                one.blocks = configuration.with_pinned(node.network, std::mem::take(&mut one.blocks), is_of_primary);
            }
        }
        all
    }
}

/// What a node knows now, for the evaluation of saved inputs.
pub(super) struct NodeInputs<'a> {
    /// The installed configuration of the network, which replaces the recorded one of an attachment.
    pub(super) installed: Option<&'a NetConf>,
    /// The node configuration.
    pub(super) configuration: Option<&'a NodeConf>,
    /// The name of the network.
    pub(super) network: &'a str,
    /// The host's `/etc/group`.
    pub(super) group_file: &'a Path,
}

/// Returns a function that looks up the GID of a host's group (group(5): `name:password:GID:members`). The first entry of a
/// name takes precedence. The file is read with the first name.
pub(super) fn group_ids(file: &Path) -> impl Fn(&str) -> Option<u32> {
    let group = |line: &str| {
        let mut fields = line.split(':');
        Some((fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?))
    };
    let text = || read_text(file, MAX_GROUP_FILE).unwrap_or_default();
    let groups = LazyCell::new(move || text().lines().rev().filter_map(group).collect::<HashMap<String, u32>>());
    move |name| groups.get(name).copied()
}

/// Returns whether nothing but the default bounds applies.
fn is_default(bounds: &Bounds) -> bool {
    !bounds.is_set()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::{Container, Pod};
    use crate::policy::{Exclusion, IdRange, Policy, TrafficOwner};
    use serde_json::json;

    fn node() -> NodeInputs<'static> {
        NodeInputs { installed: None, configuration: None, network: "n", group_file: Path::new("/none") }
    }

    /// A record contains them in this form; later versions must read it.
    fn saved() -> Value {
        json!({
            "pod": {"namespace": "shop", "name": "web-0", "uid": "u"},
            "evaluated": [{
                "blocks": [["chain[0]", {"type": "uid-exclude", "uids": [7]}]],
                "args": {"uid-exclude": {"uids": ["8"]}},
                "cluster_dns": ["10.96.0.10"],
            }],
            "runtime_nameservers": ["10.0.0.1"],
            "previous_nameservers": ["10.0.0.2"],
        })
    }

    fn read(saved: &Value) -> Option<AddInputs> {
        AddInputs::read(&serde_json::from_value(saved.clone()).expect("any JSON"))
    }

    fn facts() -> Facts {
        let proxy = Container { name: "istio-proxy".into(), ..Container::default() };
        let (namespace, name) = ("shop".into(), "web-0".into());
        let pod = Pod { namespace, name, uid: Some("u".into()), containers: vec![proxy], ..Pod::default() };
        Facts { pod, namespace: None }
    }

    fn excluded(policy: &Policy) -> Vec<TrafficOwner> {
        policy.exclusions.iter().map(|Exclusion { owner, .. }| *owner).collect()
    }

    #[test]
    fn saved_inputs_are_read_and_evaluated() {
        let inputs = read(&saved()).expect("readable");
        assert_eq!(json!(inputs), saved());
        let output = inputs.evaluate(&facts(), &node(), &Policy::default(), true).expect("valid");
        assert_eq!((excluded(&output.policy), output.absent), (vec![of_uid(7), of_uid(8)], Vec::new()));
        let output = inputs.evaluate(&facts(), &node(), &Policy::default(), false).expect("valid");
        assert_eq!(excluded(&output.policy), [of_uid(7)], "without the pod's argument");
    }

    fn of_uid(uid: u32) -> TrafficOwner {
        TrafficOwner::Uid(IdRange::one(uid))
    }

    #[test]
    fn recorded_blocks_of_a_sub_plugin_that_is_pinned_later_are_replaced() {
        let inputs = read(&saved()).expect("readable");
        for (chain, expected) in [(json!([{"type": "uid-exclude", "uids": [1]}]), vec![of_uid(1)]), (json!([]), vec![])]
        {
            let text = json!({"pinned": ["uid-exclude"], "chain": chain}).to_string();
            let (configuration, _) = NodeConf::parse("node.json", text.as_bytes()).expect("valid");
            let node = NodeInputs { configuration: Some(&configuration), ..node() };
            let output = inputs.evaluate(&facts(), &node, &Policy::default(), true).expect("valid");
            assert_eq!(excluded(&output.policy), expected);
            let mut of_primary = saved();
            of_primary["evaluated"][0]["network"] = json!("default/excludedns");
            let of_primary = read(&of_primary).expect("readable");
            let output = of_primary.evaluate(&facts(), &node, &Policy::default(), false).expect("valid");
            assert_eq!(excluded(&output.policy), [of_uid(7)], "the runtime's own configuration");
        }
    }

    #[test]
    fn inputs_of_a_newer_version_count_as_missing_if_they_cannot_be_read() {
        let mut newer = saved();
        newer["new"] = json!(1);
        assert!(read(&newer).is_some());
        newer["runtime_nameservers"] = json!("new");
        assert_eq!(read(&newer), None);
    }

    #[test]
    fn inputs_of_a_configuration_without_facts_need_none() {
        let mut saved = saved();
        saved["without_facts"] = json!(true);
        let inputs = read(&saved).expect("readable");
        let no_sidecar = Facts { pod: Pod { containers: Vec::new(), ..facts().pod }, namespace: None };
        let output = inputs.evaluate(&no_sidecar, &node(), &Policy::default(), true).expect("valid");
        assert_eq!(excluded(&output.policy).len(), 2);
    }

    #[test]
    fn errors_name_the_network_of_a_primary_plugin() {
        let mut saved = saved();
        saved["evaluated"][0]["network"] = json!("default/excludedns");
        saved["evaluated"][0]["blocks"][0][0] = json!("network default/excludedns, chain[0]");
        saved["evaluated"][0]["blocks"][0][1]["uids"] = json!(["abc"]);
        let inputs = read(&saved).expect("readable");
        let error = inputs.evaluate(&facts(), &node(), &Policy::default(), true).expect_err("invalid");
        assert!(error.msg.contains("network default/excludedns") && error.msg.contains("abc"), "{error}");
    }
}
