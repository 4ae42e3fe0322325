//! One call of the plugin, from its environment and stdin to what goes to stdout. A verb a file;
//! the order of things is known here and nowhere else.
//!
//! A panic is answered like any other failure: with one error object on stdout and exit code 1.
//!
//! VERSION: which versions of the protocol are spoken here. Needs neither stdin nor logging.
//!
//! The network namespace of a pod is never the plugin's own.

use crate::cni::version::{NEWEST, SUPPORTED};
use crate::cni::{CniCommand, Code, Document, Error, MAX_CONFIGURATION, NetConf, Request, result, variables};
use crate::logging::{EventCollector, Lines};
use crate::printable::Text;
use crate::streams::Stdout;
use crate::trusted_file::FileId;
use crate::{delegate, logging};
pub use bypassing::bypassing;
pub use container_status::{ContainerStatus, forget_gone, restore, standing};
use executables::ChainExecutables;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::{ErrorKind, Read, Write};
use std::panic::PanicHookInfo;
use std::path::Path;
use std::time::Instant;
use std::{fs, panic, process};
pub use validate::validate;

mod add;
mod bypassing;
mod check;
mod container_status;
mod del;
pub mod desired_policy;
mod executables;
mod gc;
pub mod netns_state;
pub mod node;
pub mod primary;
mod reconcile;
mod record;
mod status;
mod validate;

/// Serves a call. `program` is the name under which the binary was started.
///
/// # Errors
/// The error object for stdout (SPEC.md, "Error"), in the configuration's version where that is
/// known by then. From here on, a panic of any thread prints such an object and exits with 1.
pub fn call(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
    stdin: impl Read,
    program: &str,
) -> Result<Option<Value>, Value> {
    let in_newest = |error: Error| error.to_json(NEWEST);
    let variables = variables(environment).map_err(in_newest)?;
    if variables.get("CNI_COMMAND").is_some_and(|command| command == "VERSION") {
        return Ok(Some(answer()));
    }
    answer_in(NEWEST);
    let request = Request::parse(|name| variables.get(name).cloned()).map_err(in_newest)?;
    let mut document = read(stdin).and_then(|text| Document::parse(&text)).map_err(in_newest)?;
    answer_in(document.spoken_version());
    serve(&request, &mut document, program).map_err(|error| error.to_json(document.spoken_version()))
}

/// Reads stdin, and of a text that is too large no more than shows it.
fn read(stdin: impl Read) -> Result<Vec<u8>, Error> {
    let mut text = Vec::with_capacity(4096);
    match stdin.take(MAX_CONFIGURATION as u64 + 1).read_to_end(&mut text) {
        Ok(_) => Ok(text),
        Err(error) => Err(Error::new(Code::Io, format!("error reading from stdin: {error}"))),
    }
}

fn serve(request: &Request, document: &mut Document, program: &str) -> Result<Option<Value>, Error> {
    let (started, noticed, lines) = (Instant::now(), EventCollector::default(), Lines::default());
    let warnings = node::apply(request, document, program)?;
    let mut conf = understand(request, document, program)?;
    conf.warnings.splice(0..0, warnings);
    start_logging(request, &conf, &noticed, &lines);
    for warning in &conf.warnings {
        tracing::warn!("{warning}");
    }
    let answer = run(request, &conf);
    if let Err(error) = &answer {
        tracing::error!(code = error.number(), "{error}");
    }
    lines.finish();
    node::tell(request, &conf, &answer, started, &noticed);
    answer
}

fn understand(request: &Request, document: &Document, program: &str) -> Result<NetConf, Error> {
    match NetConf::understand(document, request.command, program) {
        Err(error) if request.command == CniCommand::Del => {
            let mut conf = NetConf::understand_for_del(document)?;
            conf.warnings.push(format!("DEL goes by what is right in it: {error}"));
            Ok(conf)
        }
        other => other,
    }
}

fn start_logging(request: &Request, conf: &NetConf, noticed: &EventCollector, lines: &Lines) {
    let context = [
        ("command", request.command.to_string()),
        ("network", conf.name.clone()),
        ("container", request.container_id.clone()),
        ("ifname", request.ifname.clone()),
        ("pod", request.about()),
    ];
    let context: Vec<_> = context.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let noticed = conf.kubernetes.agent_socket.is_some().then_some(noticed);
    logging::start(conf.log_level, conf.log_file.as_deref(), &context, noticed, Some(lines));
}

/// Does what the call asks for, as the primary plugin or as an attachment. The value, where there
/// is one, goes to stdout.
///
/// # Errors
/// Why it could not be done, for stdout.
pub fn run(request: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    refuse_own_netns(request)?;
    if request.command == CniCommand::Check {
        require_previous_result(conf)?;
    }
    match &conf.primary {
        Some(primary) => primary::run(&primary::PrimaryCall { request, conf, primary }),
        None => attached(request, conf),
    }
}

/// CHECK needs the result of ADD (SPEC.md, "CHECK"), also where only executables in the chain read it.
fn require_previous_result(conf: &NetConf) -> Result<(), Error> {
    if conf.prev_result.is_none() {
        let msg = "prevResult: missing; CHECK needs the result of ADD, which the runtime must pass";
        return Err(Error::new(Code::InvalidConfig, msg));
    }
    result::passed_through(conf).map(drop)
}

/// First what is done in this process, then the executables in the chain; for DEL the other way
/// round.
fn attached(request: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    let executables = ChainExecutables::of(request, conf);
    match request.command {
        CniCommand::Add => {
            executables.find()?;
            let result = add::run(request, conf)?;
            executables.add(conf, result).inspect_err(|_| undo(request, conf))
        }
        CniCommand::Check => check::run(request, conf).and_then(|_| executables.check(conf)).map(|()| None),
        CniCommand::Del => Error::all([executables.del(conf), del::run(request, conf).map(drop)]).map(|()| None),
        CniCommand::Gc => Error::all([gc::run(request, conf).map(drop), executables.gc(conf)]).map(|()| None),
        CniCommand::Status => status::run(request, conf).and_then(|_| executables.status()).map(|()| None),
    }
}

/// What this process did for an ADD goes where an executable after it failed.
fn undo(request: &Request, conf: &NetConf) {
    if let Err(error) = del::run(request, conf) {
        tracing::warn!("undoing a failed ADD: {error}");
    }
}

/// From now on, panics are answered in this version of the protocol.
fn answer_in(cni_version: &str) {
    let cni_version = cni_version.to_owned();
    panic::set_hook(Box::new(move |panic| {
        // What an ADD has begun is in its state, for the DEL that follows; an executable would run on.
        delegate::kill_running();
        let answer = Text::json(&error(panic).to_json(&cni_version).to_string());
        // Where stdout can't be written to there is nobody to tell.
        let _ = Stdout.write_all(format!("{answer}\n").as_bytes());
        process::exit(1);
    }));
}

fn error(panic: &PanicHookInfo<'_>) -> Error {
    let place = panic.location().map(|place| format!(" at {place}")).unwrap_or_default();
    let why = panic.payload_as_str().unwrap_or("no reason given");
    let msg = format!("a fault of the plugin's own{place}: {why}; please report it");
    Error::new(Code::Internal, msg)
}

/// SPEC.md, "VERSION"; like the reference library, without looking at the version on stdin.
fn answer() -> Value {
    json!({"cniVersion": NEWEST, "supportedVersions": SUPPORTED})
}

/// Refuses a call whose `CNI_NETNS` is the network namespace that the plugin runs in, the host's
/// as a rule, before anything is done there. The reference library (`pkg/skel`) looks only
/// afterwards.
fn refuse_own_netns(request: &Request) -> Result<(), Error> {
    request.netns.as_deref().filter(|_| !request.netns_override).map_or(Ok(()), check_own_netns)
}

/// Refuses a path of the network namespace that this process runs in.
///
/// # Errors
/// [`Code::InvalidNetns`]: it is, or that can't be known.
fn check_own_netns(netns: &Path) -> Result<(), Error> {
    let own = identity(Path::new("/proc/self/ns/net"))?;
    if own.is_some() && own == identity(netns)? {
        let msg = "plugin's netns and netns from CNI_NETNS should not be the same";
        return Err(Error::new(Code::InvalidNetns, msg));
    }
    Ok(())
}

/// A namespace is known by device and inode, not by its path (namespaces(7)). `None` where nothing is at
/// that path.
fn identity(path: &Path) -> Result<Option<FileId>, Error> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(FileId::of(&metadata))),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => {
            let msg = format!("network namespace {}: can't be examined: {error}", path.display());
            Err(Error::new(Code::InvalidNetns, msg))
        }
    }
}
