//! A panic is answered like any other failure: with one error object on stdout and exit code 1.

use crate::cni::{Code, Error};
use crate::delegate;
use crate::printable::Text;
use crate::streams::Stdout;
use std::io::Write;
use std::panic::{self, PanicHookInfo};
use std::process;

/// From now on, panics are answered in this version of the protocol.
pub(super) fn answer_in(cni_version: &str) {
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
