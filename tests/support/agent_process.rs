//! A `detour agent` that runs.

use super::program::program;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// What it says once there is nothing left to do.
pub(crate) const SETTLED: &str = "all is as it should be";
const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) struct Agent {
    process: Child,
    lines: Receiver<String>,
}

impl Agent {
    /// Starts one of this name.
    pub(crate) fn spawn(name: &str, arguments: &[String]) -> Self {
        Self::spawn_with(&[("HOSTNAME", name)], arguments)
    }

    /// Starts one with this environment.
    pub(crate) fn spawn_with(environment: &[(&str, &str)], arguments: &[String]) -> Self {
        let mut process = Command::new(program())
            .args(arguments)
            .env_clear()
            .envs(environment.iter().copied())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let stderr = BufReader::new(process.stderr.take().expect("a pipe"));
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { process, lines }
    }

    /// Waits for a line of the log with that part, and gives it.
    #[track_caller]
    pub(crate) fn says(&self, part: &str) -> String {
        self.says_all(&[part]).pop().expect("one")
    }

    /// Waits for lines with these parts, in any order; gives them as they came.
    #[track_caller]
    pub(crate) fn says_all(&self, parts: &[&str]) -> Vec<String> {
        let (mut left, mut found, mut others) = (parts.to_vec(), Vec::new(), Vec::new());
        while !left.is_empty() {
            let line = self.lines.recv_timeout(DEADLINE);
            let line = line.unwrap_or_else(|why| panic!("{left:?} is not said ({why}), but {others:#?}"));
            match left.iter().position(|part| line.contains(part)) {
                Some(at) => {
                    left.remove(at);
                    found.push(line);
                }
                None => others.push(line),
            }
        }
        found
    }

    /// What was said since.
    pub(crate) fn said(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }

    /// Stops it where it stands.
    pub(crate) fn freeze(&self) {
        kill(self.id(), Signal::SIGSTOP).expect("it is there");
        let status = waitpid(self.id(), Some(WaitPidFlag::WUNTRACED)).expect("it is there");
        assert_eq!(status, WaitStatus::Stopped(self.id(), Signal::SIGSTOP));
    }

    fn id(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.process.id()).expect("an id"))
    }

    /// Where it answers questions about itself.
    pub(crate) fn address(&self) -> String {
        let line = self.says("answers /healthz, /readyz and /metrics");
        line.split("address=").nth(1).expect("the address").trim().to_owned()
    }

    pub(crate) fn end(mut self, signal: Signal) -> ExitStatus {
        kill(self.id(), signal).expect("it is there");
        self.process.wait().expect("it ends")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
