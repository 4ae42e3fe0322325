//! The `-o` option of all commands that print a report.

use super::{CommandError, CommandOutput};
use clap::{Args, ValueEnum};
use detour_cni::inspect::{Format, TextReport, render};
use serde::Serialize;
use std::env;
use std::ffi::OsStr;
use std::io::{IsTerminal, stdout};

/// The format of a report.
#[derive(Debug, Clone, Copy, Args)]
pub(super) struct OutputArguments {
    /// Print a table, JSON or YAML
    ///
    /// Tables are colored on a terminal unless NO_COLOR is set or TERM is dumb.
    #[arg(short, long, value_enum, default_value = "table", value_name = "FORMAT")]
    output: OutputFormat,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OutputFormat {
    Table,
    Json,
    Yaml,
}

impl OutputArguments {
    /// Renders the report in the format of `-o`.
    ///
    /// # Errors
    /// The report can't be serialized.
    pub(super) fn render<R: Serialize + TextReport>(self, report: &R) -> Result<CommandOutput, CommandError> {
        let format = match self.output {
            OutputFormat::Table => Format::Table { color: use_color() },
            OutputFormat::Json => Format::Json,
            OutputFormat::Yaml => Format::Yaml,
        };
        Ok(CommandOutput::success(render(report, format)?))
    }
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
