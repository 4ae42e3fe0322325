//! Runs commands and returns what they cost.

use anyhow::{Context, bail, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

/// The cost of one run. CPU is user and system time of the command and the children it waited for. Their sum is exact;
/// the kernel divides it by the samples of its clock ticks (`cputime_adjust` in linux/sched/cputime.c).
#[derive(Serialize, Deserialize)]
pub(crate) struct Cost {
    pub(crate) label: String,
    pub(crate) wall_us: i64,
    pub(crate) user_us: i64,
    pub(crate) system_us: i64,
    pub(crate) max_rss_kib: i64,
    pub(crate) page_faults: i64,
}

impl Cost {
    /// Returns the cost of all children that this process has had. The kernel starts a child's max RSS from its
    /// parent's (`exec_mmap`), so smaller values are not visible.
    fn of_children(label: String, start: Instant) -> anyhow::Result<Self> {
        let wall = start.elapsed();
        let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
        Ok(Self {
            label,
            wall_us: i64::try_from(wall.as_micros())?,
            user_us: usage.user_time().num_microseconds(),
            system_us: usage.system_time().num_microseconds(),
            max_rss_kib: usage.max_rss(),
            page_faults: usage.minor_page_faults() + usage.major_page_faults(),
        })
    }
}

/// Runs the command once.
pub(crate) fn run(label: String, stdin: &Path, command: &[String]) -> anyhow::Result<Cost> {
    let start = Instant::now();
    succeed(stdin, command, "")?;
    Cost::of_children(label, start)
}

/// Runs the command `count` times, `parallel` at a time, and returns the cost of all runs together.
pub(crate) fn storm(
    label: String,
    stdin: &Path,
    command: &[String],
    count: usize,
    parallel: usize,
) -> anyhow::Result<Cost> {
    let next = AtomicUsize::new(0);
    let worker = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return Ok(());
            }
            succeed(stdin, command, &number.to_string())?;
        }
    };
    let start = Instant::now();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..parallel).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|_| bail!("a worker panicked")))
    })?;
    Cost::of_children(label, start)
}

/// Runs the command with `{}` replaced by `number`. Fails if the command fails.
fn succeed(stdin: &Path, command: &[String], number: &str) -> anyhow::Result<()> {
    let command: Vec<_> = command.iter().map(|part| part.replace("{}", number)).collect();
    let [program, arguments @ ..] = &command[..] else { bail!("no command") };
    let stdin = File::open(stdin).with_context(|| format!("open {}", stdin.display()))?;
    let output = Command::new(program)
        .args(arguments)
        .envs(std::env::vars().filter(|(_, value)| value.contains("{}")).map(|(k, v)| (k, v.replace("{}", number))))
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("run {program}"))?;
    ensure!(
        output.status.success(),
        "{program}: {}: {}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
