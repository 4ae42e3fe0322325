//! The output of a command: its text, its exit code and its error, and the `-o` option of all commands that print a
//! report.

use clap::Args;
use detour_cni::cni::Error;
use detour_cni::inspect::{Format, Screen, TextReport, render};
use detour_cni::printable::{Text, without_secrets};
use rustix::termios::tcgetwinsize;
use serde::Serialize;
use std::env;
use std::ffi::OsStr;
use std::fmt::{self, Display};
use std::io::{IsTerminal, stdout};
use std::process::ExitCode;

/// The text that a command prints to stdout, and its exit code.
pub(super) struct CommandOutput {
    pub(super) text: Text,
    pub(super) code: ExitCode,
}

/// Why a command failed, and its exit code.
#[derive(Debug)]
pub(super) struct CommandError {
    message: String,
    pub(super) code: u8,
}

impl CommandError {
    /// The arguments are invalid.
    pub(super) fn usage(message: impl Display) -> Self {
        Self { message: format!("{message}; see --help"), code: 2 }
    }

    /// A file or an object that the arguments name is missing or malformed.
    pub(super) fn input(error: impl Into<anyhow::Error>) -> Self {
        Self { message: format!("{:#}", error.into()), code: 2 }
    }
}

/// The operation failed, or found a problem.
impl From<Error> for CommandError {
    fn from(error: Error) -> Self {
        Self { message: error.to_string(), code: 1 }
    }
}

impl From<anyhow::Error> for CommandError {
    fn from(error: anyhow::Error) -> Self {
        error.downcast().unwrap_or_else(|error| Self { message: format!("{error:#}"), code: 1 })
    }
}

impl Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for CommandError {}

/// The format of a report.
#[derive(Debug, Clone, Copy, Args)]
pub(super) struct OutputArguments {
    /// Print a table, JSON or YAML
    ///
    /// Tables are colored on a terminal unless NO_COLOR is set or TERM is dumb.
    #[arg(short, long, default_value = "table", value_name = "FORMAT")]
    output: Format,
}

impl OutputArguments {
    /// Renders the report in the format of `-o`; the exit code is 1 unless `fine` is set.
    ///
    /// # Errors
    /// The report can't be serialized.
    pub(super) fn render_verdict<R>(self, report: &R, fine: bool) -> Result<CommandOutput, CommandError>
    where
        R: Serialize + TextReport,
    {
        let code = if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        Ok(CommandOutput { text: render(report, self.output, screen())?, code })
    }

    /// Renders an error for programs that read JSON or YAML; `None` for a table.
    pub(super) fn render_error(self, error: &CommandError) -> Option<Text> {
        let report = ErrorReport { error: without_secrets(&error.to_string()), exit_code: error.code };
        (self.output != Format::Table).then(|| render(&report, self.output, screen()).ok()).flatten()
    }
}

/// The error of a command in place of its report.
#[derive(Serialize)]
struct ErrorReport {
    error: String,
    exit_code: u8,
}

impl TextReport for ErrorReport {
    /// A table has no error: it goes to stderr in every format.
    fn write(&self, _: &mut Screen) {}
}

/// Returns a text for the terminal, whose width without one is that of `COLUMNS` or 80.
fn screen() -> Screen {
    let of_terminal = || Some(tcgetwinsize(rustix::stdio::stdout()).ok()?.ws_col).filter(|columns| *columns > 0);
    let of_environment = || env::var("COLUMNS").ok()?.parse().ok().filter(|columns| *columns > 0);
    Screen::new(use_color(), of_terminal().or_else(of_environment).map_or(80, usize::from))
}

fn use_color() -> bool {
    stdout().is_terminal() && allows_color(env::var_os("NO_COLOR").as_deref(), env::var_os("TERM").as_deref())
}

/// Returns whether the environment allows color: `NO_COLOR` is unset or empty (<https://no-color.org>), and the
/// terminal type is not terminfo's `dumb`.
fn allows_color(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_color_and_dumb_terminals_disable_color() {
        let color =
            |no_color: Option<&str>, term: Option<&str>| allows_color(no_color.map(OsStr::new), term.map(OsStr::new));
        assert!(color(None, None) && color(Some(""), Some("xterm-256color")));
        assert!(!color(Some("1"), Some("xterm")) && !color(None, Some("dumb")));
    }
}
