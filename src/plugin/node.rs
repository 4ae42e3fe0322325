//! The node configuration file: what it states applies to every attachment that a call is for.
//!
//! What the node's agent is told of a call, for its log.

use super::desired_policy::is_agent;
use super::status;
use crate::cluster::agent;
use crate::cluster::agent::CallReport;
use crate::cni::{
    CniCommand, Code, Document, Error, NODE_CONFIGURATION, NODE_CONFIGURATION_LIMIT, NetConf, NodeConf, Request,
};
use crate::logging::EventCollector;
use crate::trusted_file;
use nix::sys::resource::{UsageWho, getrusage};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

/// Puts the node's keys into the configuration of a call, in place of the attachment's own. Returns what is
/// ignored of those, one line each. The runtime's own configuration of a primary plugin stays as it is.
///
/// # Errors
/// The file is wrong or not trusted, or an attachment's configuration would make this the primary plugin.
/// DEL and GC go on with a warning instead: they must not keep a pod from being deleted. So do STATUS and the
/// calls for the agent's own pod, because the agent restores the file.
pub(super) fn apply(request: &Request, document: &mut Document, program: &str) -> Result<Vec<String>, Error> {
    let is_cleanup = matches!(request.command, CniCommand::Del | CniCommand::Gc);
    let (node, mut warnings) = match read(NODE_CONFIGURATION, Path::new(NODE_CONFIGURATION)) {
        Ok(None) => return Ok(Vec::new()),
        Ok(Some(found)) => found,
        Err(error) if is_cleanup => return Ok(vec![format!("the node's keys are not applied: {}", error.msg)]),
        Err(error) => return without_the_nodes_keys(request, document, program, error),
    };
    if document.is_primary() && node.is_attached() {
        match request.command {
            CniCommand::Status => return Err(Error { code: Code::NotAvailable, ..not_primary() }),
            _ if !is_cleanup => return Err(not_primary()),
            _ => {}
        }
        // ADD is refused, so there is no network to remove, and nothing is executed.
        document.remove_networks();
        warnings.push(format!("the networks are ignored: {}", not_primary().msg));
    }
    if !document.is_primary() {
        warnings.extend(document.govern(&node, program));
    }
    Ok(warnings)
}

/// Lets those calls continue that the agent's own pod depends on, because the agent restores the file; `error` is
/// why it can't be used. STATUS is for the runtime's own configuration, because no pod is involved. Returns the
/// warnings.
///
/// The configuration of an ADD may be an attachment's, so it can't set any key of the node. What it says of the
/// agent's pod applies: at worst, its author keeps it from pods that would not have to select it. A primary plugin's
/// configuration executes programs for every pod, and whether its author is the node's is not known.
///
/// # Errors
/// `error`, for every other call.
fn without_the_nodes_keys(
    request: &Request,
    document: &mut Document,
    program: &str,
    error: Error,
) -> Result<Vec<String>, Error> {
    let warning = format!("the node's keys are not applied, until the agent restores the file: {}", error.msg);
    let conf = NetConf::understand(document, request.command, program).ok();
    let of_agent = |conf: &NetConf| request.args.pod.as_ref().is_some_and(|pod| is_agent(conf, pod));
    match (request.command, conf) {
        (CniCommand::Status, Some(conf)) if status::has_agent(&conf.kubernetes) => Ok(vec![warning]),
        (CniCommand::Status, _) => Err(Error { code: Code::NotAvailable, ..error }),
        (CniCommand::Add | CniCommand::Check, Some(conf)) if !document.is_primary() && of_agent(&conf) => {
            let mut warnings = vec![warning];
            warnings.extend(document.govern(&NodeConf::of_agent(&conf, NODE_CONFIGURATION), program));
            Ok(warnings)
        }
        _ => Err(error),
    }
}

/// Reads the node configuration, with its warnings; `None` if there is no such file. `place` names it in
/// messages, and `path` is where this process finds it.
///
/// # Errors
/// [`Code::InvalidConfig`]: another user can change it, it can't be read, or it is wrong.
pub fn read(place: &str, path: &Path) -> Result<Option<(NodeConf, Vec<String>)>, Error> {
    // On a node without it, nothing else is examined.
    if matches!(fs::symlink_metadata(path), Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
    {
        return Ok(None);
    }
    match trusted_file::read_trusted(path, NODE_CONFIGURATION_LIMIT) {
        Ok(text) => NodeConf::parse(place, &text).map(Some),
        Err(error) => Err(Error::new(Code::InvalidConfig, format!("node configuration {place} is not used: {error}"))),
    }
}

fn not_primary() -> Error {
    let msg = format!(
        "clusterNetwork and delegates are for the runtime's own configuration, and {NODE_CONFIGURATION} states that \
         this is not the node's primary plugin; if it is, install with --primary=true (primaryPlugin.enabled)"
    );
    Error::new(Code::InvalidConfig, msg)
}

/// Tells how a call ended that began at `started`, where the configuration names an agent. It takes
/// as long as a write, and nothing depends on it.
pub(super) fn tell<T>(
    request: &Request,
    conf: &NetConf,
    answer: &Result<T, Error>,
    started: Instant,
    noticed: &EventCollector,
) {
    // A runtime asks for the status every few seconds.
    let Some(socket) = conf.kubernetes.agent_socket.as_ref().filter(|_| request.command != CniCommand::Status) else {
        return;
    };
    let error = answer.as_ref().err();
    let called = CallReport {
        command: request.command.to_string(),
        pod: request.about(),
        container: request.container_id.clone(),
        network: conf.name.clone(),
        ifname: request.ifname.clone(),
        code: error.map(Error::number),
        error: error.map(|error| error.to_string().chars().take(LONGEST).collect()).unwrap_or_default(),
        facts: noticed.facts(),
        wall_us: microseconds(started.elapsed()),
        cpu_us: microseconds(processor_time()),
        warnings: noticed.warnings(),
    };
    agent::tell(socket, called);
}

/// So much of an error is told, in characters.
const LONGEST: usize = 4000;

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// This process's and that of the executables that it ran.
fn processor_time() -> Duration {
    let used = [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN].into_iter().filter_map(|who| getrusage(who).ok());
    let microseconds = used.map(|used| {
        let (user, system) = (used.user_time(), used.system_time());
        (user.tv_sec() + system.tv_sec()) * 1_000_000 + user.tv_usec() + system.tv_usec()
    });
    Duration::from_micros(u64::try_from(microseconds.sum::<i64>()).unwrap_or(0))
}
