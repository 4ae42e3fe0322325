//! A child process with a deadline: its stdin written, its stdout kept, its stderr passed on.

mod stderr;

use crate::streams::Stderr;
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
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

/// What is left of a child.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    pub(super) stdout: Vec<u8>,
    /// The end of what it printed to stderr.
    pub(super) last_words: String,
}

/// Why there is nothing left to look at.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("it is being written, and was so for 5 s; the runtime should try again")]
    Busy,
    #[error("it can't be started: {0}; is it an executable for this machine, with its x bits set?")]
    Start(io::Error),
    #[error("it printed more than {} MiB to stdout and was killed; a result is a few kilobytes", STDOUT_LIMIT >> 20)]
    TooMuch,
    #[error("it did not end within {} s and was killed{}; delegate_timeout_seconds says how long it may take", .0.as_secs(), said(.1))]
    Deadline(Duration, String),
    #[error("its end can't be waited for: {0}")]
    Wait(io::Error),
}

/// What a message says of the end of stderr.
pub(super) fn said(last_words: &str) -> String {
    if last_words.is_empty() { String::new() } else { format!(" (stderr: {last_words:?})") }
}

/// Starts `program` with `variables` on top of this process's environment and `stdin`, in a
/// process group of its own, and waits for its end. At the deadline the whole group is killed.
pub(super) fn run(
    program: &Path,
    variables: &[(&'static str, OsString)],
    stdin: Vec<u8>,
    timeout: Duration,
) -> Result<Ended, Failure> {
    let mut command = Command::new(program);
    command.envs(variables.iter().map(|(name, value)| (name, value))).process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let deadline = Instant::now() + timeout;
    let child = patiently(BUSY_TRIES, || command.spawn(), || thread::park_timeout(BUSY_PAUSE))?;
    Watch::new(child, stdin).until(deadline, timeout)
}

/// Tries as long as the executable is being written.
fn patiently<T>(tries: u32, mut spawn: impl FnMut() -> io::Result<T>, mut pause: impl FnMut()) -> Result<T, Failure> {
    for _ in 0..tries {
        match spawn() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => pause(),
            other => return other.map_err(Failure::Start),
        }
    }
    Err(Failure::Busy)
}

/// What happens to a child.
enum Event {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    Closed,
    Ended,
}

/// A child that runs. Threads of their own write and read its streams and wait for its end; one
/// that gets stuck ends with this process.
struct Watch {
    child: Child,
    events: Receiver<Event>,
    stdout: Vec<u8>,
    stderr: Relay<Stderr>,
    open_streams: u32,
    ended: Option<Instant>,
}

impl Watch {
    fn new(mut child: Child, stdin: Vec<u8>) -> Self {
        let (to, events) = sync_channel(16);
        if let Some(mut pipe) = child.stdin.take() {
            // A plugin that does not read all of it, or nothing, is within its rights.
            thread::spawn(move || drop(pipe.write_all(&stdin)));
        }
        let mut open_streams = 0;
        if let Some(pipe) = child.stdout.take() {
            open_streams += 1;
            let to = to.clone();
            thread::spawn(move || forward(pipe, &to, Event::Stdout));
        }
        if let Some(pipe) = child.stderr.take() {
            open_streams += 1;
            let to = to.clone();
            thread::spawn(move || forward(pipe, &to, Event::Stderr));
        }
        let pid = pid(&child);
        thread::spawn(move || {
            // Not reaped here: as long as it isn't, nobody else has its process ID.
            while waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) == Err(Errno::EINTR) {}
            to.send(Event::Ended)
        });
        Self { child, events, stdout: Vec::new(), stderr: Relay::new(Stderr), open_streams, ended: None }
    }

    fn until(mut self, deadline: Instant, timeout: Duration) -> Result<Ended, Failure> {
        while self.ended.is_none() || self.open_streams > 0 {
            let until = self.ended.map_or(deadline, |ended| deadline.min(ended + GRACE));
            match self.next(until) {
                Some(event) => self.note(event),
                None if self.ended.is_some() => break,
                None => {
                    self.kill();
                    return Err(Failure::Deadline(timeout, self.stderr.finish()));
                }
            }
            if self.stdout.len() > STDOUT_LIMIT {
                self.kill();
                return Err(Failure::TooMuch);
            }
        }
        let status = self.child.wait().map_err(Failure::Wait)?;
        Ok(Ended { status, stdout: self.stdout, last_words: self.stderr.finish() })
    }

    /// The next event before `until`. A child that never pauses does not keep the clock from
    /// being looked at.
    fn next(&self, until: Instant) -> Option<Event> {
        let left = until.checked_duration_since(Instant::now())?;
        self.events.recv_timeout(left).ok()
    }

    fn note(&mut self, event: Event) {
        match event {
            Event::Stdout(piece) => self.stdout.extend(piece),
            Event::Stderr(piece) => self.stderr.pass_on(&piece),
            Event::Closed => self.open_streams -= 1,
            Event::Ended => self.ended = Some(Instant::now()),
        }
    }

    /// Kills the group and reaps the child, unless the kernel holds it; then it is reaped by
    /// whoever inherits it.
    fn kill(&mut self) {
        if let Err(errno) = killpg(pid(&self.child), Signal::SIGKILL) {
            tracing::warn!("process group {} can't be killed: {errno}", self.child.id());
        }
        let until = Instant::now() + GRACE;
        while self.ended.is_none() {
            match self.next(until) {
                Some(Event::Stdout(_)) => {}
                Some(event) => self.note(event),
                None => return,
            }
        }
        let _ = self.child.wait();
    }
}

/// Linux's process IDs are below 2^22 (proc(5), `pid_max`).
fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed())
}

/// Sends what comes through `pipe`, as long as somebody listens.
fn forward(mut pipe: impl Read, to: &SyncSender<Event>, event: fn(Vec<u8>) -> Event) {
    let mut buffer = [0; 16 << 10];
    loop {
        let read = match pipe.read(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read.unwrap_or(0),
        };
        let piece = if read == 0 { Event::Closed } else { event(buffer[..read].to_vec()) };
        if to.send(piece).is_err() || read == 0 {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::collections::BTreeSet;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::ExitStatusExt;
    use std::path::PathBuf;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(1500);

    /// Runs a shell script as a plugin.
    fn sh(name: &str, script: &str, stdin: &[u8], timeout: Duration) -> Result<Ended, Failure> {
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
        let _socket = crate::firewall::nfnetlink::Socket::open().expect("root's");
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
            Failure::Deadline(allowed, last_words) => assert_eq!((allowed, last_words.as_str()), (timeout, "stuck")),
            other => panic!("{other}"),
        }
        read.join().expect("no panic").expect("readable");
        assert!(started.elapsed() < Duration::from_secs(30), "the grandchild was killed, too");
        std::fs::remove_file(&fifo).expect("removable");
    }

    #[test]
    fn output_without_end_does_not_hide_the_deadline() {
        let failure = sh("stderr", "exec yes $(printf %07000d 0) >&2", b"", SHORT).expect_err("it never ends");
        assert!(matches!(failure, Failure::Deadline(..)), "{failure}");
    }

    #[test]
    fn too_much_is_cut_off() {
        let failure = sh("stdout", "exec yes", b"", LONG).expect_err("too much");
        assert!(matches!(failure, Failure::TooMuch), "{failure}");
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
        assert!(matches!(patiently(3, spawn, || ()), Err(Failure::Busy)));
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
        assert!(matches!(patiently(1, || Err::<(), _>(ErrorKind::NotFound.into()), || ()), Err(Failure::Start(_))));
    }
}
