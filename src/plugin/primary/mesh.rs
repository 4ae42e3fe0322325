//! What the attachments that run in this process and the node's own chain ask for together.

use super::Context;
use super::known_pod::KnownPod;
use crate::chain::{self, SubPlugin};
use crate::cni::{Block, Code, Command, Dialect, Error, NetConf, primary_in_attachment};
use crate::networks::PodNetwork;
use crate::plugin::wish::{left_out, wish_by};
use crate::pod::PodRef;
use crate::policy::Policy;
use serde_json::Value;

/// An attachment that runs in this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// How users know it.
    pub name: String,
    /// Its configuration, laid over the node's.
    pub conf: NetConf,
}

impl Attached {
    /// The node's own chain.
    pub(super) fn node(conf: &NetConf) -> Self {
        Self { name: conf.name.clone(), conf: conf.clone() }
    }

    /// Lays the attachment's configuration over the node's: its own chain, each sub-plugin's keys
    /// over the node's for the same sub-plugin, and what the pod passes to it.
    ///
    /// # Errors
    /// [`Code::InvalidConfig`]: its configuration is wrong.
    pub(super) fn of(node: &NetConf, network: &PodNetwork) -> Result<Self, Error> {
        let name = network.name.clone();
        let about = |error: Error| Error { msg: format!("network {name}: {}", error.msg), ..error };
        let own = NetConf::parse(network.configuration.text.as_bytes(), Command::Add, "").map_err(about)?;
        if own.primary.is_some() {
            return Err(about(primary_in_attachment()));
        }
        for warning in &own.warnings {
            tracing::warn!("network {name}: {warning}");
        }
        let mut conf = NetConf { chain: over(&node.chain, &own.chain), dialect: own.dialect, ..node.clone() };
        if conf.dialect == Dialect::Auto {
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

/// `own` with the node's keys beneath those of the same sub-plugin; sub-plugins that only the node
/// has follow. Executables stay whose they are.
fn over(node: &[Block], own: &[Block]) -> Vec<Block> {
    let mut laid = Vec::new();
    for block in own {
        let beneath =
            node.iter().find(|other| SubPlugin::of(other).is_some() && SubPlugin::of(other) == SubPlugin::of(block));
        let mut keys = beneath.map(|block| block.keys.clone()).unwrap_or_default();
        keys.extend(block.keys.clone());
        laid.push(Block { path: block.path.clone(), keys });
    }
    let is_new = |block: &&Block| {
        let kind = SubPlugin::of(block);
        kind.is_some() && own.iter().all(|other| SubPlugin::of(other) != kind)
    };
    laid.extend(node.iter().filter(is_new).cloned());
    laid
}

/// What the pod's rules are to be, and how they are written. `previous` is the default network's
/// result in the configuration's version.
///
/// # Errors
/// Facts can't be known, something is wrong, or two attachments contradict each other.
pub(super) fn wish(
    context: &Context<'_>,
    known: &KnownPod<'_>,
    attached: &[Attached],
    previous: &Value,
) -> Result<(Policy, Dialect), Error> {
    let pod = context.request.args.pod.as_ref();
    let node = [Attached::node(context.conf)];
    let asking = asking(attached, &node, known.may_be_meshed());
    let mut all: Vec<(&str, Policy)> = Vec::new();
    for one in asking {
        let conf = NetConf { prev_result: Some(previous.clone()), ..one.conf.clone() };
        let facts = |pod: &PodRef, with_namespace| known.facts(pod, with_namespace);
        let wish = wish_by(pod, &conf, known.cluster().is_some().then_some(&facts));
        let wish = wish.map_err(|error| Error { msg: format!("network {}: {}", one.name, error.msg), ..error })?;
        tracing::info!(attachment = one.name, exclusions = wish.policy.exclusions.len(), "{}", wish.why);
        all.push((&one.name, wish.policy));
    }
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

/// Has the pod's facts fetched that [`wish`] will need, before anything runs.
///
/// # Errors
/// They can't be known.
pub(super) fn ask_ahead(context: &Context<'_>, known: &KnownPod<'_>, attached: &[Attached]) -> Result<(), Error> {
    let (Some(pod), Some(_)) = (&context.request.args.pod, known.cluster()) else { return Ok(()) };
    let node = [Attached::node(context.conf)];
    for Attached { conf, .. } in asking(attached, &node, known.may_be_meshed()) {
        let wants = chain::wants(&conf.chain);
        if wants.pod && left_out(conf, pod).is_none() {
            known.facts(pod, wants.namespace)?;
        }
    }
    Ok(())
}

/// Who asks for something: the attachments, over whose chains the node's is laid already, else the
/// node's chain alone.
pub(super) fn asking<'a>(attached: &'a [Attached], node: &'a [Attached], may_be_meshed: bool) -> &'a [Attached] {
    let for_every_pod = node.iter().any(|node| chain::wants(&node.conf.chain).pod);
    if attached.is_empty() && for_every_pod && may_be_meshed { node } else { attached }
}

/// How what `asking` ask for is written.
///
/// # Errors
/// Two contradict each other.
pub(super) fn dialect(node: &NetConf, asking: &[Attached]) -> Result<Dialect, Error> {
    let mut asked = asking.iter().filter(|one| one.conf.dialect != Dialect::Auto);
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
