//! A `detour agent` that runs.

use crate::scene::{Scene, program};
use nix::sys::signal::{Signal, kill};
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
    pub(crate) fn start(scene: &Scene, name: &str, more: &[&str]) -> Self {
        let mut process = Command::new(program())
            .args(scene.arguments("agent", more))
            .env_clear()
            .env("HOSTNAME", name)
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
    pub(crate) fn says(&self, part: &str) -> String {
        let mut before = Vec::new();
        loop {
            match self.lines.recv_timeout(DEADLINE) {
                Ok(line) if line.contains(part) => return line,
                Ok(line) => before.push(line),
                Err(why) => panic!("{part:?} is not said ({why}), but {before:#?}"),
            }
        }
    }

    /// Where it answers questions about itself.
    pub(crate) fn address(&self) -> String {
        let line = self.says("answers /healthz, /readyz and /metrics");
        line.split("address=").nth(1).expect("the address").trim().to_owned()
    }

    pub(crate) fn end(mut self, signal: Signal) -> ExitStatus {
        let id = i32::try_from(self.process.id()).expect("an id");
        kill(Pid::from_raw(id), signal).expect("it is there");
        self.process.wait().expect("it ends")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
