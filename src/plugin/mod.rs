//! One call of the plugin, from its environment and stdin to what goes to stdout. A verb a file;
//! the order of things is known here and nowhere else.

mod abandon;
mod add;
pub mod asked;
mod bypassing;
mod check;
mod converge;
mod del;
mod desired;
mod dialect;
mod executables;
mod foreign;
mod gc;
pub mod node;
mod own_netns;
mod panics;
pub mod primary;
mod record;
mod standing;
mod status;
mod told;
mod validate;
mod version;
pub mod wish;

pub use bypassing::bypassing;
pub use standing::{Standing, forget_gone, restore, standing};
pub use validate::validate;

use crate::cni::version::NEWEST;
use crate::cni::{Code, Command, Document, Error, MAX_CONFIGURATION, NetConf, Request, result, variables};
use crate::logging::{self, Lines, Noticed};
use executables::InChain;
use serde_json::Value;
use std::ffi::OsString;
use std::io::Read;
use std::time::Instant;

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
        return Ok(Some(version::answer()));
    }
    panics::answer_in(NEWEST);
    let request = Request::parse(|name| variables.get(name).cloned()).map_err(in_newest)?;
    let mut document = read(stdin).and_then(|text| Document::parse(&text)).map_err(in_newest)?;
    panics::answer_in(document.spoken_version());
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
    let (started, noticed, lines) = (Instant::now(), Noticed::default(), Lines::default());
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
    told::tell(request, &conf, &answer, started, &noticed);
    answer
}

fn understand(request: &Request, document: &Document, program: &str) -> Result<NetConf, Error> {
    match NetConf::understand(document, request.command, program) {
        Err(error) if request.command == Command::Del => {
            let mut conf = NetConf::understand_for_del(document)?;
            conf.warnings.push(format!("DEL goes by what is right in it: {error}"));
            Ok(conf)
        }
        other => other,
    }
}

fn start_logging(request: &Request, conf: &NetConf, noticed: &Noticed, lines: &Lines) {
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
    own_netns::refuse(request)?;
    if request.command == Command::Check {
        require_previous_result(conf)?;
    }
    match &conf.primary {
        Some(primary) => primary::run(&primary::Context { request, conf, primary }),
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
    let executables = InChain::of(request, conf);
    match request.command {
        Command::Add => {
            executables.find()?;
            let result = add::run(request, conf)?;
            executables.add(conf, result).inspect_err(|_| undo(request, conf))
        }
        Command::Check => check::run(request, conf).and_then(|_| executables.check(conf)).map(|()| None),
        Command::Del => Error::all([executables.del(conf), del::run(request, conf).map(drop)]).map(|()| None),
        Command::Gc => Error::all([gc::run(request, conf).map(drop), executables.gc(conf)]).map(|()| None),
        Command::Status => status::run(request, conf).and_then(|_| executables.status()).map(|()| None),
    }
}

/// What this process did for an ADD goes where an executable after it failed.
fn undo(request: &Request, conf: &NetConf) {
    if let Err(error) = del::run(request, conf) {
        tracing::warn!("undoing a failed ADD: {error}");
    }
}
