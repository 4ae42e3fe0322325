//! `detour rules`

use super::output::Output;
use super::{Answer, Failure};
use clap::{ArgGroup, Args};
use detour_cni::inspect::LiveRules;
use detour_cni::state::{ROOT, Store};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  detour rules /run/netns/cni-0c1f
  detour rules --pid \"$(pgrep -o envoy)\"
  detour rules --pid 4711 -o json

Needs root, and neither iptables nor nft.
Exit codes: 0 the namespace holds what its attachments ask for, or nothing is kept of any; 1 it does
not, or can't be read; 2 wrong usage.";

/// A pod's live rules with their counters, beside those that it should have
///
/// A rule that should be there is marked as missing, one of ours that should not as extra or moved, and
/// somebody else's as foreign.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, group(ArgGroup::new("where").required(true).args(["netns", "pid"])))]
pub(super) struct Arguments {
    /// The pod's network namespace: a path, or a name in /run/netns
    #[arg(value_name = "NETNS")]
    netns: Option<PathBuf>,
    /// The network namespace of this process
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    #[command(flatten)]
    output: Output,
}

/// The rules; exit code 1 where they are not what is asked for.
pub(super) fn run(arguments: &Arguments) -> Result<Answer, Failure> {
    let path = match (&arguments.netns, arguments.pid) {
        (Some(path), _) => netns(path),
        (None, Some(pid)) => PathBuf::from(format!("/proc/{pid}/ns/net")),
        (None, None) => return Err(Failure::Usage("name a network namespace, or --pid".to_owned())),
    };
    let report = LiveRules::read(&path, &Store::new(ROOT))?.report(&path);
    let answer = arguments.output.answer(&report)?;
    let code = if report.as_asked == Some(false) { ExitCode::FAILURE } else { answer.code };
    Ok(Answer { code, ..answer })
}

/// A bare name is one that `ip netns` knows.
pub(super) fn netns(path: &Path) -> PathBuf {
    if path.components().count() == 1 && path.is_relative() { Path::new("/run/netns").join(path) } else { path.into() }
}
