//! The standard streams of a plugin call, with a timeout for each wait, since other processes hold the other ends.
//!
//! `O_NONBLOCK` is never set on the streams themselves: it is a flag of the open file description, which other
//! processes share.

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, send};
use nix::sys::stat::{SFlag, fstat};
use nix::unistd;
use nix::unistd::write;
use rustix::stdio;
use std::fs::{File, OpenOptions};
use std::io;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The timeout for the configuration on stdin. A runtime writes it at once and closes the pipe.
pub const STDIN_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout for all lines of the process on stderr together.
const STDERR_TIMEOUT: Duration = Duration::from_millis(250);
/// The timeout for the answer on stdout.
const STDOUT_TIMEOUT: Duration = Duration::from_secs(10);

/// The process's stdin. The timeout starts with the first read and applies to all reads together.
#[derive(Debug, Default)]
pub struct Stdin {
    deadline: Option<Instant>,
}

impl Read for Stdin {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + STDIN_TIMEOUT);
        let stdin = stdio::stdin();
        loop {
            if !ready(stdin, PollFlags::POLLIN, deadline)? {
                let text = format!("expected the end of file within {} s", STDIN_TIMEOUT.as_secs());
                return Err(io::Error::new(ErrorKind::TimedOut, text));
            }
            match unistd::read(stdin, buffer) {
                // Another process that shares stdin has read the data.
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                read => return Ok(read?),
            }
        }
    }
}

/// The process's stderr, for log lines. A line that cannot be written in time is dropped; the next one that is
/// written follows the number of dropped lines.
#[derive(Debug, Clone, Copy)]
pub struct Stderr;

static STDERR: Mutex<TimedOutput> = Mutex::new(TimedOutput::new(STDERR_TIMEOUT));

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut output = STDERR.lock().unwrap_or_else(PoisonError::into_inner);
        output.line(stdio::stderr(), line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The process's stdout, for the answer of a call in one write.
#[derive(Debug, Clone, Copy)]
pub struct Stdout;

impl Write for Stdout {
    fn write(&mut self, answer: &[u8]) -> io::Result<usize> {
        TimedOutput::new(STDOUT_TIMEOUT).write_all(stdio::stdout(), answer)?;
        Ok(answer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until `stream` is ready for `events` or broken; returns `false` at `deadline`.
fn ready(stream: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> io::Result<bool> {
    loop {
        let remaining = deadline.saturating_duration_since(Instant::now());
        // Rounded up, since a poll of 0 ms would return at once, repeatedly.
        let timeout = PollTimeout::try_from(remaining + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(stream, events)], timeout) {
            Ok(0) if remaining.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A stream with the remaining time that writes may wait.
#[derive(Debug)]
struct TimedOutput {
    mode: Option<WriteMode>,
    remaining: Duration,
    /// The number of lines dropped since the last one that was written.
    dropped: u32,
}

/// How to write to a stream without blocking.
#[derive(Debug)]
enum WriteMode {
    /// A pipe, opened again: the new open file description has its own `O_NONBLOCK`.
    Pipe(File),
    /// A socket: `MSG_DONTWAIT` applies to one call. CRI-O and containerd pass journald's socket as stderr.
    Socket,
    /// A file or a terminal: a write of [`ATOMIC_WRITE`] bytes does not block after a successful poll.
    Other,
}

/// The number of bytes that can be written to a pipe that poll(2) reports as writable (`PIPE_BUF`, pipe(7)).
const ATOMIC_WRITE: usize = 4096;

impl TimedOutput {
    const fn new(remaining: Duration) -> Self {
        Self { mode: None, remaining, dropped: 0 }
    }

    /// Writes a line, preceded by the number of lines that were dropped before it.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if the line was dropped; another error if the stream is broken.
    fn line(&mut self, stream: BorrowedFd<'_>, line: &[u8]) -> io::Result<()> {
        let written = self.report_dropped(stream).and_then(|()| self.write_all(stream, line));
        self.dropped += u32::from(written.is_err());
        written
    }

    fn report_dropped(&mut self, stream: BorrowedFd<'_>) -> io::Result<()> {
        if self.dropped > 0 {
            // The leading line break ends a line that was written in part.
            let note = format!("\n{} log lines dropped: stderr is not read\n", self.dropped);
            self.write_all(stream, note.as_bytes())?;
            self.dropped = 0;
        }
        Ok(())
    }

    /// Writes `bytes`, or as much of it as is possible in the remaining time.
    ///
    /// # Errors
    /// As [`Self::line`].
    fn write_all(&mut self, stream: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.write_some(stream, bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    let started = Instant::now();
                    let room = ready(stream, PollFlags::POLLOUT, started + self.remaining);
                    self.remaining = self.remaining.saturating_sub(started.elapsed());
                    if !room? {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write_some(&mut self, stream: BorrowedFd<'_>, bytes: &[u8]) -> nix::Result<usize> {
        match self.mode.get_or_insert_with(|| WriteMode::for_stream(stream)) {
            WriteMode::Pipe(own) => write(own, bytes),
            WriteMode::Socket => send(stream.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL),
            WriteMode::Other => match ready(stream, PollFlags::POLLOUT, Instant::now()) {
                Ok(false) => Err(Errno::EAGAIN),
                _ => write(stream, &bytes[..bytes.len().min(ATOMIC_WRITE)]),
            },
        }
    }
}

impl WriteMode {
    fn for_stream(stream: BorrowedFd<'_>) -> Self {
        let kind = fstat(stream).map_or(SFlag::empty(), |found| SFlag::from_bits_truncate(found.st_mode));
        match kind & SFlag::S_IFMT {
            SFlag::S_IFSOCK => Self::Socket,
            SFlag::S_IFIFO => {
                let path = format!("/proc/self/fd/{}", stream.as_raw_fd());
                #[expect(clippy::disallowed_methods, reason = "a pipe of this process")]
                let opened = OpenOptions::new().write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path);
                // Without a reader, opening it fails here, and the write fails later.
                opened.map_or(Self::Other, Self::Pipe)
            }
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    const TIMEOUT: Duration = Duration::from_millis(20);

    /// Writes to `stream` until nothing fits, drains it with `drain`, and writes once more.
    fn overflow(stream: BorrowedFd<'_>, mut drain: impl FnMut() -> String) {
        let started = Instant::now();
        let mut output = TimedOutput::new(TIMEOUT);
        let line = [&[b'x'; 999][..], b"\n"].concat();
        let mut lines = 0;
        while output.line(stream, &line).is_ok() {
            lines += 1;
        }
        assert!(lines > 10, "{lines}");
        for _ in 0..1000 {
            assert_eq!(output.line(stream, &line).expect_err("full").kind(), ErrorKind::TimedOut);
        }
        assert!(started.elapsed() < 1000 * TIMEOUT * 3 / 4, "{:?}", started.elapsed());
        let before = drain();
        output.line(stream, b"next\n").expect("room");
        let after = drain();
        assert!(after.ends_with(" log lines dropped: stderr is not read\nnext\n"), "{after:?}");
        // A report may have been written although no line was.
        let notes = before
            .lines()
            .chain(after.lines())
            .filter_map(|line| line.strip_suffix(" log lines dropped: stderr is not read"));
        assert_eq!(notes.map(|count| count.parse::<u32>().expect("a number")).sum::<u32>(), 1001);
    }

    fn read_all(mut from: impl Read) -> String {
        let (mut text, mut piece) = (Vec::new(), vec![0; 1 << 20]);
        while let Ok(read @ 1..) = from.read(&mut piece) {
            text.extend(&piece[..read]);
        }
        String::from_utf8(text).expect("text")
    }

    #[test]
    fn a_full_pipe_drops_lines_and_reports_their_number() {
        let (reader, writer) = io::pipe().expect("a pipe");
        let mut reading = OpenOptions::new();
        reading.read(true).custom_flags(OFlag::O_NONBLOCK.bits());
        let reader = reading.open(format!("/proc/self/fd/{}", reader.as_raw_fd())).expect("opened again");
        overflow(writer.as_fd(), || read_all(&reader));
        assert!(!is_nonblocking(writer.as_fd()), "the shared description is unchanged");
    }

    #[test]
    fn a_full_socket_drops_lines_and_reports_their_number() {
        let (reader, writer) = UnixStream::pair().expect("a pair");
        reader.set_nonblocking(true).expect("set");
        overflow(writer.as_fd(), || read_all(&reader));
        assert!(!is_nonblocking(writer.as_fd()), "the shared description is unchanged");
    }

    fn is_nonblocking(stream: BorrowedFd<'_>) -> bool {
        let flags = nix::fcntl::fcntl(stream, nix::fcntl::FcntlArg::F_GETFL).expect("flags");
        OFlag::from_bits_truncate(flags).contains(OFlag::O_NONBLOCK)
    }

    #[test]
    fn a_stream_without_a_reader_is_an_error() {
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        let error = TimedOutput::new(TIMEOUT).write_all(writer.as_fd(), b"x").expect_err("broken");
        assert_eq!(error.kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_file_is_written_completely() {
        let path = std::env::temp_dir().join(format!("detour-output-{}", std::process::id()));
        let mut file = File::create_new(&path).expect("created");
        file.write_all(b"before ").expect("written");
        let text = "y".repeat(3 * ATOMIC_WRITE + 1);
        TimedOutput::new(TIMEOUT).write_all(file.as_fd(), text.as_bytes()).expect("written");
        let found = std::fs::read_to_string(&path).expect("readable");
        std::fs::remove_file(&path).expect("removable");
        assert_eq!(found, format!("before {text}"));
    }
}
