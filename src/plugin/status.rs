//! STATUS: checks that an ADD would succeed now (SPEC.md, "STATUS").
//!
//! If STATUS fails, the node becomes NotReady and its kubelet starts only pods with `hostNetwork`. So STATUS never
//! fails because of something that the node's agent repairs: the agent's pod needs a network, and the node would stay
//! NotReady.

use super::probe;
use super::validate::check_sub_plugins;
use crate::cluster;
use crate::cni::{Code, Error, Kubernetes, NetConf, OWN_LIST, is_configuration_file};
use crate::firewall::nfnetlink::NfSocket;
use crate::state::{ROOT, Store};
use crate::trusted_file;
use serde_json::Value;
use std::path::Path;
use std::{fs, io};

/// The maximum size of a configuration of the loopback interface; a larger file configures another network.
const MAX_LOOPBACK_SIZE: u64 = 16 << 10;

/// Checks everything that an ADD needs. Returns whether facts can be fetched now; otherwise the agent repairs their
/// source.
///
/// # Errors
/// [`Code::NotAvailable`], with all causes in its details.
pub(super) fn check_availability(conf: &NetConf) -> Result<bool, Error> {
    let facts = check_facts(conf);
    let has_facts = matches!(facts, Ok(true));
    let outcomes = [
        check_chain(conf),
        check_ambient(conf),
        check_cluster_network(conf),
        facts.map(drop),
        check_kernel(),
        check_guard(conf),
        Store::new(ROOT).probe(),
    ];
    let causes: Vec<String> = outcomes.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
    if causes.is_empty() {
        return Ok(has_facts);
    }
    let msg = format!("network {}: an ADD would fail now", conf.name);
    Err(Error::new(Code::NotAvailable, msg).with_details(causes.join("; ")))
}

/// Checks the sub-plugins as an ADD does. No agent repairs them: it validates a configuration before it writes it.
///
/// # Errors
/// The first setting that an ADD would reject.
pub(super) fn check_chain(conf: &NetConf) -> Result<(), Error> {
    let source = if conf.primary.is_some() { cluster::source_or_in_cluster } else { cluster::source };
    check_sub_plugins(conf, Some(&conf.group_file), source(&conf.kubernetes).is_some())
}

fn check_ambient(conf: &NetConf) -> Result<(), Error> {
    let msg = "ambient_enabled: detour does not redirect pods of the ambient mesh; run istio-cni for them, and remove \
               ambient_enabled or istio-redirect";
    if conf.redirects_ambient { Err(Error::new(Code::InvalidConfig, msg)) } else { Ok(()) }
}

/// Checks that the cluster network has not withdrawn its configuration list, of which this one is a copy: without the
/// copy, the runtime would report no network.
fn check_cluster_network(conf: &NetConf) -> Result<(), Error> {
    let Some(directory) = &conf.cni_conf_dir else { return Ok(()) };
    let entries = match fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>) {
        Ok(entries) => entries,
        Err(error) => {
            tracing::warn!("can't read cni_conf_dir: {}: {error}", directory.display());
            return Ok(());
        }
    };
    let is_other = |name: &str| name != OWN_LIST && is_configuration_file(name);
    let mut others = entries.iter().filter(|entry| entry.file_name().to_str().is_some_and(is_other));
    if others.any(|entry| !is_loopback(&entry.path())) {
        return Ok(());
    }
    let directory = directory.display();
    let msg = format!(
        "cni_conf_dir: {directory} has no configuration of the cluster network: {OWN_LIST} is a copy of one that was \
         removed; check the pods of the cluster network on this node"
    );
    Err(Error::new(Code::NotAvailable, msg))
}

/// Whether a file configures only the loopback interface. A file that can't be read may be the cluster network's.
fn is_loopback(path: &Path) -> bool {
    let text = trusted_file::read(path, MAX_LOOPBACK_SIZE).ok();
    let value: Option<Value> = text.and_then(|text| serde_json::from_slice(&text).ok());
    let has_type = |plugin: &Value| plugin["type"] == "loopback";
    value.is_some_and(|value| match value["plugins"].as_array() {
        Some(plugins) => !plugins.is_empty() && plugins.iter().all(has_type),
        None => has_type(&value),
    })
}

/// Returns whether facts can be fetched. If the configuration names an agent on this node, an error is only logged: the
/// agent renews the kubeconfig, and its own pod is attached without facts.
fn check_facts(conf: &NetConf) -> Result<bool, Error> {
    match cluster::source(&conf.kubernetes).map_or(Ok(()), |source| source.probe()) {
        Ok(()) => Ok(true),
        Err(error) if has_agent(&conf.kubernetes) => {
            tracing::warn!(
                "an ADD of a pod with a sidecar would fail now; the agent on this node repairs this: {error}"
            );
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Returns whether the configuration names an agent on this node, which repairs what it installed.
pub(super) fn has_agent(kubernetes: &Kubernetes) -> bool {
    let Kubernetes { agent_socket, agent_namespace, manifests_dir, .. } = kubernetes;
    manifests_dir.is_none() && (agent_socket.is_some() || agent_namespace.is_some())
}

/// Checks that the kernel accepts the rules of the guard, if the chain has one.
fn check_guard(conf: &NetConf) -> Result<(), Error> {
    let Some(why) = probe::refused_guard(&conf.chain) else { return Ok(()) };
    let msg = format!(
        "mesh-guard: the kernel refuses its rules: {why}; check that the node's kernel has nft_reject_inet and \
         nft_fib_inet, or remove mesh-guard"
    );
    Err(Error::new(Code::KernelRefused, msg))
}

fn check_kernel() -> Result<(), Error> {
    let generation = NfSocket::open().and_then(|mut socket| socket.generation());
    let failed = |e| Error::new(Code::KernelRefused, format!("the kernel's nf_tables does not answer: {e}"));
    generation.map(drop).map_err(failed)
}
