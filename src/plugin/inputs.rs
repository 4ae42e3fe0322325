//! The inputs of an ADD that the pod's facts do not contain. With them, the node's agent evaluates the policy of a
//! running pod again when its facts or the node's configuration change.

use super::evaluation::{EvaluatedWith, host_groups};
use crate::cni::{Block, Bounds, Code, Error, NetConf, NodeConf, Request, RuleFormat};
use crate::netns::NetnsId;
use crate::pod::{Facts, PodRef};
use crate::policy::Policy;
use crate::sub_plugins::{self, ChainInput, Resolvers, SeparatePolicy, SubPlugin, skip_reason};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::cell::OnceCell;
use std::net::IpAddr;
use std::ops::Not;
use std::path::{Path, PathBuf};

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

impl SavedInputs {
    /// Returns the number of bytes.
    pub(super) fn len(&self) -> usize {
        self.0.get().len()
    }
}

/// The inputs of one ADD, a part of its record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AddInputs<'a> {
    pub(super) pod: PodRef,
    /// The network namespace of an ADD without rules; otherwise the record has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) netns: Option<(PathBuf, NetnsId)>,
    /// The evaluated configurations: one for an attachment, one for each network of a primary plugin; none if the pod
    /// was skipped without facts.
    #[serde(default)]
    evaluated: Vec<EvaluatedConfiguration<'a>>,
    /// Whether the configuration names no source of facts.
    #[serde(default, skip_serializing_if = "Not::not")]
    without_facts: bool,
    /// `runtimeConfig.dns.servers`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    runtime_nameservers: Vec<IpAddr>,
    /// `prevResult.dns.nameservers`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    previous_nameservers: Vec<IpAddr>,
    /// The configured rule format, unless it is `auto`.
    #[serde(default, rename = "dialect", skip_serializing_if = "Option::is_none")]
    pub(super) rule_format: Option<RuleFormat>,
}

/// The block of a sub-plugin with its path.
type SavedBlock<'a> = (Cow<'a, str>, Cow<'a, Map<String, Value>>);

/// The sub-plugins of one configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct EvaluatedConfiguration<'a> {
    /// The name of the network in the configuration of a primary plugin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    network: Option<Cow<'a, str>>,
    /// The blocks of the sub-plugins, each with its path.
    blocks: Vec<SavedBlock<'a>>,
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

impl<'a> EvaluatedConfiguration<'a> {
    /// Returns the sub-plugins of `conf`; executables are not evaluated, and their blocks may contain anything.
    fn new(network: Option<&'a str>, conf: &'a NetConf) -> Self {
        let blocks = conf.chain.iter().filter(|block| SubPlugin::of(block).is_some());
        let args = conf.args.iter().filter(|(key, _)| SubPlugin::ALL.iter().any(|known| known.name() == *key));
        Self {
            network: network.map(Cow::Borrowed),
            blocks: blocks.map(|Block { path, keys }| (path.into(), Cow::Borrowed(keys))).collect(),
            args: args.map(|(key, value)| (key.clone(), value.clone())).collect(),
            bounds: conf.bounds.clone(),
            cluster_dns: conf.kubernetes.cluster_dns.clone(),
        }
    }

    fn blocks(&self) -> Vec<Block> {
        let block = |(path, keys): &SavedBlock<'_>| Block { path: path.to_string(), keys: keys.clone().into_owned() };
        self.blocks.iter().map(block).collect()
    }
}

impl<'a> AddInputs<'a> {
    /// Returns the inputs of an ADD whose policy was evaluated from `evaluated`: configurations, for a primary plugin with
    /// the names of their networks. Returns `None` if the policy can't change while the pod runs, or no configuration
    /// applies to it.
    pub(super) fn new(
        request: &Request,
        conf: &NetConf,
        evaluated: impl IntoIterator<Item = (Option<&'a str>, &'a NetConf, EvaluatedWith)>,
    ) -> Option<Self> {
        let pod = request.args.pod.clone()?;
        let (mut configurations, mut without_facts, mut may_change) = (Vec::new(), false, false);
        for (network, conf, with) in evaluated {
            may_change |= with != EvaluatedWith::FinalFacts;
            without_facts |= with == EvaluatedWith::NoSource;
            if with == EvaluatedWith::Nothing {
                continue;
            }
            configurations.push(EvaluatedConfiguration::new(network, conf));
        }
        may_change.then(|| Self {
            pod,
            netns: None,
            evaluated: configurations,
            without_facts,
            runtime_nameservers: conf.runtime_nameservers(),
            previous_nameservers: conf.prev_result_nameservers(),
            rule_format: conf.rule_format,
        })
    }

    /// Reads the inputs in a record. Inputs of a newer version count as missing if this version can't read them.
    pub(super) fn read(saved: &SavedInputs) -> Option<AddInputs<'static>> {
        serde_json::from_str(saved.0.get()).ok()
    }

    /// Returns the inputs for a record.
    pub(super) fn to_saved(&self) -> Option<SavedInputs> {
        to_raw_value(self).ok().map(SavedInputs)
    }

    /// Evaluates the policies that an ADD with these inputs would apply now, for a primary plugin each with the name of its
    /// network. `applied` is the policy of the attachment. If a setting is invalid, the other sub-plugins are evaluated
    /// without it.
    ///
    /// # Errors
    /// The facts are of another pod.
    pub(super) fn evaluate(
        &self,
        facts: &Facts,
        node: &NodeInputs<'_>,
        applied: &Policy,
    ) -> Result<Vec<(Option<&str>, SeparatePolicy)>, Error> {
        if !facts.pod.matches(&self.pod) {
            let (expected, got) = (self.pod.uid.as_deref(), facts.pod.uid.as_deref());
            let msg = format!(
                "expected UID {}, got {}: the pod was replaced",
                expected.unwrap_or_default(),
                got.unwrap_or_default()
            );
            return Err(Error::new(Code::PodUnknown, msg));
        }
        let groups = OnceCell::new();
        let group_id = |name: &str| groups.get_or_init(|| host_groups(node.group_file)).get(name).copied();
        let run = |blocks: &[Block], args: &Map<String, Value>, bounds: &Bounds, cluster_dns: &[IpAddr]| {
            if !sub_plugins::wants(blocks).pod {
                return SeparatePolicy::default();
            }
            let facts = (!self.without_facts).then_some(facts);
            let resolvers =
                Resolvers { runtime: &self.runtime_nameservers, cluster_dns, previous: &self.previous_nameservers };
            let input = ChainInput { facts, args, bounds: node.bounds(bounds), resolvers, group_id: &group_id };
            sub_plugins::run_separately(blocks, &input, applied)
        };
        let recorded = self.evaluated.first();
        let Some(conf) = node.installed.filter(|_| recorded.is_none_or(|recorded| recorded.network.is_none())) else {
            let evaluate =
                |one: &EvaluatedConfiguration<'_>| run(&one.blocks(), &one.args, &one.bounds, &one.cluster_dns);
            return Ok(self.evaluated.iter().map(|one| (one.network.as_deref(), evaluate(one))).collect());
        };
        if skip_reason(conf, &self.pod).is_some() {
            return Ok(Vec::new());
        }
        let args = recorded.map(|recorded| recorded.args.clone()).unwrap_or_default();
        let cluster_dns = match (conf.kubernetes.cluster_dns.as_slice(), recorded) {
            ([], Some(recorded)) => &recorded.cluster_dns,
            (_, _) => &conf.kubernetes.cluster_dns,
        };
        Ok(vec![(None, run(&conf.chain, &args, &conf.bounds, cluster_dns))])
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

impl NodeInputs<'_> {
    /// Returns the bounds that apply now; `known` are those of the recorded or the installed configuration.
    fn bounds<'b>(&'b self, known: &'b Bounds) -> &'b Bounds {
        let of_node = self.configuration.map(|node| node.bounds(self.network));
        let of_installed = self.installed.map(|conf| &conf.bounds);
        of_node.or(of_installed).unwrap_or(known)
    }
}

/// Returns the first error of an evaluation, with the name of the network of a primary plugin.
pub(super) fn refusal(network: Option<&str>, evaluated: &SeparatePolicy) -> Option<Error> {
    let error = evaluated.errors.first()?.clone();
    Some(match network {
        Some(network) => error.of_network(network),
        None => error,
    })
}

/// Returns whether nothing but the default bounds applies.
fn is_default(bounds: &Bounds) -> bool {
    !bounds.is_set()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::{Container, Pod};
    use crate::policy::{Exclusion, IdRange, Policy, PortRange, Protocol, TrafficOwner};
    use serde_json::json;

    fn node() -> NodeInputs<'static> {
        NodeInputs { installed: None, configuration: None, network: "n", group_file: Path::new("/none") }
    }

    /// A record contains them in this form; later versions must read it.
    fn saved() -> Value {
        json!({
            "pod": {"namespace": "shop", "name": "web-0", "uid": "u"},
            "netns": ["/var/run/netns/a", {"device": 4, "inode": 7}],
            "evaluated": [{
                "blocks": [["chain[0]", {"type": "uid-exclude", "uids": [7]}]],
                "args": {"uid-exclude": {"uids": ["8"]}},
                "cluster_dns": ["10.96.0.10"],
            }],
            "runtime_nameservers": ["10.0.0.1"],
            "previous_nameservers": ["10.0.0.2"],
            "dialect": "Nftables",
        })
    }

    fn read(saved: &Value) -> Option<AddInputs<'static>> {
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
        assert_eq!(inputs.to_saved().map(|saved| saved.0.get().to_owned()), Some(saved().to_string()));
        assert_eq!(inputs.rule_format, Some(RuleFormat::Nftables));
        let policies = inputs.evaluate(&facts(), &node(), &Policy::default()).expect("valid");
        assert_eq!(policies.len(), 1);
        assert_eq!(policies[0].1.errors, Vec::new());
        assert_eq!(excluded(&policies[0].1.policy), [of_uid(7), of_uid(8)]);
    }

    fn of_uid(uid: u32) -> TrafficOwner {
        TrafficOwner::Uid(IdRange::one(uid))
    }

    /// An invalid annotation of `dns-exclude` keeps only what that sub-plugin could exclude.
    #[test]
    fn an_invalid_setting_of_one_sub_plugin_does_not_keep_the_exclusions_of_others() {
        let mut saved = saved();
        let uids = json!({"type": "uid-exclude", "uids": [7], "pod_overrides": false});
        saved["evaluated"][0]["blocks"] = json!([["chain[0]", uids], ["chain[1]", {"type": "dns-exclude"}]]);
        let mut facts = facts();
        facts.pod.annotations.insert("detour.io/exclude-uids".into(), "9".into());
        facts.pod.annotations.insert("detour.io/exclude-dns".into(), "10.0.0.300".into());
        let inputs = read(&saved).expect("readable");
        let exclusion = |owner, ports: &[u16]| Exclusion {
            owner,
            destination: None,
            protocol: (!ports.is_empty()).then_some(Protocol::Udp),
            ports: ports.iter().copied().map(PortRange::one).collect(),
        };
        let dns = exclusion(TrafficOwner::Any, &[53]);
        let exclusions = [exclusion(of_uid(7), &[]), exclusion(of_uid(9), &[]), dns.clone()].into();
        let applied = Policy { exclusions, ..Policy::default() };
        let parts = inputs.evaluate(&facts, &node(), &applied).expect("of this pod").remove(0).1;
        assert_eq!(parts.policy.exclusions, [exclusion(of_uid(7), &[]), dns].into());
        assert!(refusal(None, &parts).is_some_and(|error| error.msg.contains("10.0.0.300")));
        // An invalid value of the annotation itself keeps what it excluded, unless the sub-plugin is pinned.
        facts.pod.annotations.insert("detour.io/exclude-uids".into(), "x".into());
        saved["evaluated"][0]["blocks"][0][1]["pod_overrides"] = json!(true);
        let inputs = read(&saved).expect("readable");
        let parts = inputs.evaluate(&facts, &node(), &applied).expect("of this pod").remove(0).1;
        assert_eq!(parts.policy.exclusions, applied.exclusions);
    }

    #[test]
    fn inputs_of_a_newer_version_count_as_missing_if_they_cannot_be_read() {
        let mut newer = saved();
        newer["new"] = json!(1);
        assert!(read(&newer).is_some());
        newer["dialect"] = json!("new");
        assert_eq!(read(&newer), None);
    }

    #[test]
    fn inputs_of_a_configuration_without_facts_need_none() {
        let mut saved = saved();
        saved["without_facts"] = json!(true);
        let inputs = read(&saved).expect("readable");
        let no_sidecar = Facts { pod: Pod { containers: Vec::new(), ..facts().pod }, namespace: None };
        let policies = inputs.evaluate(&no_sidecar, &node(), &Policy::default()).expect("valid");
        assert_eq!(excluded(&policies[0].1.policy).len(), 2);
    }

    #[test]
    fn errors_name_the_network_of_a_primary_plugin() {
        let mut saved = saved();
        saved["evaluated"][0]["network"] = json!("default/excludedns");
        saved["evaluated"][0]["blocks"][0][0] = json!("network default/excludedns, chain[0]");
        saved["evaluated"][0]["blocks"][0][1]["uids"] = json!(["abc"]);
        let inputs = read(&saved).expect("readable");
        let (network, parts) = inputs.evaluate(&facts(), &node(), &Policy::default()).expect("of this pod").remove(0);
        let error = refusal(network, &parts).expect("invalid");
        assert!(error.msg.contains("network default/excludedns") && error.msg.contains("abc"), "{error}");
    }
}
