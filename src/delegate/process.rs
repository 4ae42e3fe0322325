//! A child process with a deadline: its stdin written, its stdout kept, its stderr passed on. One loop on
//! the calling thread waits for all of it: there is no thread that can't be started or that stays behind.

mod group;
mod stderr;

pub(super) use group::kill_running;

use crate::netlink::again;
use crate::streams::Stderr;
use group::ProcessGroup;
use group::Signals;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use stderr::Relay;

/// How much a plugin may print to stdout, in bytes; results are a few kilobytes.
const STDOUT_LIMIT: usize = 4 << 20;
/// How long to wait for the end of the streams once the child has ended, or was killed: something
/// that it started may keep them open.
const GRACE: Duration = Duration::from_secs(1);
/// An executable that is being written can't be started (`ETXTBSY`). The reference library tries
/// for five seconds (`pkg/invoke/raw_exec.go`).
const BUSY_TRIES: u32 = 50;
const BUSY_PAUSE: Duration = Duration::from_millis(100);
/// How often a child is asked whether it has ended where the kernel can't tell by itself.
const PULSE: Duration = Duration::from_millis(10);
/// How much is written to stdin at once, in bytes.
const PIECE: usize = 4 << 10;

/// What is left of a child.
#[derive(Debug)]
pub(super) struct ChildExit {
    pub(super) status: ExitStatus,
    pub(super) stdout: Vec<u8>,
    /// The end of what it printed to stderr.
    pub(super) last_words: String,
}

/// Why there is nothing left to look at.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProcessError {
    #[error("it is being written, and was so for 5 s; the runtime should try again")]
    Busy,
    #[error("it can't be started: {error}{hint}", error = .0, hint = hint(.0))]
    Start(io::Error),
    #[error("it printed more than {} MiB to stdout and was killed; a result is a few kilobytes", STDOUT_LIMIT >> 20)]
    TooMuch,
    #[error("it did not end within {} s and was killed{}; delegate_timeout_seconds says how long it may take", .0.as_secs(), said(.1))]
    Deadline(Duration, String),
    #[error("{0} was received: it was killed with its process group; the runtime should try again")]
    Interrupted(Signal),
    #[error("its end can't be waited for: {0}")]
    Wait(io::Error),
}

impl ProcessError {
    /// Whether another call may succeed: the cause is not the executable.
    pub(super) fn may_pass(&self) -> bool {
        match self {
            Self::Busy | Self::Interrupted(_) => true,
            Self::Start(error) => lacks_resources(error),
            Self::TooMuch | Self::Deadline(..) | Self::Wait(_) => false,
        }
    }
}

fn lacks_resources(error: &io::Error) -> bool {
    let lacking = [Errno::EAGAIN, Errno::ENOMEM, Errno::EMFILE, Errno::ENFILE];
    lacking.iter().any(|errno| error.raw_os_error() == Some(*errno as i32))
}

fn hint(error: &io::Error) -> &'static str {
    if lacks_resources(error) {
        "; check the limits on processes and open files of the runtime"
    } else {
        "; is it an executable for this machine, with its x bits set?"
    }
}

/// What a message says of the end of stderr.
pub(super) fn said(last_words: &str) -> String {
    if last_words.is_empty() { String::new() } else { format!(" (stderr: {last_words:?})") }
}

/// Starts `program` with `variables` on top of this process's environment and `stdin`, in a
/// process group of its own, and waits for its end. At the deadline, and when this process gets SIGTERM, SIGINT,
/// SIGHUP or SIGQUIT, the whole group is killed.
///
/// A SIGKILL of this process leaves it running: the kernel would kill it too (`PR_SET_PDEATHSIG`), but only a
/// process itself can ask for that, between fork and exec, where Rust allows no safe code.
pub(super) fn run(
    program: &Path,
    variables: &[(&'static str, OsString)],
    stdin: Vec<u8>,
    timeout: Duration,
) -> Result<ChildExit, ProcessError> {
    let mut command = Command::new(program);
    command.envs(variables.iter().map(|(name, value)| (name, value))).process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let deadline = Instant::now() + timeout;
    let child = patiently(BUSY_TRIES, || command.spawn(), || thread::park_timeout(BUSY_PAUSE))?;
    ChildProcess::new(child, &stdin).until(deadline, timeout)
}

/// Tries as long as the executable is being written.
fn patiently<T>(
    tries: u32,
    mut spawn: impl FnMut() -> io::Result<T>,
    mut pause: impl FnMut(),
) -> Result<T, ProcessError> {
    for _ in 0..tries {
        match spawn() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => pause(),
            other => return other.map_err(ProcessError::Start),
        }
    }
    Err(ProcessError::Busy)
}

/// A child that runs.
struct ChildProcess<'a> {
    child: Child,
    group: ProcessGroup,
    signals: Option<Signals>,
    /// What of stdin is still to be written.
    stdin: Option<(ChildStdin, &'a [u8])>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    printed: Vec<u8>,
    relay: Relay<Stderr>,
    ended: Option<Instant>,
}

/// What a call of `poll` was for.
#[derive(Clone, Copy)]
enum PollSource {
    Stdin,
    Stdout,
    Stderr,
    End,
    Signals,
}

impl<'a> ChildProcess<'a> {
    fn new(mut child: Child, stdin: &'a [u8]) -> Self {
        Self {
            group: ProcessGroup::of(&child),
            // Not before: the child would inherit what is blocked.
            signals: Signals::catch().inspect_err(|errno| tracing::debug!("signals can't be caught: {errno}")).ok(),
            stdin: child.stdin.take().map(|pipe| (pipe, stdin)),
            stdout: child.stdout.take(),
            stderr: child.stderr.take(),
            printed: Vec::new(),
            relay: Relay::new(Stderr),
            ended: None,
            child,
        }
    }

    fn until(mut self, deadline: Instant, timeout: Duration) -> Result<ChildExit, ProcessError> {
        while self.ended.is_none() || self.stdout.is_some() || self.stderr.is_some() {
            let until = self.ended.map_or(deadline, |ended| deadline.min(ended + GRACE));
            let failure = match self.wait(until) {
                Ok(WaitOutcome::Event(signal)) if self.printed.len() <= STDOUT_LIMIT => match signal {
                    None => continue,
                    Some(signal) => ProcessError::Interrupted(signal),
                },
                Ok(WaitOutcome::Event(_)) => ProcessError::TooMuch,
                Ok(WaitOutcome::Timeout) if self.ended.is_some() => break,
                Ok(WaitOutcome::Timeout) => {
                    self.kill();
                    return Err(ProcessError::Deadline(timeout, self.relay.finish()));
                }
                Err(errno) => ProcessError::Wait(errno.into()),
            };
            self.kill();
            return Err(failure);
        }
        let status = self.child.wait().map_err(ProcessError::Wait)?;
        self.group.has_ended();
        Ok(ChildExit { status, stdout: self.printed, last_words: self.relay.finish() })
    }

    /// Waits for the next event and handles it. A child that never pauses does not keep the clock from
    /// being looked at.
    fn wait(&mut self, until: Instant) -> Result<WaitOutcome, Errno> {
        let Some(left) = until.checked_duration_since(Instant::now()) else { return Ok(WaitOutcome::Timeout) };
        let left = if self.group.must_be_asked() { left.min(PULSE) } else { left };
        let mut caught = None;
        for (source, flags) in self.poll(left)? {
            match source {
                PollSource::Stdin => self.write(flags),
                PollSource::Stdout => self.read_stdout(),
                PollSource::Stderr => self.read_stderr(),
                PollSource::End => {}
                PollSource::Signals => caught = self.signals.as_mut().and_then(Signals::next),
            }
        }
        if self.ended.is_none() && self.group.leader_has_ended()? {
            self.ended = Some(Instant::now());
        }
        Ok(WaitOutcome::Event(caught))
    }

    /// What has happened within `left`.
    fn poll(&self, left: Duration) -> Result<Vec<(PollSource, PollFlags)>, Errno> {
        let end = if self.ended.is_none() { self.group.end() } else { None };
        let all: [(PollSource, Option<BorrowedFd<'_>>, PollFlags); 5] = [
            (PollSource::Stdin, self.stdin.as_ref().map(|(pipe, _)| pipe.as_fd()), PollFlags::POLLOUT),
            (PollSource::Stdout, self.stdout.as_ref().map(AsFd::as_fd), PollFlags::POLLIN),
            (PollSource::Stderr, self.stderr.as_ref().map(AsFd::as_fd), PollFlags::POLLIN),
            (PollSource::End, end, PollFlags::POLLIN),
            (PollSource::Signals, self.signals.as_ref().map(AsFd::as_fd), PollFlags::POLLIN),
        ];
        let (sources, mut fds): (Vec<PollSource>, Vec<PollFd<'_>>) =
            all.into_iter().filter_map(|(source, fd, flags)| Some((source, PollFd::new(fd?, flags)))).unzip();
        // Rounded up, so that it does not return before the time.
        let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        again(|| poll(&mut fds, timeout))?;
        let happened = fds.iter().map(|fd| fd.revents().unwrap_or_else(PollFlags::empty));
        Ok(sources.into_iter().zip(happened).filter(|(_, flags)| !flags.is_empty()).collect())
    }

    /// A plugin that does not read all of it, or nothing, is within its rights.
    fn write(&mut self, flags: PollFlags) {
        let Some((pipe, rest)) = &mut self.stdin else { return };
        // So much can be written without waiting (pipe(7), `PIPE_BUF`).
        let piece = rest.get(..PIECE).unwrap_or(rest);
        let written = match pipe.write(piece) {
            _ if flags.contains(PollFlags::POLLERR) => 0,
            Err(error) if error.kind() == ErrorKind::Interrupted => return,
            written => written.unwrap_or(0),
        };
        *rest = rest.get(written..).unwrap_or_default();
        if written == 0 || rest.is_empty() {
            self.stdin = None;
        }
    }

    fn read_stdout(&mut self) {
        let mut buffer = [0; 16 << 10];
        match self.stdout.as_mut().map(|pipe| piece(pipe, &mut buffer)) {
            Some(Some(piece)) => self.printed.extend(piece),
            _ => self.stdout = None,
        }
    }

    fn read_stderr(&mut self) {
        let mut buffer = [0; 16 << 10];
        match self.stderr.as_mut().map(|pipe| piece(pipe, &mut buffer)) {
            Some(Some(piece)) => self.relay.pass_on(piece),
            _ => self.stderr = None,
        }
    }

    /// Kills the group and reaps the child, unless the kernel holds it; then it is reaped by
    /// whoever inherits it.
    fn kill(&mut self) {
        self.group.kill();
        let until = Instant::now() + GRACE;
        while self.ended.is_none() {
            self.printed.clear();
            if !matches!(self.wait(until), Ok(WaitOutcome::Event(_))) {
                return;
            }
        }
        let _ = self.child.wait();
        self.group.has_ended();
    }
}

/// The outcome of waiting.
enum WaitOutcome {
    /// An event arrived, and perhaps this signal.
    Event(Option<Signal>),
    /// The deadline passed.
    Timeout,
}

/// What comes through a pipe that is ready; `None` at its end.
fn piece<'a>(pipe: &mut impl Read, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    match pipe.read(buffer) {
        Err(error) if error.kind() == ErrorKind::Interrupted => Some(&[]),
        read => buffer.get(..read.unwrap_or(0)).filter(|piece| !piece.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::Pid;
    use std::cell::Cell;
    use std::collections::BTreeSet;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::ExitStatusExt;
    use std::path::PathBuf;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(1500);

    /// Runs a shell script as a plugin.
    fn sh(name: &str, script: &str, stdin: &[u8], timeout: Duration) -> Result<ChildExit, ProcessError> {
        let path = file(name, &format!("#!/bin/sh\n{script}\n"));
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("permissions");
        let ended = run(&path, &[], stdin.to_vec(), timeout);
        std::fs::remove_file(&path).expect("removable");
        ended
    }

    fn alive(pid: &str) -> bool {
        Path::new("/proc").join(pid.trim()).exists()
    }

    fn file(name: &str, text: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("detour-process-{name}-{}", std::process::id()));
        std::fs::write(&path, text).expect("writable");
        path
    }

    #[test]
    fn stdin_goes_in_and_stdout_and_status_come_out() {
        let ended = sh("status", "cat; echo why >&2; exit 3", b"text", LONG).expect("it ends");
        assert_eq!(ended.stdout, b"text");
        assert_eq!(ended.status.code(), Some(3));
        assert_eq!(ended.last_words, "why");
    }

    #[test]
    fn variables_are_added_to_our_own_environment() {
        let ended = run(Path::new("/usr/bin/env"), &[("CNI_IFNAME", "net1".into())], vec![], LONG).expect("it ends");
        let text = String::from_utf8(ended.stdout).expect("text");
        assert!(text.lines().any(|line| line == "CNI_IFNAME=net1"), "{text}");
        assert!(text.lines().any(|line| line.starts_with("PATH=")), "{text}");
    }

    #[test]
    fn a_large_stdin_that_nobody_reads_is_no_failure() {
        let stdin = vec![b'x'; 1 << 20];
        let ended = run(Path::new("/bin/true"), &[], stdin, LONG).expect("it ends");
        assert!(ended.status.success());
    }

    /// What this process has open, as `ls -l /proc/self/fd` would show it.
    fn open_here() -> BTreeSet<PathBuf> {
        let entries = std::fs::read_dir("/proc/self/fd").expect("it is there").flatten();
        entries.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect()
    }

    #[test]
    fn no_descriptor_of_ours_is_inherited() {
        let before = open_here();
        let _socket = crate::firewall::nfnetlink::NfSocket::open().expect("root's");
        let _netns = std::fs::File::open("/proc/self/ns/net").expect("it is there");
        let ours: Vec<_> = open_here().difference(&before).map(|link| link.display().to_string()).collect();
        assert!(ours.iter().any(|link| link.starts_with("socket:")), "{ours:?}");
        let ended = sh("descriptors", "exec ls -l /proc/self/fd", b"", LONG).expect("it ends");
        let theirs = String::from_utf8(ended.stdout).expect("text");
        assert!(theirs.contains(" 2 -> pipe:"), "{theirs}");
        assert!(!theirs.contains("net:["), "{theirs}");
        let inherited: Vec<_> = ours.iter().filter(|link| theirs.contains(*link)).collect();
        assert!(inherited.is_empty(), "{inherited:?}");
    }

    #[test]
    fn at_the_deadline_the_whole_group_is_killed() {
        let fifo = std::env::temp_dir().join(format!("detour-process-fifo-{}", std::process::id()));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a fifo");
        let started = Instant::now();
        // It ends once nobody has it open for writing any more.
        let read = thread::spawn({
            let fifo = fifo.clone();
            move || std::fs::read(fifo)
        });
        let script = format!("sleep 60 > {} & echo stuck >&2; wait", fifo.display());
        let timeout = Duration::from_secs(2);
        match sh("group", &script, b"", timeout).expect_err("it never ends") {
            ProcessError::Deadline(allowed, last_words) => {
                assert_eq!((allowed, last_words.as_str()), (timeout, "stuck"))
            }
            other => panic!("{other}"),
        }
        read.join().expect("no panic").expect("readable");
        assert!(started.elapsed() < Duration::from_secs(30), "the grandchild was killed, too");
        std::fs::remove_file(&fifo).expect("removable");
    }

    #[test]
    fn output_without_end_does_not_hide_the_deadline() {
        let failure = sh("stderr", "exec yes $(printf %07000d 0) >&2", b"", SHORT).expect_err("it never ends");
        assert!(matches!(failure, ProcessError::Deadline(..)), "{failure}");
    }

    #[test]
    fn too_much_is_cut_off() {
        let failure = sh("stdout", "exec yes", b"", LONG).expect_err("too much");
        assert!(matches!(failure, ProcessError::TooMuch), "{failure}");
    }

    /// With a descriptor that tells the end, and where the kernel has none.
    #[test]
    fn a_child_that_closes_its_streams_early_is_waited_for() {
        for told in [true, false] {
            let path = file("closes", "#!/bin/sh\nexec >&- 2>&-\nsleep 0.2\nexit 7\n");
            std::fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("permissions");
            let mut command = Command::new(&path);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
            let spawn = || command.spawn();
            let mut watch = ChildProcess::new(patiently(BUSY_TRIES, spawn, thread::yield_now).expect("it starts"), b"");
            if !told {
                watch.group.without_end();
            }
            let ended = watch.until(Instant::now() + LONG, LONG).expect("it ends");
            assert_eq!(ended.status.code(), Some(7));
            std::fs::remove_file(&path).expect("removable");
        }
    }

    #[test]
    fn what_is_for_another_call_is_known_by_the_cause() {
        let start = |errno: Errno| ProcessError::Start(io::Error::from(errno));
        assert!(start(Errno::EAGAIN).may_pass() && start(Errno::EMFILE).may_pass() && ProcessError::Busy.may_pass());
        assert!(start(Errno::EAGAIN).to_string().contains("check the limits"));
        assert!(!start(Errno::ENOEXEC).may_pass() && !ProcessError::TooMuch.may_pass());
    }

    #[test]
    fn something_left_behind_does_not_hold_the_answer_back() {
        let ended = sh("left", "sleep 1000 & echo $!", b"", LONG).expect("it ends");
        let left = String::from_utf8(ended.stdout).expect("text");
        assert!(alive(&left), "what a plugin leaves behind after its end stays");
        nix::sys::signal::kill(Pid::from_raw(left.trim().parse().expect("a number")), Signal::SIGKILL)
            .expect("it ends");
    }

    #[test]
    fn a_signal_is_seen() {
        assert_eq!(sh("signal", "kill -SEGV $$", b"", LONG).expect("it ends").status.signal(), Some(11));
    }

    #[test]
    fn what_can_not_be_started_is_named() {
        let path = file("plain", "#!/bin/sh\n");
        let failure = run(&path, &[], vec![], LONG).expect_err("it has no x bits");
        assert!(failure.to_string().contains("with its x bits set?"), "{failure}");
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("permissions");
        let writer = std::fs::OpenOptions::new().append(true).open(&path).expect("writable");
        let spawn = || Command::new(&path).spawn();
        assert!(matches!(patiently(3, spawn, || ()), Err(ProcessError::Busy)));
        drop(writer);
        run(&path, &[], vec![], LONG).expect("nobody writes to it");
        std::fs::remove_file(&path).expect("removable");
    }

    #[test]
    fn a_busy_executable_is_tried_again() {
        let (tries, pauses) = (Cell::new(0), Cell::new(0));
        let spawn = || {
            tries.set(tries.get() + 1);
            if tries.get() < 3 { Err(ErrorKind::ExecutableFileBusy.into()) } else { Ok(()) }
        };
        patiently(BUSY_TRIES, spawn, || pauses.set(pauses.get() + 1)).expect("the third try");
        assert_eq!((tries.get(), pauses.get()), (3, 2));
        assert!(matches!(
            patiently(1, || Err::<(), _>(ErrorKind::NotFound.into()), || ()),
            Err(ProcessError::Start(_))
        ));
    }
}
