//! The standard streams of a plugin call. Other processes hold their other ends, so each wait has a
//! limit, and the input has a maximum size.
//!
//! `O_NONBLOCK` is a flag of the open file description, which other processes share, so it is never
//! set on the streams themselves.

mod output;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd;
use output::TimedOutput;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the configuration may take to arrive on stdin. A runtime writes it at once and closes the pipe.
pub const STDIN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long all lines on stderr of a process may wait together until there is room for them.
const STDERR_BUDGET: Duration = Duration::from_millis(250);
/// How long the answer on stdout may wait until there is room for it.
const STDOUT_BUDGET: Duration = Duration::from_secs(10);

/// The process's stdin. The first read starts [`STDIN_TIMEOUT`], which ends all reads.
#[derive(Debug, Default)]
pub struct Stdin {
    until: Option<Instant>,
}

impl Read for Stdin {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let until = *self.until.get_or_insert_with(|| Instant::now() + STDIN_TIMEOUT);
        let stdin = io::stdin();
        loop {
            if !ready(stdin.as_fd(), PollFlags::POLLIN, until)? {
                let text = format!("no end of file within {} s", STDIN_TIMEOUT.as_secs());
                return Err(io::Error::new(ErrorKind::TimedOut, text));
            }
            match unistd::read(stdin.as_fd(), buffer) {
                // Another process that shares it was faster.
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                read => return Ok(read?),
            }
        }
    }
}

/// The process's stderr, for log lines. A line that finds no room in time is dropped; the next one that
/// fits is preceded by the number of dropped lines.
#[derive(Debug, Clone, Copy)]
pub struct Stderr;

static STDERR: Mutex<TimedOutput> = Mutex::new(TimedOutput::new(STDERR_BUDGET));

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut output = STDERR.lock().unwrap_or_else(PoisonError::into_inner);
        output.line(io::stderr().as_fd(), line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The process's stdout, for the answer of a call: one write.
#[derive(Debug, Clone, Copy)]
pub struct Stdout;

impl Write for Stdout {
    fn write(&mut self, answer: &[u8]) -> io::Result<usize> {
        TimedOutput::new(STDOUT_BUDGET).all(io::stdout().as_fd(), answer)?;
        Ok(answer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until `stream` is ready for `what`, or broken; `false` at `until`.
fn ready(stream: BorrowedFd<'_>, what: PollFlags, until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        // Rounded up: a poll of 0 ms would return at once and again and again.
        let timeout = PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(stream, what)], timeout) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}
