//! An open connection of a process in the pod.

use super::Arrival;
use crate::support::background::Running;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout};

/// Closed when it is dropped.
pub(crate) struct Connection {
    process: Running,
    answers: BufReader<ChildStdout>,
}

impl Connection {
    /// Takes over a `probe hold` whose stdin and stdout are pipes.
    pub(super) fn new(mut process: Child) -> Self {
        let answers = BufReader::new(process.stdout.take().expect("it is piped"));
        Self { process: Running(process), answers }
    }

    /// Sends a message, and returns where it arrived.
    ///
    /// # Panics
    /// The connection is closed.
    #[track_caller]
    pub(crate) fn send(&mut self) -> Arrival {
        self.process.0.stdin.as_mut().expect("it is piped").write_all(b"\n").expect("probe is there");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("read from probe");
        Arrival::parse(answer.as_bytes()).unwrap_or_else(|error| panic!("the connection is gone: {error}: {answer:?}"))
    }
}
