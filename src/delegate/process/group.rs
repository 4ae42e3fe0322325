//! A child and what it starts: its process group.
//!
//! Signals that end this process, caught for as long as a child must not outlive it.

use crate::netlink::again;
use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, pidfd_open};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::atomic::{AtomicI32, Ordering};

/// The group that runs now, for [`kill_running`]; 0 where none does. The plugin runs one at a time.
static RUNNING: AtomicI32 = AtomicI32::new(0);

/// Kills the process group that runs now, for a process that is about to end.
pub(in crate::delegate) fn kill_running() {
    let group = RUNNING.swap(0, Ordering::SeqCst);
    if group != 0 {
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
}

/// The process group of a child. It is killed with this, unless the child has ended by itself: what that
/// left behind stays.
pub(super) struct ProcessGroup {
    leader: Pid,
    /// Readable once the child has ended; `None` where the kernel has no such descriptor (before 5.3) or
    /// none is left.
    end: Option<OwnedFd>,
    ended: bool,
}

impl ProcessGroup {
    pub(super) fn of(child: &Child) -> Self {
        // Linux's process IDs are below 2^22 (proc(5), `pid_max`).
        let leader = Pid::from_raw(child.id().cast_signed());
        RUNNING.store(leader.as_raw(), Ordering::SeqCst);
        let end =
            rustix::process::Pid::from_raw(leader.as_raw()).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self { leader, end, ended: false }
    }

    /// As on a kernel without such descriptors.
    #[cfg(test)]
    pub(super) fn without_end(&mut self) {
        self.end = None;
    }

    /// A descriptor that tells the child's end.
    pub(super) fn end(&self) -> Option<BorrowedFd<'_>> {
        self.end.as_ref().map(AsFd::as_fd)
    }

    /// Whether nothing tells the child's end by itself.
    pub(super) const fn must_be_asked(&self) -> bool {
        self.end.is_none()
    }

    /// Whether the child has ended. It is not reaped: as long as it isn't, no other process has its ID.
    pub(super) fn leader_has_ended(&self) -> Result<bool, Errno> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        Ok(again(|| waitid(Id::Pid(self.leader), flags))? != WaitStatus::StillAlive)
    }

    pub(super) fn kill(&self) {
        match killpg(self.leader, Signal::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(errno) => tracing::warn!("process group {} can't be killed: {errno}", self.leader),
        }
    }

    /// The child has ended and is reaped.
    pub(super) fn has_ended(&mut self) {
        self.ended = true;
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if !self.ended {
            self.kill();
        }
        let _ = RUNNING.compare_exchange(self.leader.as_raw(), 0, Ordering::SeqCst, Ordering::SeqCst);
    }
}

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
