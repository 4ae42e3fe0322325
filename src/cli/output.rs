//! `-o`, which every command has that prints facts.

use super::{Answer, Failure};
use clap::{Args, ValueEnum};
use detour_cni::inspect::{Format, Sheet, render};
use serde::Serialize;
use std::env;
use std::io::{IsTerminal, stdout};

/// How the answer is printed.
#[derive(Debug, Clone, Copy, Args)]
pub(super) struct Output {
    /// For people (coloured on a terminal, unless NO_COLOR is set), or for programs
    #[arg(short, long, value_enum, default_value = "table", value_name = "FORM")]
    output: Form,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Form {
    Table,
    Json,
    Yaml,
}

impl Output {
    /// The report in that form.
    ///
    /// # Errors
    /// As [`render`].
    pub(super) fn answer<R: Serialize + Sheet>(self, report: &R) -> Result<Answer, Failure> {
        let format = match self.output {
            Form::Table => Format::Table { colour: colour() },
            Form::Json => Format::Json,
            Form::Yaml => Format::Yaml,
        };
        Ok(Answer::fine(render(report, format)?))
    }
}

/// On a terminal only, and not where NO_COLOR is set and not empty (https://no-color.org).
fn colour() -> bool {
    stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
