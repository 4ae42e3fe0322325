//! The `detour` binary: a CNI plugin when a runtime calls it, a command-line tool otherwise.

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod cli;

use detour_cni::printable::Text;
use detour_cni::streams::{Stderr, Stdin, Stdout};
use detour_cni::{cni, plugin};
use serde_json::Value;
use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// The allocator of static builds. musl's own returns each page at once and requests it again: about 300
/// system calls in an ADD, as many as the ADD itself needs.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

fn main() -> ExitCode {
    let called_by_runtime = env::var_os("CNI_COMMAND").is_some_and(|command| !command.is_empty());
    let mut arguments = env::args_os();
    let program = arguments.next().unwrap_or_default();
    let name = file_name(&program);
    if called_by_runtime {
        answer(plugin::call(|name| env::var_os(name), Stdin::default(), &name))
    } else if let Some(code) = cli::run_as_plugin_of_kubectl(&name) {
        code
    } else if arguments.len() == 0 {
        let about = format!("CNI plugin detour v{}\n{}", env!("CARGO_PKG_VERSION"), protocols());
        // Tools of runtimes read stderr, users read the help.
        print(Stderr, &Text::lines(&about), ExitCode::SUCCESS);
        cli::help()
    } else {
        cli::run()
    }
}

/// Prints the result or the error of a plugin call, and returns the exit code.
fn answer(answer: Result<Option<Value>, Value>) -> ExitCode {
    let (what, object, code) = match answer {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(result)) => ("result", result, ExitCode::SUCCESS),
        Err(error) => ("error", error, ExitCode::FAILURE),
    };
    let Err(error) = write(Stdout, &Text::json(&object.to_string())) else { return code };
    let text = format!("can't write the {what} of the call to stdout: {error}; check the runtime that reads it");
    print(Stderr, &Text::message(&text), ExitCode::FAILURE)
}

/// Writes lines and returns `code`, or failure if they can't be written: the caller waits for them.
fn print(to: impl Write, text: &Text, code: ExitCode) -> ExitCode {
    if write(to, text).is_ok() { code } else { ExitCode::FAILURE }
}

/// Writes lines that end in exactly one line break.
fn write(mut to: impl Write, text: &Text) -> io::Result<()> {
    let lines = text.as_str().trim_end_matches('\n');
    to.write_all(format!("{lines}\n").as_bytes()).and_then(|()| to.flush())
}

/// Returns the line with which the reference library describes a plugin (`pkg/skel`); tools of runtimes parse it.
fn protocols() -> String {
    format!("CNI protocol versions supported: {}", cni::version::SUPPORTED.join(", "))
}

/// Returns the name under which the binary was started, without its directory.
fn file_name(program: &OsString) -> String {
    Path::new(program).file_name().unwrap_or_default().to_string_lossy().into_owned()
}
