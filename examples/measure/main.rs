//! Measures commands for the scripts in `hack`: appends the cost of each run to a file as one line of JSON, prints such
//! a file as a table, and compares counts with their limits.
//!
//! * `cost`: runs a command, or many at a time, and returns the cost
//! * `limits`: the guard of `hack/instructions.sh`
//! * `record`: takes the transaction of an ADD from a trace of strace
//! * `table`: medians, ratios and targets

mod cost;
mod limits;
mod record;
mod table;

use anyhow::Context;
use clap::Parser;
use cost::Cost;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Parser)]
#[command(about, version)]
enum Measure {
    /// Run a command once and discard its stdout; fail if it fails
    Run {
        #[command(flatten)]
        what: Measured,
    },
    /// Run a command several times, some at a time; `{}` in its arguments and environment is the number of the run
    Storm {
        #[command(flatten)]
        what: Measured,
        /// How many runs
        #[arg(long)]
        count: usize,
        /// How many at a time
        #[arg(long)]
        parallel: usize,
    },
    /// Print a table of medians
    Table {
        /// A file written by `run` and `storm`
        costs: PathBuf,
        /// The rows: lines `CONTENDER|ROW|COMPARED WITH|TARGETS`; without it, every label in the order of its first run
        #[arg(long)]
        rows: Option<PathBuf>,
    },
    /// Write the netfilter transaction of a program to a file
    Record {
        /// The output of `strace -f -e trace=sendto,sendmsg -e raw=all -e write=all`
        trace: PathBuf,
        /// The file to write
        transaction: PathBuf,
    },
    /// Compare counts with their limits; fail if one is exceeded
    Limits {
        /// The limits, a JSON file
        limits: PathBuf,
        /// The counts: lines `NAME|COUNT`
        counts: PathBuf,
        /// The compiler that built the program
        #[arg(long)]
        compiler: String,
        /// Write the counts to the file of limits
        #[arg(long)]
        update: bool,
    },
}

#[derive(clap::Args)]
struct Measured {
    /// The row of the table for this run
    #[arg(long)]
    label: String,
    /// The file to append the line to
    #[arg(long)]
    out: PathBuf,
    /// The stdin of the command
    #[arg(long, default_value = "/dev/null")]
    stdin: PathBuf,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<String>,
}

fn main() -> anyhow::Result<ExitCode> {
    match Measure::parse() {
        Measure::Run { what } => append(&what.out, &cost::run(what.label, &what.stdin, &what.command)?)?,
        Measure::Storm { what, count, parallel } => {
            append(&what.out, &cost::storm(what.label, &what.stdin, &what.command, count, parallel)?)?;
        }
        Measure::Table { costs, rows } => print!("{}", table::table(&costs, rows.as_deref())?),
        Measure::Record { trace, transaction } => record::record(&trace, &transaction)?,
        Measure::Limits { limits, counts, compiler, update } => {
            return limits::guard(&limits, &counts, &compiler, update);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn append(path: &Path, cost: &Cost) -> anyhow::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path).context("open --out")?;
    Ok(writeln!(file, "{}", serde_json::to_string(cost)?)?)
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}
