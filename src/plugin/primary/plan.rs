//! The plan of an ADD: how each network of the pod is run, as a delegate, in this process, or chained to the default
//! network's result. Everything is resolved and checked before anything runs.
//!
//! [`preview`] makes the same plan for a pod without a call: it runs nothing and reads nothing on the node. The policy of a
//! pod is that of all attachments that run in this process, together with the node's own sub-plugins.

use super::invocation::{Invocation, NetworkRunner, PrimaryCall, SavedState};
use super::networks::{auxiliary_networks, pod_networks};
use crate::cluster::Definitions;
use crate::cni::{
    Block, CniCommand, Code, DefaultNetwork, Error, NetConf, NetworkName, Primary, RuleFormat, at_most,
    primary_in_attachment,
};
use crate::networks::{PodNetwork, PodNetworks};
use crate::plugin::evaluation::is_agent;
use crate::pod::{Pod, PodRef};
use crate::policy::{Contradiction, Policy};
use crate::sub_plugins::{self, SubPlugin, skip_reason};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The maximum number of attachments of a pod that run in this process; each of them is evaluated with the pod's facts.
const MAX_IN_PROCESS: usize = 16;

/// The steps of an ADD.
pub(super) struct AddPlan {
    /// What to run, in the order of ADD: the default network, the other networks, the chained plugins.
    pub(super) saved: SavedState,
    /// The attachments whose policies apply to the pod.
    pub(super) evaluated: Vec<InProcessAttachment>,
    /// Whether the pod itself selects networks.
    pub(super) selects_networks: bool,
}

impl AddPlan {
    /// Plans the ADD of a pod with these networks.
    ///
    /// # Errors
    /// A configuration is invalid, or an executable is missing.
    pub(super) fn of(call: &PrimaryCall<'_>, resolved: PodNetworks, may_have_sidecar: bool) -> Result<Self, Error> {
        let (request, conf, primary) = (call.request, call.conf, call.primary);
        let default = resolved.networks.first().map(|network| network.interface.clone()).unwrap_or_default();
        let (in_process, auxiliary) = auxiliary_networks(conf, primary, resolved.networks.len())?;
        let pod = request.args.pod.as_ref();
        let Preview { networks, evaluated, warnings } =
            Preview::of((conf, primary), resolved, in_process, pod, may_have_sidecar)?;
        warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let selects_networks = networks.iter().any(|(network, _)| network.selection.is_some());
        let (mut invocations, mut chained) = (Vec::new(), Vec::new());
        let mut attached = evaluated.iter();
        for (position, (network, runner)) in networks.iter().enumerate() {
            let invocation = Invocation::for_network(network, position == 0, &conf.runtime_config, request);
            match runner {
                NetworkRunner::Delegate => invocations.push(invocation),
                NetworkRunner::Chain => {
                    chained.push(Invocation { is_chained: true, interface: default.clone(), ..invocation });
                }
                NetworkRunner::Here => chained.extend(attached.next().and_then(|one| {
                    Invocation::for_executables(&network.name, &default, &one.conf, &request.args_text)
                })),
            }
        }
        if let Some(list) = &auxiliary {
            let invocation = Invocation::for_network(list, false, &conf.runtime_config, request);
            invocations.push(Invocation { is_auxiliary: true, ..invocation });
        }
        invocations.extend(chained);
        invocations.extend(Invocation::for_executables(&conf.name, &default, conf, &request.args_text));
        let delegate_call = call.delegate_call();
        invocations.iter().try_for_each(|invocation| invocation.find(&delegate_call))?;
        Ok(Self { saved: SavedState { invocations }, evaluated, selects_networks })
    }
}

/// Returns how each network of a pod is run. The first is the default network.
///
/// # Errors
/// The default network creates no interface, or too many networks run in this process.
fn with_runners(primary: &Primary, networks: Vec<PodNetwork>) -> Result<Vec<(PodNetwork, NetworkRunner)>, Error> {
    let runners = networks.iter().map(|network| NetworkRunner::of(primary, &network.configuration)).collect::<Vec<_>>();
    let networks: Vec<_> = networks.into_iter().zip(runners).collect();
    if let Some((PodNetwork { name, configuration, .. }, NetworkRunner::Here | NetworkRunner::Chain)) = networks.first()
    {
        let kind = configuration.types().next().unwrap_or_default();
        let msg = format!(
            "default network {name}: type {kind:?} creates no interface (in_process_types, chain_types); set \
             clusterNetwork to the name of the cluster's network, or to the path of its file if that is in the directory \
             of this configuration"
        );
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    let in_process = networks.iter().filter(|(_, runner)| *runner == NetworkRunner::Here).count();
    at_most(MAX_IN_PROCESS, "attachments of in_process_types", "the pod's networks", in_process)?;
    Ok(networks)
}

/// The networks of a pod, and the attachments whose policies apply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preview {
    /// The networks in the order of ADD, each with how it is run; the default network is the first.
    pub networks: Vec<(PodNetwork, NetworkRunner)>,
    /// The attachments that run in this process, or the node's own sub-plugins if there are none.
    pub evaluated: Vec<InProcessAttachment>,
    /// Warnings, one line each.
    pub warnings: Vec<String>,
}

impl Preview {
    /// Returns how each of these networks is run. `in_process` are plugins of Multus's auxiliary chain.
    fn of(
        (conf, primary): (&NetConf, &Primary),
        resolved: PodNetworks,
        in_process: Vec<PodNetwork>,
        pod: Option<&PodRef>,
        may_have_sidecar: bool,
    ) -> Result<Self, Error> {
        let mut networks = with_runners(primary, resolved.networks)?;
        networks.extend(in_process.into_iter().map(|network| (network, NetworkRunner::Here)));
        let here = networks.iter().filter(|(_, runner)| *runner == NetworkRunner::Here);
        let mut attached: Vec<_> =
            here.map(|(network, _)| InProcessAttachment::of(conf, network)).collect::<Result<_, _>>()?;
        combine(conf, &mut attached, pod)?;
        if attached.is_empty() && may_have_sidecar && sub_plugins::wants(&conf.chain).pod {
            attached.push(InProcessAttachment { name: conf.name.clone(), conf: conf.clone() });
        }
        Ok(Self { networks, evaluated: attached, warnings: resolved.warnings })
    }
}

/// The interface name that runtimes request.
const IFNAME: &str = "eth0";
/// The type of a network whose configuration is not read.
pub const UNREAD: &str = "unseen";

/// Plans an ADD of `pod` with definitions from `cluster`. The file of `clusterNetwork` is not read: it may exist on
/// the node only.
///
/// # Errors
/// Those of an ADD: a network selection or a definition is invalid or missing.
pub fn preview(
    conf: &NetConf,
    primary: &Primary,
    cluster: Option<&dyn Definitions>,
    pod: &Pod,
) -> Result<Preview, Error> {
    let pod_ref = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: None };
    let primary = with_placeholder(primary);
    let resolved = match is_agent(conf, Some(&pod_ref)) {
        true => pod_networks(conf, &primary.without_default_networks(), cluster, None, IFNAME, None)?,
        false => pod_networks(conf, &primary, cluster, Some(pod), IFNAME, None)?,
    };
    let mut preview = Preview::of((conf, &primary), resolved, Vec::new(), Some(&pod_ref), true)?;
    rule_format(conf, &preview.evaluated)?;
    preview.warnings.extend(primary.auxiliary_chain.as_ref().map(|directory| {
        format!(
            "auxiliaryCNIChainName: the plugins in {} also run for the pod; they are not shown",
            directory.display()
        )
    }));
    Ok(preview)
}

/// Returns `primary` with a placeholder for `clusterNetwork`.
fn with_placeholder(primary: &Primary) -> Primary {
    let mut primary = primary.clone();
    if let DefaultNetwork::Cluster(name) = &primary.default {
        let name = match name {
            NetworkName::Name(name) => name.clone(),
            NetworkName::Path(path) => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        };
        primary.default = DefaultNetwork::Delegates(vec![json!({"name": name, "type": UNREAD})]);
    }
    primary
}

/// An attachment that runs in this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InProcessAttachment {
    /// Its name in messages: `NAMESPACE/NAME` of its definition, otherwise the name of its configuration.
    pub name: String,
    /// Its configuration, with the node's keys; `combine` adds the node's sub-plugins.
    pub conf: NetConf,
}

impl InProcessAttachment {
    /// Returns the attachment with the node's keys, its own sub-plugins (their paths name the attachment), and the
    /// arguments that the pod passes to it.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`]: its configuration is invalid.
    pub(super) fn of(node: &NetConf, network: &PodNetwork) -> Result<Self, Error> {
        let name = network.name.clone();
        let about = |error: Error| error.at(format_args!("network {name}"));
        let own = NetConf::parse(network.configuration.text.as_bytes(), CniCommand::Add, "").map_err(about)?;
        if own.primary.is_some() {
            return Err(about(primary_in_attachment()));
        }
        for warning in &own.warnings {
            tracing::warn!("network {name}: {warning}");
        }
        let redirects = own.chain.iter().any(redirects);
        let path = |path: String| format!("network {name}, {path}");
        let chain = own.chain.into_iter().map(|Block { path: own, keys }| Block { path: path(own), keys }).collect();
        // Only a redirection has a rule format.
        let rule_format = if redirects { own.rule_format.or(node.rule_format) } else { None };
        let mut conf = NetConf { chain, rule_format, ..node.clone() };
        // In definitions of users, these keys have been replaced by the node's already.
        let excluded = own.kubernetes.exclude_namespaces.into_iter();
        let new: Vec<_> = excluded.filter(|name| !conf.kubernetes.exclude_namespaces.contains(name)).collect();
        conf.kubernetes.exclude_namespaces.extend(new);
        if conf.kubernetes.cluster_dns.is_empty() {
            conf.kubernetes.cluster_dns = own.kubernetes.cluster_dns;
        }
        conf.args.extend(own.args);
        conf.args.extend(network.selection.as_ref().map(|selection| selection.cni_args.clone()).unwrap_or_default());
        conf.cni_version = own.cni_version;
        conf.name = own.name;
        Ok(Self { name, conf })
    }
}

/// Gives each attachment the blocks with which it is evaluated: its own exclusions, the node's, and the redirection.
/// Exclusions stay in separate blocks, so that each block keeps all its keys. The `istio-redirect` blocks of all
/// attachments apply together and override the node's block key by key. Attachments that skip the namespace of `pod`
/// do not contribute.
///
/// # Errors
/// [`Code::InvalidConfig`]: two attachments pass different values for one key.
pub(super) fn combine(node: &NetConf, attached: &mut [InProcessAttachment], pod: Option<&PodRef>) -> Result<(), Error> {
    let contributes = |one: &&InProcessAttachment| pod.is_none_or(|pod| skip_reason(&one.conf, pod).is_none());
    let contributing: Vec<&InProcessAttachment> = attached.iter().filter(contributes).collect();
    let arguments = arguments(&contributing)?;
    let blocks = contributing.iter().flat_map(|one| &one.conf.chain);
    let mut redirection: Vec<Block> = blocks.filter(|block| redirects(block)).cloned().collect();
    let all_keys = redirection.iter().flat_map(|block| &block.keys);
    let set = all_keys.filter(|(key, value)| *key != "type" && !value.is_null()).map(|(key, _)| key.clone());
    let set: BTreeSet<String> = set.collect();
    let node_blocks = node.chain.iter().filter(|block| SubPlugin::of(block).is_some());
    let (node_redirection, node_exclusions): (Vec<&Block>, Vec<&Block>) =
        node_blocks.partition(|block| redirects(block));
    redirection.extend(node_redirection.iter().map(|block| {
        let keys = block.keys.iter().filter(|(key, _)| !set.contains(*key));
        Block { path: block.path.clone(), keys: keys.map(|(key, value)| (key.clone(), value.clone())).collect() }
    }));
    for InProcessAttachment { conf, .. } in attached {
        let (redirect, mut own): (Vec<_>, Vec<_>) = std::mem::take(&mut conf.chain).into_iter().partition(redirects);
        if !redirect.is_empty() || !node_redirection.is_empty() {
            conf.chain.clone_from(&redirection);
            if !arguments.is_empty() {
                conf.args.insert(SubPlugin::IstioRedirect.name().to_owned(), arguments.clone().into());
            }
        }
        conf.chain.append(&mut own);
        conf.chain.extend(node_exclusions.iter().copied().cloned());
    }
    Ok(())
}

fn redirects(block: &Block) -> bool {
    SubPlugin::of(block) == Some(SubPlugin::IstioRedirect)
}

/// Returns the arguments that the pod passes to `istio-redirect` with its attachments, by key.
fn arguments(attached: &[&InProcessAttachment]) -> Result<Map<String, Value>, Error> {
    let mut all: BTreeMap<&String, (&Value, &str)> = BTreeMap::new();
    let name = SubPlugin::IstioRedirect.name();
    for one in attached {
        // The parser refuses any other value.
        let Some(Value::Object(keys)) = one.conf.args.get(name) else { continue };
        for (key, value) in keys.iter().filter(|(_, value)| !value.is_null()) {
            match all.get(key) {
                Some((other, first)) if *other != value => {
                    let what = format!("args.cni.{name}.{key} is {other} in one and {value} in the other");
                    return Err(contradiction(first, &one.name, what));
                }
                _ => drop(all.insert(key, (value, &one.name))),
            }
        }
    }
    Ok(all.into_iter().map(|(key, (value, _))| (key.clone(), value.clone())).collect())
}

/// Returns the union of the policies of a pod's networks, which are given by name.
///
/// # Errors
/// Two policies contradict each other.
pub fn united(policies: &[(&str, Policy)]) -> Result<Policy, Error> {
    let named: Vec<_> = policies.iter().map(|(name, policy)| (name, policy)).collect();
    Policy::united(&named).map_err(|found| contradiction(&found.first, &found.second, found.what))
}

/// Returns the rule format that the attachments set, otherwise the node's.
///
/// # Errors
/// Two attachments set different formats.
pub(super) fn rule_format(node: &NetConf, evaluated: &[InProcessAttachment]) -> Result<Option<RuleFormat>, Error> {
    let mut setting = evaluated.iter().filter(|one| one.conf.rule_format.is_some());
    let Some(first) = setting.next() else { return Ok(node.rule_format) };
    match setting.find(|other| other.conf.rule_format != first.conf.rule_format) {
        Some(other) => Err(contradiction(&first.name, &other.name, "dialect".to_owned())),
        None => Ok(first.conf.rule_format),
    }
}

fn contradiction(first: &str, second: &str, what: String) -> Error {
    Contradiction { first: format!("networks {first}"), second: second.to_owned(), what }.into_error()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::networks::{RunnableConfiguration, Selection};

    /// Plans a default network and `in_process` networks that run in this process.
    fn networks(in_process: usize) -> Result<Vec<(PodNetwork, NetworkRunner)>, Error> {
        let conf = NetConf::parse(br#"{"name":"n","type":"detour","clusterNetwork":"x"}"#, CniCommand::Add, "");
        let network = |(position, kind)| PodNetwork {
            name: format!("shop/n{position}"),
            interface: format!("net{position}"),
            selection: Some(Selection { place: format!("element {position}"), ..Selection::default() }),
            configuration: RunnableConfiguration::parse("k", &format!(r#"{{"name":"n","type":"{kind}"}}"#), None)
                .expect("one"),
        };
        let kinds = std::iter::once("bridge").chain(std::iter::repeat_n("istio-cni", in_process));
        with_runners(
            &conf.expect("accepted").primary.expect("a primary plugin"),
            kinds.enumerate().map(network).collect(),
        )
    }

    #[test]
    fn too_many_in_process_attachments_are_refused() {
        assert_eq!(networks(MAX_IN_PROCESS).expect("accepted").len(), 1 + MAX_IN_PROCESS);
        let error = networks(100).expect_err("too many");
        let wanted = "the pod's networks: expected at most 16 attachments of in_process_types, got 100";
        assert_eq!(error, Error::new(Code::InvalidConfig, wanted));
    }
}
