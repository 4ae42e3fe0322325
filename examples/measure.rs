//! Runs one command and appends its cost to a file as one line of JSON. Prints such a file as a table of medians.

use anyhow::{Context, bail, ensure};
use clap::Parser;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

#[derive(Parser)]
#[command(about, version)]
enum Measure {
    /// Run a command once and discard its stdout; fail if it fails
    Run {
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
    },
    /// Print a table of medians, rows in the order of their first line
    Table {
        /// A file written by `run`
        file: PathBuf,
    },
}

/// The cost of one run. CPU is user and system time of the command and the children it waited for.
#[derive(Serialize, Deserialize)]
struct Cost {
    label: String,
    wall_us: i64,
    user_us: i64,
    system_us: i64,
    max_rss_kib: i64,
}

fn main() -> anyhow::Result<()> {
    match Measure::parse() {
        Measure::Run { label, out, stdin, command } => {
            let cost = run(label, &stdin, &command)?;
            let mut file = OpenOptions::new().create(true).append(true).open(&out).context("open --out")?;
            writeln!(file, "{}", serde_json::to_string(&cost)?)?;
        }
        Measure::Table { file } => print_table(&read(&file)?),
    }
    Ok(())
}

/// Runs the command. This process has only one child, so `RUSAGE_CHILDREN` is that child's usage. The kernel starts
/// the child's max RSS from its parent's (`exec_mmap`), so smaller values are not visible.
fn run(label: String, stdin: &Path, command: &[String]) -> anyhow::Result<Cost> {
    let [program, arguments @ ..] = command else { bail!("no command") };
    let stdin = File::open(stdin).with_context(|| format!("open {}", stdin.display()))?;
    let start = Instant::now();
    let output = Command::new(program)
        .args(arguments)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("run {program}"))?;
    let wall = start.elapsed();
    ensure!(
        output.status.success(),
        "{label}: {program}: {}: {}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    Ok(Cost {
        label,
        wall_us: i64::try_from(wall.as_micros())?,
        user_us: usage.user_time().num_microseconds(),
        system_us: usage.system_time().num_microseconds(),
        max_rss_kib: usage.max_rss(),
    })
}

fn read(file: &Path) -> anyhow::Result<Vec<Cost>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn print_table(costs: &[Cost]) {
    let mut labels: Vec<&str> = Vec::new();
    for cost in costs {
        if !labels.contains(&cost.label.as_str()) {
            labels.push(&cost.label);
        }
    }
    println!("{:<42} {:>5} {:>9} {:>9} {:>11}", "", "runs", "CPU ms", "wall ms", "max RSS MiB");
    for label in labels {
        let of = |value: fn(&Cost) -> i64| median(costs.iter().filter(|c| c.label == label).map(value).collect());
        let runs = costs.iter().filter(|c| c.label == label).count();
        println!(
            "{label:<42} {runs:>5} {:>9.2} {:>9.2} {:>11.1}",
            of(|c| c.user_us + c.system_us) / 1000.0,
            of(|c| c.wall_us) / 1000.0,
            of(|c| c.max_rss_kib) / 1024.0
        );
    }
}

fn median(mut values: Vec<i64>) -> f64 {
    values.sort_unstable();
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2] as f64,
        n => (values[n / 2 - 1] + values[n / 2]) as f64 / 2.0,
    }
}
