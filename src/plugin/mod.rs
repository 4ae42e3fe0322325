//! The CNI plugin: one call, from its environment and stdin to its result on stdout.

pub use record::FormatCounts;

use crate::cni::version::{NEWEST, SUPPORTED};
use crate::cni::{Block, CniCommand, Code, Document, Error, MAX_CONFIGURATION, NetConf, Request, result, variables};
use crate::delegate::{Call, Executables};
use crate::logging::CallEvents;
use crate::networks::RunnableConfiguration;
use crate::printable::Text;
use crate::streams::Stdout;
use crate::{logging, sub_plugins};
use record::attachment;
use serde_json::{Value, json};
pub use status::{TargetNode, validate};
use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Instant;
use std::{panic, process};

mod add;
mod check;
mod del;
pub mod evaluation;
mod inputs;
pub mod netns_state;
pub mod node;
pub mod primary;
pub mod probe;
mod reconcile;
pub(crate) mod record;
pub mod running;
mod status;

/// Serves a call. `environment` reads a variable; `program` is the name under which the binary was started.
///
/// # Errors
/// The error object for stdout (SPEC.md, "Error"), in the version of the configuration if that is known. From here on,
/// a panic of any thread prints such an object and exits with code 1.
pub fn call(
    environment: impl Fn(&str) -> Option<OsString>,
    stdin: impl Read,
    program: &str,
) -> Result<Option<Value>, Value> {
    let in_newest = |error: Error| error.to_json(NEWEST);
    if environment("CNI_COMMAND").is_some_and(|command| command == "VERSION") {
        // SPEC.md, "VERSION". As in the reference library, the answer does not depend on stdin.
        return Ok(Some(json!({"cniVersion": NEWEST, "supportedVersions": SUPPORTED})));
    }
    let variables = variables(environment).map_err(in_newest)?;
    print_panics(NEWEST);
    let variable = |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| value.clone());
    let request = Request::parse(variable).map_err(in_newest)?;
    let mut document = read(stdin).and_then(|text| Document::parse(&text)).map_err(in_newest)?;
    print_panics(document.answer_version());
    serve(&request, &mut document, program).map_err(|error| error.to_json(document.answer_version()))
}

/// Reads stdin, up to one byte more than the limit that the parser checks.
fn read(stdin: impl Read) -> Result<Vec<u8>, Error> {
    let mut text = Vec::with_capacity(4096);
    let failed = |error| Error::new(Code::Io, format!("error reading from stdin: {error}"));
    stdin.take(MAX_CONFIGURATION as u64 + 1).read_to_end(&mut text).map_err(failed)?;
    Ok(text)
}

fn serve(request: &Request, document: &mut Document, program: &str) -> Result<Option<Value>, Error> {
    let (started, events) = (Instant::now(), CallEvents::default());
    let warnings = node::apply(request, document, program)?;
    let mut conf = parse(request, document, program)?;
    conf.warnings.splice(0..0, warnings);
    start_logging(request, &conf, &events);
    for warning in &conf.warnings {
        tracing::warn!("{warning}");
    }
    let outcome = run(request, &conf);
    if let Err(error) = &outcome {
        tracing::error!(code = error.number(), "{error}");
    }
    node::report(request, &conf, &outcome, started, events.finish());
    outcome
}

/// Parses the configuration. DEL ignores invalid keys, because it must not block the deletion of a pod.
fn parse(request: &Request, document: &mut Document, program: &str) -> Result<NetConf, Error> {
    let mut conf = match NetConf::from_document(document, request.command, program) {
        Err(error) if request.command == CniCommand::Del => {
            let mut conf = NetConf::from_document_for_del(document)?;
            conf.warnings.push(format!("DEL uses only the valid keys of the configuration: {error}"));
            conf
        }
        other => other?,
    };
    if let Some(primary) = &mut conf.primary {
        primary.find_on_the_node(&|path| path.exists());
    }
    Ok(conf)
}

fn start_logging(request: &Request, conf: &NetConf, events: &CallEvents) {
    let context = [
        ("command", request.command.name()),
        ("network", &conf.name),
        ("container", &request.container_id),
        ("ifname", &request.ifname),
        ("pod", &request.about),
    ];
    logging::start(conf.log_level, conf.log_file.as_deref(), &context, Some(events));
}

/// Runs the command of a call, as the primary plugin or as an attachment. Returns the result for stdout, for ADD only.
///
/// # Errors
/// The error for stdout.
pub fn run(request: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    if let Some(netns) = request.netns.as_deref().filter(|_| !request.netns_override) {
        netns_state::refuse_own(netns)?;
    }
    if request.command == CniCommand::Check {
        // SPEC.md, "CHECK": even if only executables in the chain read it.
        if conf.prev_result.is_none() {
            let msg = "prevResult: missing; CHECK needs the result of ADD, which the runtime must pass";
            return Err(Error::new(Code::InvalidConfig, msg));
        }
        result::passed_through(conf)?;
    }
    match &conf.primary {
        Some(primary) => primary::run(&primary::PrimaryCall { request, conf, primary }),
        None => run_attachment(request, conf),
    }
}

/// Runs the command in this process and then for the executables in the chain, which run for every pod; for DEL and a
/// failed ADD in reverse order.
fn run_attachment(request: &Request, conf: &NetConf) -> Result<Option<Value>, Error> {
    let (executables, mut call) = (executables(conf), Call::forward(request, conf));
    match request.command {
        CniCommand::Add => {
            executables.find(&Executables, &call)?;
            let result = add::run(request, conf)?;
            let previous = conf.prev_result.is_some().then(|| result.clone());
            let added = executables.add(&Executables, &call, previous).inspect_err(|_| {
                if let Err(error) = del::run(request, conf) {
                    tracing::warn!("can't undo the failed ADD: {error}");
                }
            });
            Ok(Some(added?.unwrap_or(result)))
        }
        CniCommand::Check => {
            check::run(request, conf)?;
            executables.check(&Executables, &call, conf.prev_result.as_ref()).map(|()| None)
        }
        CniCommand::Del => {
            // Executables get no network namespace if that is another pod's by now.
            if !executables.plugins.is_empty() && del::is_late(&attachment(request, &conf.name), &call.netns) {
                call.netns = PathBuf::new();
            }
            let deleted = executables.del(&Executables, &call, conf.prev_result.as_ref());
            Error::all([deleted, del::run(request, conf)]).map(|()| None)
        }
        CniCommand::Gc => {
            let valid = conf.valid_attachments.as_deref();
            Error::all([del::run_gc(conf), executables.gc(&Executables, &call, valid)]).map(|()| None)
        }
        CniCommand::Status => {
            status::check_availability(conf)?;
            let found = executables.find(&Executables, &call);
            let available = found.and_then(|()| executables.status(&Executables, &call));
            available.map(|()| None).map_err(|error| Error { code: Code::NotAvailable, ..error })
        }
    }
}

/// Returns the executables in the chain of `conf` as a network.
fn executables(conf: &NetConf) -> RunnableConfiguration {
    let plugins: Vec<Block> = sub_plugins::executables(&conf.chain).map(|(_, block)| block.clone()).collect();
    RunnableConfiguration {
        name: conf.name.clone(),
        cni_version: conf.cni_version.clone(),
        plugins,
        runtime_config: conf.runtime_config.clone(),
        args: conf.args.clone(),
        ..RunnableConfiguration::default()
    }
}

/// Makes panics print an error object in this version of the specification and exit with code 1.
fn print_panics(cni_version: &str) {
    let cni_version = cni_version.to_owned();
    panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(|place| format!(" at {place}")).unwrap_or_default();
        let why = panic.payload_as_str().unwrap_or("no reason given");
        let msg = format!("internal error of the plugin{place}: {why}; please report this bug");
        let error = Text::json(&Error::new(Code::Internal, msg).to_json(&cni_version).to_string());
        // A failure to write to stdout can't be reported anywhere.
        let _ = Stdout.write_all(format!("{error}\n").as_bytes());
        process::exit(1);
    }));
}
