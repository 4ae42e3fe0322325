//! The policy of a pod as the primary plugin applies it: that of all attachments that run in this process, together
//! with the node's own sub-plugins.

use crate::cni::{Block, CniCommand, Error, NetConf, RuleFormat, primary_in_attachment};
use crate::networks::PodNetwork;
use crate::pod::PodRef;
use crate::policy::{Contradiction, Policy};
use crate::sub_plugins::{self, SubPlugin, skip_reason};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

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
        let about = |error: Error| Error { msg: format!("network {name}: {}", error.msg), ..error };
        let own = NetConf::parse(network.configuration.text.as_bytes(), CniCommand::Add, "").map_err(about)?;
        if own.primary.is_some() {
            return Err(about(primary_in_attachment()));
        }
        for warning in &own.warnings {
            tracing::warn!("network {name}: {warning}");
        }
        let redirects = own.chain.iter().any(|block| SubPlugin::of(block) == Some(SubPlugin::IstioRedirect));
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

/// Returns the attachments whose policies apply to the pod: those that run in this process, or the node's own
/// sub-plugins if there are none and the pod may have a sidecar.
pub(super) fn evaluated(
    node: &NetConf,
    attached: Vec<InProcessAttachment>,
    may_have_sidecar: bool,
) -> Vec<InProcessAttachment> {
    let applies_to_all_pods = attached.is_empty() && may_have_sidecar && sub_plugins::wants(&node.chain).pod;
    let own = || vec![InProcessAttachment { name: node.name.clone(), conf: node.clone() }];
    if applies_to_all_pods { own() } else { attached }
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
