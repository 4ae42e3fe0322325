//! Other listeners at the path of the agent socket.

use std::env;
use std::fs;
use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;

/// The path at which the test listens when it runs in another process.
const LISTEN_AT: &str = "TEST_LISTEN_AT";
/// Nobody, by convention.
const NOBODY: u32 = 65534;

fn bind(path: &Path) -> UnixListener {
    fs::create_dir_all(path.parent().expect("a directory")).expect("made");
    UnixListener::bind(path).expect("bound")
}

/// Serves connections one by one with `work` until the process ends.
pub(crate) fn listener(path: &Path, work: impl Fn(UnixStream) + Send + 'static) -> Listening {
    let listener = bind(path);
    thread::spawn(move || listener.incoming().flatten().for_each(work));
    Listening(path.to_owned())
}

/// Returns a listener that never accepts, with a full queue.
pub(crate) fn that_accepts_nothing(path: &Path) -> (UnixListener, Vec<UnixStream>) {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, listen, socket};
    use std::os::fd::AsRawFd;
    let listener = bind(path);
    listen(&listener, nix::sys::socket::Backlog::new(1).expect("one")).expect("shortened");
    let mut waiting = Vec::new();
    loop {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let client = socket(AddressFamily::Unix, SockType::Stream, flags, None).expect("a socket");
        let address = UnixAddr::new(path).expect("short enough");
        match connect(client.as_raw_fd(), &address) {
            Ok(()) => waiting.push(client.into()),
            Err(_) => return (listener, waiting),
        }
    }
}

/// Starts a process of another user that listens. Its program is this test program.
pub(crate) fn foreign_listener(path: &Path) -> Foreign {
    let directory = path.parent().expect("a directory");
    fs::create_dir_all(directory).expect("made");
    std::os::unix::fs::chown(directory, Some(NOBODY), Some(NOBODY)).expect("given away");
    let program = env::current_exe().expect("this test");
    let mut process = Command::new(program)
        .args(["--exact", "support::listener::listens_as_another_user", "--nocapture"])
        .env(LISTEN_AT, path)
        .uid(NOBODY)
        .gid(NOBODY)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let (mut stdout, mut said) = (process.stdout.take().expect("a pipe"), Vec::new());
    while !said.windows(5).any(|part| part == b"ready") {
        let mut byte = [0];
        stdout.read_exact(&mut byte).expect("it gets ready");
        said.extend(byte);
    }
    Foreign { process, _stdout: stdout }
}

/// Not a test: it listens at the path from [`foreign_listener`] until its stdin ends.
#[test]
fn listens_as_another_user() {
    let Some(path) = env::var_os(LISTEN_AT) else { return };
    let _listener = UnixListener::bind(path).expect("bound");
    println!("ready");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// A socket, removed when the value is dropped.
pub(crate) struct Listening(PathBuf);

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A process that ends when the value is dropped.
pub(crate) struct Foreign {
    process: Child,
    /// Kept open for the process's further output.
    _stdout: ChildStdout,
}

impl Drop for Foreign {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
