//! The node configuration file, which applies to every attachment; and the report of a call to the node's agent, for
//! the agent's log.

use super::evaluation::{is_agent, is_injected};
use super::status;
use crate::cluster::agent::{self, CallReport};
use crate::cni::{
    CniCommand, Code, Document, Error, NODE_CONFIGURATION, NODE_CONFIGURATION_LIMIT, NetConf, NodeConf, OWN_TYPES,
    Request, configuration,
};
use crate::host_path::HostPath;
use crate::logging::Collected;
use crate::trusted_file;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Instant;

/// The maximum length of an error in a report, in characters.
const MAX_REPORTED_ERROR: usize = 4000;

/// Replaces keys in the configuration of a call by the node's. Returns a warning for each ignored key of the
/// attachment. The runtime's own configuration of a primary plugin is not changed.
///
/// # Errors
/// The file is invalid or not trusted, or an attachment's configuration would make this the primary plugin. These are
/// warnings for DEL and GC, which must not block the deletion of a pod. An invalid file is a warning for STATUS and for
/// pods that need no facts too, because the agent restores the file.
pub(super) fn apply(request: &Request, document: &mut Document, program: &str) -> Result<Vec<String>, Error> {
    let is_cleanup = matches!(request.command, CniCommand::Del | CniCommand::Gc);
    let (node, mut warnings) = match read(NODE_CONFIGURATION, Path::new(NODE_CONFIGURATION)) {
        Ok(None) => return Ok(Vec::new()),
        Ok(Some(found)) => found,
        Err(error) if is_cleanup => return Ok(vec![format!("the node's keys are not applied: {}", error.msg)]),
        Err(error) => return apply_without_file(request, document, program, error),
    };
    if document.is_primary() && node.is_attached() {
        let msg = format!(
            "clusterNetwork, delegates: only the runtime's configuration can set these keys, and {NODE_CONFIGURATION} \
             states that detour is not the primary plugin of this node; if it is, install it with --primary=true \
             (primaryPlugin.enabled)"
        );
        if !is_cleanup {
            let is_status = request.command == CniCommand::Status;
            return Err(Error::new(if is_status { Code::NotAvailable } else { Code::InvalidConfig }, msg));
        }
        // ADD is refused, so there is no network to remove, and nothing is executed.
        document.remove_networks();
        warnings.push(format!("the networks are ignored: {msg}"));
    }
    if !document.is_primary() {
        warnings.extend(document.govern(&node, program));
    }
    Ok(warnings)
}

/// Lets the calls continue for the agent's own pod, which restores the file, and for pods that need no facts. `error`
/// is the reason why the file can't be used. STATUS concerns the runtime's own configuration, because no pod is
/// involved. Returns the warnings.
///
/// The configuration of an ADD may come from an attachment, so it can't set any key of the node. Its description of the
/// agent's pod and the pod's annotations apply: at worst, its author excludes pods that need not select it anyway.
/// A primary plugin's configuration executes programs for every pod, and its author may not be the node's
/// administrator.
///
/// # Errors
/// `error`, for every other call.
fn apply_without_file(
    request: &Request,
    document: &mut Document,
    program: &str,
    error: Error,
) -> Result<Vec<String>, Error> {
    let warning = format!("the node's keys are not applied until the agent restores the file: {}", error.msg);
    let conf = NetConf::from_document(document, request.command, program).ok();
    let needs_no_facts = |conf: &NetConf| is_agent(conf, request.args.pod.as_ref()) || is_injected(conf) == Some(false);
    match (request.command, conf) {
        (CniCommand::Status, Some(conf)) if status::has_agent(&conf.kubernetes) => Ok(vec![warning]),
        (CniCommand::Status, _) => Err(Error { code: Code::NotAvailable, ..error }),
        (CniCommand::Add | CniCommand::Check, Some(conf)) if !document.is_primary() && needs_no_facts(&conf) => {
            let mut warnings = vec![warning];
            warnings.extend(document.govern(&NodeConf::without_file(&conf, NODE_CONFIGURATION), program));
            Ok(warnings)
        }
        _ => {
            let about = if request.about.is_empty() { String::new() } else { format!("pod {}: ", request.about) };
            let next = "the agent on this node restores the file; without an agent, run detour install";
            Err(Error { msg: format!("{about}{}; {next}", error.msg), ..error })
        }
    }
}

/// The text of an installed configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstalledText {
    /// Its file.
    pub path: HostPath,
    /// Its text: of a configuration list, only the entry of the installation.
    pub text: String,
    /// Whether its place makes it apply to every pod: a configuration list, or Multus's auxiliary chain.
    pub for_every_pod: bool,
}

/// Reads the node configuration and its warnings; `None` if the file does not exist. `place` is its name in messages,
/// and `path` its path in this process.
///
/// # Errors
/// [`Code::InvalidConfig`]: another user can change the file, it can't be read, or it is invalid.
pub fn read(place: &str, path: &Path) -> Result<Option<(NodeConf, Vec<String>)>, Error> {
    // Without the file, its directories are not checked either.
    if matches!(fs::symlink_metadata(path), Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
    {
        return Ok(None);
    }
    match trusted_file::read_trusted(path, NODE_CONFIGURATION_LIMIT) {
        Ok(text) => NodeConf::parse(place, &text).map(Some),
        Err(error) => Err(Error::new(Code::InvalidConfig, format!("node configuration {place} is not used: {error}"))),
    }
}

/// Returns the effective configuration of an attachment, or of a plugin in a list, on a node with this configuration.
///
/// # Errors
/// As [`configuration`].
pub fn effective(node: Option<&NodeConf>, place: &Path, text: &str) -> Result<NetConf, Error> {
    let govern = || {
        let value = serde_json::from_str(text).ok()?;
        // The node configuration does not apply to the runtime's configuration of a primary plugin.
        let (value, _) = node?.govern_all(&value, &OWN_TYPES).ok()??;
        Some(value.to_string())
    };
    configuration(place, govern().as_deref().unwrap_or(text).as_bytes())
}

/// Reports the outcome of a call, which began at `started`, to the agent that the configuration names. It takes as long
/// as one write, and the call does not depend on it.
pub(super) fn report<T>(
    request: &Request,
    conf: &NetConf,
    outcome: &Result<T, Error>,
    started: Instant,
    events: Collected,
) {
    // Runtimes call STATUS every few seconds.
    let Some(socket) = conf.kubernetes.agent_socket.as_ref().filter(|_| request.command != CniCommand::Status) else {
        return;
    };
    let error = outcome.as_ref().err();
    let report = CallReport {
        command: request.command.to_string(),
        pod: request.about.clone(),
        container: request.container_id.clone(),
        network: conf.name.clone(),
        ifname: request.ifname.clone(),
        code: error.map(Error::number),
        error: error.map(|error| error.to_string().chars().take(MAX_REPORTED_ERROR).collect()).unwrap_or_default(),
        facts: events.facts,
        wall_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
        cpu_us: cpu_us(),
        warnings: events.warnings,
    };
    agent::tell(socket, report);
}

/// Returns the CPU time of this process and of the executables that it ran, in microseconds.
fn cpu_us() -> u64 {
    let of = |who| getrusage(who).map_or(0, |used| (used.user_time() + used.system_time()).num_microseconds());
    u64::try_from(of(UsageWho::RUSAGE_SELF) + of(UsageWho::RUSAGE_CHILDREN)).unwrap_or(0)
}
