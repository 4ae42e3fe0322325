//! Signals that end this process, caught for as long as a child must not outlive it.

use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::os::fd::{AsFd, BorrowedFd};

/// The signals that end a process by default and that users and runtimes send, read from a descriptor. They are
/// delivered again once this is dropped.
pub(super) struct Signals {
    fd: SignalFd,
    before: SigSet,
}

impl Signals {
    /// Catches them, if they are sent to this thread or to a process that has no other.
    pub(super) fn catch() -> Result<Self, Errno> {
        let caught = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT]);
        let fd = SignalFd::with_flags(&caught, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let before = caught.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        Ok(Self { fd, before })
    }

    /// One that was received.
    pub(super) fn next(&mut self) -> Option<Signal> {
        let received = self.fd.read_signal().ok().flatten()?;
        i32::try_from(received.ssi_signo).ok().and_then(|number| Signal::try_from(number).ok())
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        let _ = self.before.thread_set_mask();
    }
}
