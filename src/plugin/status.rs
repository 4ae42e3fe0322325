//! STATUS: whether an ADD could be served now (SPEC.md, "STATUS").

use crate::cluster;
use crate::cni::{Code, Error, NetConf, Request};
use crate::firewall::nfnetlink::Socket;
use crate::state::{ROOT, Store};
use serde_json::Value;

/// Nothing goes to stdout.
///
/// # Errors
/// [`Code::NotAvailable`], with everything that stands in the way.
pub(super) fn run(_: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    let obstacles: Vec<String> = [ambient(conf), facts(conf), kernel(), state()]
        .into_iter()
        .filter_map(Result::err)
        .map(|error| error.to_string())
        .collect();
    if obstacles.is_empty() {
        return Ok(None);
    }
    let msg = format!("network {}: an ADD can't be served now", conf.name);
    Err(Error::new(Code::NotAvailable, msg).with_details(obstacles.join("; ")))
}

fn ambient(conf: &NetConf) -> Result<(), Error> {
    let msg = "ambient_enabled: ambient mode is not served; run istio-cni itself for pods without sidecars";
    if conf.ambient_enabled { Err(Error::new(Code::InvalidConfig, msg)) } else { Ok(()) }
}

fn facts(conf: &NetConf) -> Result<(), Error> {
    cluster::source(&conf.kubernetes).map_or(Ok(()), |source| source.probe())
}

fn kernel() -> Result<(), Error> {
    let answer = Socket::open().and_then(|mut socket| socket.generation());
    let msg = |e| format!("the kernel's nf_tables does not answer: {e}");
    answer.map(|_| ()).map_err(|e| Error::new(Code::KernelRefused, msg(e)))
}

fn state() -> Result<(), Error> {
    Store::new(ROOT).probe()
}
