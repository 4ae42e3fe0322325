//! STATUS: whether an ADD could be served now (SPEC.md, "STATUS").
//!
//! A node whose plugin fails STATUS is NotReady, and its kubelet starts pods with `hostNetwork` only. So STATUS
//! never fails for what the node's agent repairs, whose own pod needs a network: that node would stay NotReady.

use crate::cluster;
use crate::cni::{Code, Error, Kubernetes, NetConf, Request};
use crate::firewall::nfnetlink::NfSocket;
use crate::state::{ROOT, Store};
use serde_json::Value;

/// Nothing goes to stdout.
///
/// # Errors
/// [`Code::NotAvailable`], with everything that stands in the way.
pub(super) fn run(_: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    available(conf).map(|_| None)
}

/// Returns whether facts can be had now; if not, the agent repairs that.
///
/// # Errors
/// As [`run`].
pub(super) fn available(conf: &NetConf) -> Result<bool, Error> {
    let facts = facts(conf);
    let has_facts = matches!(facts, Ok(true));
    let obstacles: Vec<String> = [ambient(conf), facts.map(drop), kernel(), state()]
        .into_iter()
        .filter_map(Result::err)
        .map(|error| error.to_string())
        .collect();
    if obstacles.is_empty() {
        return Ok(has_facts);
    }
    let msg = format!("network {}: an ADD can't be served now", conf.name);
    Err(Error::new(Code::NotAvailable, msg).with_details(obstacles.join("; ")))
}

fn ambient(conf: &NetConf) -> Result<(), Error> {
    let msg = "ambient_enabled: ambient mode is not served; run istio-cni itself for pods without sidecars";
    if conf.ambient_enabled { Err(Error::new(Code::InvalidConfig, msg)) } else { Ok(()) }
}

/// Whether facts can be had. If the configuration names an agent on this node, an error is logged: the agent
/// renews the kubeconfig, and its own pod is attached without facts.
fn facts(conf: &NetConf) -> Result<bool, Error> {
    match cluster::source(&conf.kubernetes).map_or(Ok(()), |source| source.probe()) {
        Ok(()) => Ok(true),
        Err(error) if has_agent(&conf.kubernetes) => {
            tracing::warn!("an ADD would fail now, which the agent on this node repairs: {error}");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Whether the configuration names an agent on this node, which repairs what it installed.
pub(super) fn has_agent(kubernetes: &Kubernetes) -> bool {
    let Kubernetes { agent_socket, agent_namespace, manifests_dir, .. } = kubernetes;
    manifests_dir.is_none() && (agent_socket.is_some() || agent_namespace.is_some())
}

fn kernel() -> Result<(), Error> {
    let answer = NfSocket::open().and_then(|mut socket| socket.generation());
    let msg = |e| format!("the kernel's nf_tables does not answer: {e}");
    answer.map(|_| ()).map_err(|e| Error::new(Code::KernelRefused, msg(e)))
}

fn state() -> Result<(), Error> {
    Store::new(ROOT).probe()
}
