//! What the node's agent is told of a call, for its log.

use crate::cluster::agent::{self, CallReport};
use crate::cni::{CniCommand, Error, NetConf, Request};
use crate::logging::EventCollector;
use nix::sys::resource::{UsageWho, getrusage};
use std::time::{Duration, Instant};

/// Tells how a call ended that began at `started`, where the configuration names an agent. It takes
/// as long as a write, and nothing depends on it.
pub(super) fn tell<T>(
    request: &Request,
    conf: &NetConf,
    answer: &Result<T, Error>,
    started: Instant,
    noticed: &EventCollector,
) {
    // A runtime asks for the status every few seconds.
    let Some(socket) = conf.kubernetes.agent_socket.as_ref().filter(|_| request.command != CniCommand::Status) else {
        return;
    };
    let error = answer.as_ref().err();
    let called = CallReport {
        command: request.command.to_string(),
        pod: request.about(),
        container: request.container_id.clone(),
        network: conf.name.clone(),
        ifname: request.ifname.clone(),
        code: error.map(Error::number),
        error: error.map(|error| error.to_string().chars().take(LONGEST).collect()).unwrap_or_default(),
        facts: noticed.facts(),
        wall_us: microseconds(started.elapsed()),
        cpu_us: microseconds(processor_time()),
        warnings: noticed.warnings(),
    };
    agent::tell(socket, called);
}

/// So much of an error is told, in characters.
const LONGEST: usize = 4000;

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// This process's and that of the executables that it ran.
fn processor_time() -> Duration {
    let used = [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN].into_iter().filter_map(|who| getrusage(who).ok());
    let microseconds = used.map(|used| {
        let (user, system) = (used.user_time(), used.system_time());
        (user.tv_sec() + system.tv_sec()) * 1_000_000 + user.tv_usec() + system.tv_usec()
    });
    Duration::from_micros(u64::try_from(microseconds.sum::<i64>()).unwrap_or(0))
}
