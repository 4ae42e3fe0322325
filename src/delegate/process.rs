//! A child process with a deadline: collects its stdout and stderr, and forwards its stderr when it ends. One `poll` loop on
//! the calling thread does this, so no helper thread can fail to start or outlive the call.

use crate::netlink::retry_interrupted;
use crate::printable::Text;
use crate::streams::Stderr;
use crate::wait;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::io::{self, ErrorKind, PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::thread::park_timeout;
use std::time::{Duration, Instant};

/// The maximum size of stdout in bytes. Results have a few kilobytes.
const MAX_STDOUT: usize = 4 << 20;
/// The size of the end of stderr that is forwarded, and of the part that error messages quote, in bytes.
const MAX_STDERR: usize = 64 << 10;
const MAX_TAIL: usize = 500;
/// How long to wait for the end of the streams after the child has exited or was killed: a process that it started
/// may keep them open.
const STREAM_TIMEOUT: Duration = Duration::from_secs(1);
/// An executable that is open for writing can't be started (`ETXTBSY`). As in the reference library, starting it
/// is retried for five seconds (`pkg/invoke/raw_exec.go`).
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
const BUSY_INTERVALS: wait::Intervals = [Duration::from_millis(100); 2];
/// How often to look for the exit of a child whose streams are closed; an exit closes them just before.
const EXIT_INTERVAL: Duration = Duration::from_micros(200);
/// The same while a stream is open: a process that the child started may keep it open.
const OPEN_STREAM_INTERVAL: Duration = Duration::from_millis(50);

/// The exit of a child and its output.
#[derive(Debug)]
pub(crate) struct ChildExit {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    /// The end of its stderr.
    pub(crate) stderr_tail: String,
}

/// The reason why a child has no usable exit.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProcessError {
    #[error("can't be started: the file is being written (waited 5 s); the runtime should retry")]
    Busy,
    #[error("can't be started: {error}{hint}", error = .0, hint = start_hint(.0))]
    Start(io::Error),
    #[error("killed: it printed more than {} MiB to stdout; a CNI result has a few kilobytes", MAX_STDOUT >> 20)]
    TooMuchOutput,
    #[error(
        "killed: it did not end within {} s{}; delegate_timeout_seconds sets this timeout",
        .0.as_secs(),
        stderr_note(.1)
    )]
    Timeout(Duration, String),
    #[error("can't wait for its exit: {0}")]
    Wait(io::Error),
}

impl ProcessError {
    /// Returns whether a retry may succeed, because the executable is not the cause.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Busy => true,
            Self::Start(error) => lacks_resources(error),
            Self::TooMuchOutput | Self::Timeout(..) | Self::Wait(_) => false,
        }
    }
}

fn lacks_resources(error: &io::Error) -> bool {
    let lacking = [Errno::EAGAIN, Errno::ENOMEM, Errno::EMFILE, Errno::ENFILE];
    lacking.iter().any(|errno| error.raw_os_error() == Some(*errno as i32))
}

fn start_hint(error: &io::Error) -> &'static str {
    if lacks_resources(error) {
        "; check the runtime's limits on processes and open files"
    } else {
        "; check that it is an executable for this machine with its x bits set"
    }
}

/// Returns the part of an error message that quotes the end of stderr.
pub(super) fn stderr_note(tail: &str) -> String {
    if tail.is_empty() { String::new() } else { format!(" (stderr: {tail:?})") }
}

/// Runs `program` in its own process group and waits for its exit. It gets `stdin`, and `variables` in addition to
/// the environment of this process. On timeout, the whole group is killed.
///
/// A signal that ends this process leaves the child running: the kernel could kill it too (`PR_SET_PDEATHSIG`), but
/// only the child can request that, between fork and exec, where Rust allows no safe code.
pub(super) fn run(
    program: &Path,
    variables: &[(&'static str, OsString)],
    stdin: &[u8],
    timeout: Duration,
) -> Result<ChildExit, ProcessError> {
    let (start, deadline) = (|| start(program, variables, stdin), Instant::now() + timeout);
    let mut running = start_with_retry(BUSY_TIMEOUT, start)?;
    let exited = running.wait_until(deadline);
    if !matches!(exited, Ok(Some(_))) {
        running.kill();
    }
    let [stdout, stderr] = running.outputs;
    let stderr_tail = forward(&stderr);
    match exited? {
        Some(status) => Ok(ChildExit { status, stdout, stderr_tail }),
        None => Err(ProcessError::Timeout(timeout, stderr_tail)),
    }
}

/// Starts the child. Its stdin is written before, into a pipe of that size, because it need not read all of it.
fn start(program: &Path, variables: &[(&'static str, OsString)], stdin: &[u8]) -> io::Result<RunningChild> {
    let ((input, mut filled), (stdout, output), (stderr, errors)) = (io::pipe()?, io::pipe()?, io::pipe()?);
    fcntl(&filled, FcntlArg::F_SETPIPE_SZ(i32::try_from(stdin.len()).unwrap_or(i32::MAX)))?;
    filled.write_all(stdin)?;
    let mut command = Command::new(program);
    command.envs(variables.iter().map(|(name, value)| (name, value))).process_group(0);
    let child = command.stdin(input).stdout(output).stderr(errors).spawn()?;
    Ok(RunningChild { child, pipes: [Some(stdout), Some(stderr)], outputs: Default::default() })
}

/// Retries while the executable is open for writing.
fn start_with_retry<T>(timeout: Duration, mut start: impl FnMut() -> io::Result<T>) -> Result<T, ProcessError> {
    let started = wait::until(timeout, BUSY_INTERVALS, || match start() {
        Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => Ok(None),
        other => other.map(Some).map_err(ProcessError::Start),
    });
    started?.ok_or(ProcessError::Busy)
}

/// Writes the child's stderr to that of this process, with control characters escaped, and returns its end.
fn forward(stderr: &[u8]) -> String {
    for line in String::from_utf8_lossy(stderr).lines() {
        let mut text = Text::lines(line);
        text.end_line();
        // An error means that stderr is closed.
        let _ = Stderr.write_all(text.as_str().as_bytes());
    }
    String::from_utf8_lossy(&stderr[stderr.len().saturating_sub(MAX_TAIL)..]).trim().to_owned()
}

/// A running child.
struct RunningChild {
    child: Child,
    /// Its stdout and its stderr; `None` after the end.
    pipes: [Option<PipeReader>; 2],
    /// What was read from them; of stderr the end.
    outputs: [Vec<u8>; 2],
}

impl RunningChild {
    /// Returns the exit status, or `None` if the child is running at the deadline.
    fn wait_until(&mut self, mut deadline: Instant) -> Result<Option<ExitStatus>, ProcessError> {
        let mut exited = None;
        loop {
            if exited.is_none() {
                exited = self.child.try_wait().map_err(ProcessError::Wait)?;
                deadline = exited.map_or(deadline, |_| deadline.min(Instant::now() + STREAM_TIMEOUT));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let has_ended = exited.is_some() && self.pipes.iter().all(Option::is_none);
            if has_ended || left.is_zero() {
                return Ok(exited);
            }
            self.receive(left).map_err(|errno| ProcessError::Wait(errno.into()))?;
            let [stdout, stderr] = &mut self.outputs;
            if stdout.len() > MAX_STDOUT {
                return Err(ProcessError::TooMuchOutput);
            }
            stderr.drain(..stderr.len().saturating_sub(MAX_STDERR));
        }
    }

    /// Waits until a stream is ready, for a short time, and reads from those that are.
    fn receive(&mut self, left: Duration) -> Result<(), Errno> {
        let mut fds: Vec<_> =
            self.pipes.iter().flatten().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)).collect();
        if fds.is_empty() {
            park_timeout(EXIT_INTERVAL.min(left));
            return Ok(());
        }
        // Rounded up, so that it does not return early.
        let timeout = OPEN_STREAM_INTERVAL.min(left + Duration::from_millis(1));
        retry_interrupted(|| poll(&mut fds, PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX)))?;
        let mut ready = fds.iter().map(|fd| fd.any() != Some(false)).collect::<Vec<_>>().into_iter();
        for (pipe, output) in self.pipes.iter_mut().zip(&mut self.outputs) {
            let mut chunk = [0; 16 << 10];
            let Some(open) = pipe.as_mut().filter(|_| ready.next() == Some(true)) else { continue };
            match open.read(&mut chunk) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(length @ 1..) => output.extend(&chunk[..length]),
                _ => *pipe = None,
            }
        }
        Ok(())
    }

    /// Kills the group and reaps the child. If the kernel delays its exit, its next parent reaps it.
    fn kill(&mut self) {
        // Linux's process IDs are below 2^22 (proc(5), `pid_max`).
        let group = Pid::from_raw(self.child.id().cast_signed());
        if let Err(errno) = killpg(group, Signal::SIGKILL) {
            tracing::warn!("can't kill process group {group}: {errno}");
        }
        let _ = wait::until(STREAM_TIMEOUT, [EXIT_INTERVAL; 2], || self.child.try_wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::ExitStatusExt;
    use std::path::PathBuf;
    use std::thread;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(1500);

    /// Runs a shell script as a plugin.
    fn sh(name: &str, script: &str, stdin: &[u8], timeout: Duration) -> Result<ChildExit, ProcessError> {
        let path = file(name, &format!("#!/bin/sh\n{script}\n"));
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("permissions");
        let exit = run(&path, &[], stdin, timeout);
        std::fs::remove_file(&path).expect("removable");
        exit
    }

    fn is_alive(pid: &str) -> bool {
        Path::new("/proc").join(pid.trim()).exists()
    }

    fn file(name: &str, text: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("detour-process-{name}-{}", std::process::id()));
        std::fs::write(&path, text).expect("writable");
        path
    }

    #[test]
    fn a_child_gets_stdin_and_returns_stdout_stderr_and_status() {
        let exit = sh("status", "cat; echo why >&2; exit 3", b"text", LONG).expect("it ends");
        assert_eq!(exit.stdout, b"text");
        assert_eq!(exit.status.code(), Some(3));
        assert_eq!(exit.stderr_tail, "why");
    }

    #[test]
    fn a_child_inherits_the_environment_and_gets_the_variables() {
        let exit = run(Path::new("/usr/bin/env"), &[("CNI_IFNAME", "net1".into())], b"", LONG).expect("it ends");
        let text = String::from_utf8(exit.stdout).expect("text");
        assert!(text.lines().any(|line| line == "CNI_IFNAME=net1"), "{text}");
        assert!(text.lines().any(|line| line.starts_with("PATH=")), "{text}");
    }

    #[test]
    fn a_child_need_not_read_a_large_stdin() {
        let stdin = vec![b'x'; 1 << 20];
        let exit = run(Path::new("/bin/true"), &[], &stdin, LONG).expect("it ends");
        assert!(exit.status.success());
        let exit = run(Path::new("/bin/cat"), &[], &stdin, LONG).expect("it ends");
        assert_eq!(exit.stdout, stdin);
    }

    /// Returns the open descriptors of this process, as `ls -l /proc/self/fd` shows them.
    fn open_descriptors() -> BTreeSet<PathBuf> {
        let entries = std::fs::read_dir("/proc/self/fd").expect("it is there").flatten();
        entries.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect()
    }

    #[test]
    fn a_child_inherits_no_other_descriptors() {
        let before = open_descriptors();
        let _socket = crate::firewall::nfnetlink::NfSocket::open().expect("root's");
        let _netns = std::fs::File::open("/proc/self/ns/net").expect("it is there");
        let ours: Vec<_> = open_descriptors().difference(&before).map(|link| link.display().to_string()).collect();
        assert!(ours.iter().any(|link| link.starts_with("socket:")), "{ours:?}");
        let exit = sh("descriptors", "exec ls -l /proc/self/fd", b"", LONG).expect("it ends");
        let theirs = String::from_utf8(exit.stdout).expect("text");
        assert!(theirs.contains(" 2 -> pipe:"), "{theirs}");
        assert!(!theirs.contains("net:["), "{theirs}");
        let inherited: Vec<_> = ours.iter().filter(|link| theirs.contains(*link)).collect();
        assert!(inherited.is_empty(), "{inherited:?}");
    }

    #[test]
    fn a_timeout_kills_the_whole_process_group() {
        let fifo = std::env::temp_dir().join(format!("detour-process-fifo-{}", std::process::id()));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a fifo");
        let started = Instant::now();
        // The read ends when no process has the FIFO open for writing.
        let read = thread::spawn({
            let fifo = fifo.clone();
            move || std::fs::read(fifo)
        });
        let script = format!("sleep 600 > {} & echo stuck >&2; wait", fifo.display());
        let timeout = Duration::from_secs(5);
        match sh("group", &script, b"", timeout).expect_err("it never ends") {
            ProcessError::Timeout(allowed, stderr_tail) => {
                assert_eq!((allowed, stderr_tail.as_str()), (timeout, "stuck"))
            }
            other => panic!("{other}"),
        }
        read.join().expect("no panic").expect("readable");
        assert!(started.elapsed() < Duration::from_secs(300), "the grandchild was killed, too");
        std::fs::remove_file(&fifo).expect("removable");
    }

    #[test]
    fn only_the_end_of_stderr_is_kept() {
        let exit = sh("long", "head -c 200000 /dev/zero | tr '\\0' x >&2; echo why >&2", b"", LONG).expect("it ends");
        assert!(exit.stderr_tail.len() <= MAX_TAIL && exit.stderr_tail.ends_with("xwhy"), "{}", exit.stderr_tail);
    }

    #[test]
    fn endless_output_does_not_hide_the_deadline() {
        let failure = sh("stderr", "exec yes $(printf %07000d 0) >&2", b"", SHORT).expect_err("it never ends");
        assert!(matches!(failure, ProcessError::Timeout(..)), "{failure}");
    }

    #[test]
    fn too_much_stdout_kills_the_child() {
        let failure = sh("stdout", "exec yes", b"", LONG).expect_err("too much");
        assert!(matches!(failure, ProcessError::TooMuchOutput), "{failure}");
    }

    #[test]
    fn a_child_that_closes_its_streams_early_is_waited_for() {
        let exit = sh("closes", "exec >&- 2>&-; sleep 0.2; exit 7", b"", LONG).expect("it ends");
        assert_eq!(exit.status.code(), Some(7));
    }

    #[test]
    fn errors_that_a_retry_may_solve_are_transient() {
        let start = |errno: Errno| ProcessError::Start(io::Error::from(errno));
        assert!(
            start(Errno::EAGAIN).is_transient()
                && start(Errno::EMFILE).is_transient()
                && ProcessError::Busy.is_transient()
        );
        assert!(start(Errno::EAGAIN).to_string().contains("check the runtime's limits"));
        assert!(!start(Errno::ENOEXEC).is_transient() && !ProcessError::TooMuchOutput.is_transient());
    }

    #[test]
    fn a_background_process_does_not_delay_the_result() {
        let exit = sh("left", "sleep 1000 & echo $!", b"", LONG).expect("it ends");
        let left = String::from_utf8(exit.stdout).expect("text");
        assert!(is_alive(&left), "a process that a plugin leaves behind keeps running");
        nix::sys::signal::kill(Pid::from_raw(left.trim().parse().expect("a number")), Signal::SIGKILL)
            .expect("it ends");
    }

    #[test]
    fn a_child_that_is_killed_by_a_signal_reports_it() {
        assert_eq!(sh("signal", "kill -SEGV $$", b"", LONG).expect("it ends").status.signal(), Some(11));
    }

    #[test]
    fn a_start_error_has_a_hint() {
        let path = file("plain", "#!/bin/sh\n");
        let failure = run(&path, &[], b"", LONG).expect_err("it has no x bits");
        assert!(failure.to_string().contains("with its x bits set"), "{failure}");
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("permissions");
        let writer = std::fs::OpenOptions::new().append(true).open(&path).expect("writable");
        let spawn = || Command::new(&path).spawn();
        assert!(matches!(start_with_retry(Duration::ZERO, spawn), Err(ProcessError::Busy)));
        drop(writer);
        run(&path, &[], b"", LONG).expect("not open for writing");
        std::fs::remove_file(&path).expect("removable");
    }

    #[test]
    fn starting_a_busy_executable_is_retried() {
        let mut attempts = 0;
        let spawn = || {
            attempts += 1;
            if attempts < 3 { Err(ErrorKind::ExecutableFileBusy.into()) } else { Ok(()) }
        };
        start_with_retry(LONG, spawn).expect("the third attempt");
        let missing = || Err::<(), _>(ErrorKind::NotFound.into());
        assert!(matches!(start_with_retry(LONG, missing), Err(ProcessError::Start(_))));
    }
}
