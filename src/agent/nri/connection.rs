//! Connects to the runtime's socket, and reconnects after each failure.

use super::session::{Failure, Session};
use super::{NriHandler, NriStatus};
use crate::backoff::Backoff;
use crate::trusted_file::{check, is_trusted};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket};
use std::ffi::OsStr;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The pause after the first failure.
const MIN_BACKOFF: Duration = Duration::from_millis(100);
/// The longest pause, without its random part.
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// The timeout from the connection to the end of the registration. A runtime registers one plugin after the other, and
/// waits 5 s for each.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(30);
/// The timeout for sending an answer.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// The size of the buffer for received bytes.
const BUFFER: usize = 64 << 10;

/// Registers with the runtime at `path`, and calls `handler` for what it reports, until `ended` is readable or its
/// other end is closed (as [`std::io::pipe`] whose writer is dropped). After a failure, it reconnects with a backoff of
/// at most 7.5 s, or as soon as the runtime creates the socket. `report` gets the result of the first attempt, and then
/// each change of the status.
pub fn run(path: &Path, mut handler: impl NriHandler, report: impl Fn(NriStatus), ended: impl AsFd) {
    let (ended, mut backoff, mut last) = (ended.as_fd(), Backoff::new(MIN_BACKOFF, MAX_BACKOFF), None);
    let watch = SocketWatch::new(path);
    loop {
        watch.start();
        let mut registered = None;
        let on_registration = |status: NriStatus| {
            registered = Some(Instant::now());
            last = None;
            report(status);
        };
        let Err(Failure::Cause(cause)) = serve(path, &mut handler, on_registration, ended) else { return };
        // Each registration lists all containers: if the runtime closes each new connection, the backoff must grow.
        if registered.is_some_and(|since: Instant| since.elapsed() > MAX_BACKOFF) {
            backoff.reset();
        }
        let status = NriStatus::Disconnected(format!("{}: {cause}", path.display()));
        if last.as_ref() != Some(&status) {
            report(status.clone());
            last = Some(status);
        }
        match watch.wait(backoff.pause(Instant::now()), ended) {
            Ok(true) => backoff.reset(),
            Err(Failure::Ended) => return,
            Ok(false) | Err(_) => {}
        }
    }
}

/// Registers once, and answers calls until the connection fails.
fn serve(
    path: &Path,
    handler: &mut impl NriHandler,
    on_registration: impl FnOnce(NriStatus),
    ended: BorrowedFd<'_>,
) -> Result<(), Failure> {
    let mut stream = open(path)?;
    let mut session = Session::default();
    let deadline = Instant::now() + REGISTRATION_TIMEOUT;
    match exchange(&mut stream, &mut session, handler, on_registration, deadline, ended) {
        Err(Failure::Closed) => Err(session.closed().into()),
        result => result,
    }
}

/// Registers until `deadline`, and answers calls.
fn exchange(
    stream: &mut UnixStream,
    session: &mut Session,
    handler: &mut impl NriHandler,
    on_registration: impl FnOnce(NriStatus),
    deadline: Instant,
    ended: BorrowedFd<'_>,
) -> Result<(), Failure> {
    let (mut buffer, mut on_registration) = (vec![0; BUFFER], Some(on_registration));
    send(stream, &Session::registration(), ended)?;
    loop {
        let deadline = on_registration.is_some().then_some(deadline);
        if !wait(stream.as_fd(), PollFlags::POLLIN, deadline, ended)? {
            let seconds = REGISTRATION_TIMEOUT.as_secs();
            return Err(format!("the runtime did not register the plugin within {seconds} s; see its log").into());
        }
        let received = match stream.read(&mut buffer) {
            Ok(0) => return Err(Failure::Closed),
            Ok(length) => &buffer[..length],
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => continue,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(Failure::Closed),
            Err(error) => return Err(format!("can't receive from the runtime: {error}").into()),
        };
        session.receive(received, handler, &mut |answer| send(stream, answer, ended))?;
        if let Some(status) = session.registered()
            && let Some(on_registration) = on_registration.take()
        {
            on_registration(status);
        }
    }
}

/// Connects to the socket, if only root can have created it.
fn open(path: &Path) -> Result<UnixStream, Failure> {
    let (directory, name) = path.parent().zip(path.file_name()).ok_or_else(|| "expected a path".to_owned())?;
    let directory =
        check(directory).map_err(|error| if error.is_not_found() { not_found() } else { error.to_string() })?;
    let failed = |errno: Errno| {
        Failure::Cause(match errno {
            Errno::ENOENT => not_found(),
            Errno::ECONNREFUSED => "the runtime does not accept connections; check that it runs".into(),
            Errno::EAGAIN => "the runtime's connection queue is full".into(),
            other => format!("can't connect: {}", other.desc().to_lowercase()),
        })
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let path = directory.join(name);
    let address = UnixAddr::new(&path).map_err(failed)?;
    // The kernel refuses connections to other files as to a socket without a listener.
    if std::fs::metadata(&path).is_ok_and(|metadata| !metadata.file_type().is_socket()) {
        return Err("expected a socket; correct the path in --nri-socket".to_owned().into());
    }
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None).map_err(failed)?;
    connect(socket.as_raw_fd(), &address).map_err(failed)?;
    let owner = getsockopt(&socket, PeerCredentials).map_err(failed)?.uid();
    if !is_trusted(owner) {
        let cause = format!("expected root as listener on the socket, got UID {owner}; remove the socket");
        return Err(cause.into());
    }
    Ok(socket.into())
}

fn not_found() -> String {
    "socket not found; check that the container runtime runs and that its configuration enables NRI".into()
}

fn send(mut stream: &UnixStream, mut bytes: &[u8], ended: BorrowedFd<'_>) -> Result<(), Failure> {
    let deadline = Instant::now() + SEND_TIMEOUT;
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(length) => bytes = &bytes[length..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if !wait(stream.as_fd(), PollFlags::POLLOUT, Some(deadline), ended)? {
                    return Err("the runtime does not read the plugin's answers".to_owned().into());
                }
            }
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Err(Failure::Closed),
            Err(error) => return Err(format!("can't send to the runtime: {error}").into()),
        }
    }
    Ok(())
}

/// Waits until the descriptor is ready. Returns false at the deadline.
fn wait(
    descriptor: BorrowedFd<'_>,
    flags: PollFlags,
    deadline: Option<Instant>,
    ended: BorrowedFd<'_>,
) -> Result<bool, Failure> {
    loop {
        let mut descriptors = [PollFd::new(ended, PollFlags::POLLIN), PollFd::new(descriptor, flags)];
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // Rounded up, so that poll does not spin through the last millisecond.
        let left =
            left.map(|left| PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX));
        match poll(&mut descriptors, left.unwrap_or(PollTimeout::NONE)) {
            Ok(0) => return Ok(false),
            Ok(_) if descriptors[0].any().unwrap_or(true) => return Err(Failure::Ended),
            Ok(_) => return Ok(true),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(format!("can't wait for the runtime: {errno}").into()),
        }
    }
}

/// Watches the directory of the socket, to reconnect as soon as a runtime starts.
struct SocketWatch<'a> {
    /// `None` if the kernel refuses another instance (`fs.inotify.max_user_instances`).
    inotify: Option<Inotify>,
    directory: Option<&'a Path>,
    name: Option<&'a OsStr>,
}

impl<'a> SocketWatch<'a> {
    fn new(path: &'a Path) -> Self {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok();
        Self { inotify, directory: path.parent(), name: path.file_name() }
    }

    /// Starts to watch before an attempt, and discards older events.
    fn start(&self) {
        if let (Some(inotify), Some(directory)) = (&self.inotify, self.directory) {
            // Fails if the directory is missing. Then only the backoff applies.
            let _ = inotify.add_watch(directory, AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO);
            while inotify.read_events().is_ok() {}
        }
    }

    /// Waits until the socket is created. Returns false after `time`.
    fn wait(&self, time: Duration, ended: BorrowedFd<'_>) -> Result<bool, Failure> {
        let deadline = Instant::now() + time;
        let descriptor = self.inotify.as_ref().map_or(ended, Inotify::as_fd);
        while wait(descriptor, PollFlags::POLLIN, Some(deadline), ended)? {
            let events = self.inotify.as_ref().and_then(|inotify| inotify.read_events().ok()).unwrap_or_default();
            if events.iter().any(|event| event.name.as_deref() == self.name) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::nri::{NriContainer, NriPod};
    use crate::scratch::Directory;
    use std::fs::File;
    use std::io::pipe;
    use std::os::unix::net::UnixListener;

    struct Ignore;

    impl NriHandler for Ignore {
        fn synchronize(&mut self, _: Vec<NriPod>, _: Vec<NriContainer>) {}
        fn start(&mut self, _: &NriPod, _: &NriContainer) {}
        fn started(&mut self, _: &NriPod, _: &NriContainer) {}
        fn stopped(&mut self, _: &NriPod, _: &NriContainer) {}
        fn removed(&mut self, _: &NriPod, _: &NriContainer) {}
    }

    #[test]
    fn the_creation_of_the_socket_ends_a_backoff_and_that_of_another_file_does_not() {
        let hour = Duration::from_secs(3600);
        let directory = Directory::new("nri-watch");
        let path = directory.join("nri.sock");
        let ((ended, end), watch) = (pipe().expect("a pipe"), SocketWatch::new(&path));
        watch.start();
        File::create(directory.join("other")).expect("created");
        assert_eq!(watch.wait(Duration::from_millis(1), ended.as_fd()), Ok(false));
        let _listener = UnixListener::bind(&path).expect("bound");
        assert_eq!(watch.wait(hour, ended.as_fd()), Ok(true));
        watch.start();
        drop(end);
        assert_eq!(watch.wait(hour, ended.as_fd()), Err(Failure::Ended));
    }

    #[test]
    fn a_registration_that_the_runtime_does_not_complete_times_out() {
        let ((mut stream, _runtime), (ended, _end)) = (UnixStream::pair().expect("a pair"), pipe().expect("a pipe"));
        let (mut session, deadline) = (Session::default(), Instant::now());
        let result = exchange(&mut stream, &mut session, &mut Ignore, |_| {}, deadline, ended.as_fd());
        let cause = "the runtime did not register the plugin within 30 s; see its log";
        assert_eq!(result, Err(Failure::Cause(cause.into())));
    }
}
