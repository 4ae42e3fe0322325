//! `-o`, which every command has that prints facts.

use super::{CommandError, CommandOutput};
use clap::{Args, ValueEnum};
use detour_cni::inspect::{Format, TextReport, render};
use serde::Serialize;
use std::env;
use std::ffi::OsStr;
use std::io::{IsTerminal, stdout};

/// How the answer is printed.
#[derive(Debug, Clone, Copy, Args)]
pub(super) struct OutputArguments {
    /// For people (coloured on a terminal, unless NO_COLOR is set or TERM is dumb), or for programs
    #[arg(short, long, value_enum, default_value = "table", value_name = "FORM")]
    output: OutputForm,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OutputForm {
    Table,
    Json,
    Yaml,
}

impl OutputArguments {
    /// The report in that form.
    ///
    /// # Errors
    /// As [`render`].
    pub(super) fn answer<R: Serialize + TextReport>(self, report: &R) -> Result<CommandOutput, CommandError> {
        let format = match self.output {
            OutputForm::Table => Format::Table { colour: colour() },
            OutputForm::Json => Format::Json,
            OutputForm::Yaml => Format::Yaml,
        };
        Ok(CommandOutput::fine(render(report, format)?))
    }
}

/// Whether stdout is a terminal that knows colors and the user wants them.
fn colour() -> bool {
    stdout().is_terminal() && wanted(env::var_os("NO_COLOR").as_deref(), env::var_os("TERM").as_deref())
}

/// Not if `NO_COLOR` is set and not empty (https://no-color.org), and not on a terminal that only prints (terminfo's
/// `dumb`).
fn wanted(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_color_and_dumb_terminals_are_uncolored() {
        let of = |no_color: Option<&str>, term: Option<&str>| wanted(no_color.map(OsStr::new), term.map(OsStr::new));
        assert!(of(None, None) && of(Some(""), Some("xterm-256color")));
        assert!(!of(Some("1"), Some("xterm")) && !of(None, Some("dumb")));
    }
}
