//! What the attachments that run in this process and the node's own chain ask for together.

use super::PrimaryCall;
use super::lazy_pod::LazyPod;
use crate::cni::{Block, CniCommand, Code, Error, NetConf, RuleFormatSetting, primary_in_attachment};
use crate::networks::PodNetwork;
use crate::plugin::desired_policy::wish_by;
use crate::pod::PodRef;
use crate::policy::Policy;
use crate::sub_plugins::{self, SubPlugin, skip_reason};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// An attachment that runs in this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InProcessAttachment {
    /// How users know it.
    pub name: String,
    /// Its configuration, with the node's keys; [`unite`] adds the node's sub-plugins.
    pub conf: NetConf,
}

impl InProcessAttachment {
    /// The node's own chain.
    pub(super) fn node(conf: &NetConf) -> Self {
        Self { name: conf.name.clone(), conf: conf.clone() }
    }

    /// The attachment's configuration with the node's keys: its own chain, whose paths name the attachment, and
    /// what the pod passes to it.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`]: its configuration is wrong.
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
        let path = |path: String| format!("network {name}, {path}");
        let chain = own.chain.into_iter().map(|Block { path: own, keys }| Block { path: path(own), keys }).collect();
        let mut conf = NetConf { chain, dialect: own.dialect, ..node.clone() };
        if conf.dialect == RuleFormatSetting::Auto {
            conf.dialect = node.dialect;
        }
        // Of an attachment that the node's administrator did not write, these are the node's already.
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

/// Gives each attachment what it is evaluated with: its own exclusions, the node's, and the redirection. Exclusions
/// stay in blocks of their own, so that each keeps all its keys. The blocks of `istio-redirect` of all attachments
/// apply together, over the node's: a key that an attachment sets is no longer the node's. Attachments that skip
/// `pod`'s namespace have no part in that.
///
/// # Errors
/// [`Code::InvalidConfig`]: two attachments pass different values for one key.
pub(super) fn unite(node: &NetConf, attached: &mut [InProcessAttachment], pod: Option<&PodRef>) -> Result<(), Error> {
    let counts = |one: &&InProcessAttachment| pod.is_none_or(|pod| skip_reason(&one.conf, pod).is_none());
    let counting: Vec<&InProcessAttachment> = attached.iter().filter(counts).collect();
    let arguments = arguments(&counting)?;
    let of_attachments = counting.iter().flat_map(|one| &one.conf.chain);
    let mut redirection: Vec<Block> = of_attachments.filter(|block| redirects(block)).cloned().collect();
    let all_keys = redirection.iter().flat_map(|block| &block.keys);
    let set = all_keys.filter(|(key, value)| *key != "type" && !value.is_null()).map(|(key, _)| key.clone());
    let set: BTreeSet<String> = set.collect();
    let own = node.chain.iter().filter(|block| SubPlugin::of(block).is_some());
    let (beneath, others): (Vec<&Block>, Vec<&Block>) = own.partition(|block| redirects(block));
    redirection.extend(beneath.iter().map(|block| {
        let keys = block.keys.iter().filter(|(key, _)| !set.contains(*key));
        Block { path: block.path.clone(), keys: keys.map(|(key, value)| (key.clone(), value.clone())).collect() }
    }));
    for InProcessAttachment { conf, .. } in attached {
        let (redirect, mut own): (Vec<_>, Vec<_>) = std::mem::take(&mut conf.chain).into_iter().partition(redirects);
        if !redirect.is_empty() || !beneath.is_empty() {
            conf.chain.clone_from(&redirection);
            if !arguments.is_empty() {
                conf.args.insert(SubPlugin::IstioRedirect.name().to_owned(), arguments.clone().into());
            }
        }
        conf.chain.append(&mut own);
        conf.chain.extend(others.iter().copied().cloned());
    }
    Ok(())
}

fn redirects(block: &Block) -> bool {
    SubPlugin::of(block) == Some(SubPlugin::IstioRedirect)
}

/// What pods pass to `istio-redirect` by their attachments, key by key.
fn arguments(attached: &[&InProcessAttachment]) -> Result<Map<String, Value>, Error> {
    let mut all: BTreeMap<&String, (&Value, &str)> = BTreeMap::new();
    let name = SubPlugin::IstioRedirect.name();
    for one in attached {
        // Any other value is refused where it is parsed.
        let Some(Value::Object(keys)) = one.conf.args.get(name) else { continue };
        for (key, value) in keys.iter().filter(|(_, value)| !value.is_null()) {
            match all.get(key) {
                Some((other, first)) if *other != value => {
                    let what = format!("args.cni.{name}.{key} is {other} in one and {value} in the other");
                    return Err(contradiction(first, &one.name, &what));
                }
                _ => drop(all.insert(key, (value, &one.name))),
            }
        }
    }
    Ok(all.into_iter().map(|(key, (value, _))| (key.clone(), value.clone())).collect())
}

/// What the pod's rules are to be, and how they are written. `previous` is the default network's
/// result in the configuration's version.
///
/// # Errors
/// Facts can't be known, something is wrong, or two attachments contradict each other.
pub(super) fn wish(
    context: &PrimaryCall<'_>,
    known: &LazyPod<'_>,
    attached: &[InProcessAttachment],
    previous: &Value,
) -> Result<(Policy, RuleFormatSetting), Error> {
    let pod = context.request.args.pod.as_ref();
    let node = [InProcessAttachment::node(context.conf)];
    let asking = asking(attached, &node, known.may_be_meshed());
    let (mut all, mut ignored): (Vec<(&str, Policy)>, _) = (Vec::new(), BTreeSet::new());
    for one in asking {
        let conf = NetConf { prev_result: Some(previous.clone()), ..one.conf.clone() };
        let facts = |pod: &PodRef, with_namespace| known.facts(pod, with_namespace);
        let wish = wish_by(pod, &conf, known.cluster().is_some().then_some(&facts));
        let wish = wish.map_err(|error| about(&one.name, error))?;
        tracing::info!(attachment = one.name, exclusions = wish.policy.exclusions.len(), "{}", wish.why);
        all.push((&one.name, wish.policy));
        ignored.extend(wish.ignored);
    }
    ignored.iter().for_each(|ignored| tracing::warn!("{ignored}"));
    Ok((united(&all)?, dialect(context.conf, asking)?))
}

/// What all ask for together, each by its name.
///
/// # Errors
/// Two contradict each other.
pub fn united(all: &[(&str, Policy)]) -> Result<Policy, Error> {
    let mut whole = Policy::default();
    for (index, (name, policy)) in all.iter().enumerate() {
        whole = whole.union(policy).map_err(|conflict| {
            let contradicts = |(_, before): &&(&str, Policy)| before.union(policy).is_err();
            let other = all[..index].iter().find(contradicts).map_or("the others", |(other, _)| other);
            contradiction(other, name, &conflict)
        })?;
    }
    Ok(whole)
}

/// The error with the attachment's name; the path of an attachment's block has one already.
#[must_use]
pub fn about(name: &str, error: Error) -> Error {
    if error.msg.contains("network ") {
        error
    } else {
        Error { msg: format!("network {name}: {}", error.msg), ..error }
    }
}

/// Has the pod's facts fetched that [`wish`] will need, before anything runs.
///
/// # Errors
/// They can't be known.
pub(super) fn ask_ahead(
    context: &PrimaryCall<'_>,
    known: &LazyPod<'_>,
    attached: &[InProcessAttachment],
) -> Result<(), Error> {
    let (Some(pod), Some(_)) = (&context.request.args.pod, known.cluster()) else { return Ok(()) };
    let node = [InProcessAttachment::node(context.conf)];
    for InProcessAttachment { conf, .. } in asking(attached, &node, known.may_be_meshed()) {
        let wants = sub_plugins::wants(&conf.chain);
        if wants.pod && skip_reason(conf, pod).is_none() {
            known.facts(pod, wants.namespace)?;
        }
    }
    Ok(())
}

/// Who asks for something: the attachments, with the node's sub-plugins, else the node's chain alone.
pub(super) fn asking<'a>(
    attached: &'a [InProcessAttachment],
    node: &'a [InProcessAttachment],
    may_be_meshed: bool,
) -> &'a [InProcessAttachment] {
    let for_every_pod = node.iter().any(|node| sub_plugins::wants(&node.conf.chain).pod);
    if attached.is_empty() && for_every_pod && may_be_meshed { node } else { attached }
}

/// How what `asking` ask for is written.
///
/// # Errors
/// Two contradict each other.
pub(super) fn dialect(node: &NetConf, asking: &[InProcessAttachment]) -> Result<RuleFormatSetting, Error> {
    let mut asked = asking.iter().filter(|one| one.conf.dialect != RuleFormatSetting::Auto);
    let Some(first) = asked.next() else { return Ok(node.dialect) };
    match asked.find(|other| other.conf.dialect != first.conf.dialect) {
        Some(other) => Err(contradiction(&first.name, &other.name, &"dialect")),
        None => Ok(first.conf.dialect),
    }
}

fn contradiction(first: &str, second: &str, what: &dyn std::fmt::Display) -> Error {
    let msg = format!(
        "networks {first} and {second} contradict each other: {what}; a pod has one redirection, so give both the same value"
    );
    Error::new(Code::InvalidConfig, msg)
}
