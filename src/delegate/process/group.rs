//! The process group of a child, and the signals that must kill it together with this process.

use crate::netlink::retry_interrupted;
use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, pidfd_open};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::sync::atomic::{AtomicI32, Ordering};

/// The running group, for [`kill_running`], or 0. The plugin runs one at a time.
static RUNNING: AtomicI32 = AtomicI32::new(0);

/// Kills the running process group, for a process that is about to exit.
pub(in crate::delegate) fn kill_running() {
    let group = RUNNING.swap(0, Ordering::SeqCst);
    if group != 0 {
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
}

/// The process group of a child. Dropping it kills the group, unless the child has exited by itself: processes that
/// it left behind keep running.
pub(super) struct ProcessGroup {
    leader: Pid,
    /// Readable once the child has exited; `None` if the kernel has no pidfds (before 5.3) or descriptors ran out.
    pidfd: Option<OwnedFd>,
    exited: bool,
}

impl ProcessGroup {
    pub(super) fn of(child: &Child) -> Self {
        // Linux's process IDs are below 2^22 (proc(5), `pid_max`).
        let leader = Pid::from_raw(child.id().cast_signed());
        RUNNING.store(leader.as_raw(), Ordering::SeqCst);
        let pidfd =
            rustix::process::Pid::from_raw(leader.as_raw()).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self { leader, pidfd, exited: false }
    }

    /// Simulates a kernel without pidfds.
    #[cfg(test)]
    pub(super) fn drop_pidfd(&mut self) {
        self.pidfd = None;
    }

    /// Returns the descriptor that becomes readable when the child exits.
    pub(super) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(AsFd::as_fd)
    }

    /// Returns whether the exit can be waited for with `poll`; otherwise it must be polled at intervals.
    pub(super) const fn has_pidfd(&self) -> bool {
        self.pidfd.is_some()
    }

    /// Returns whether the child has exited. Does not reap it, so that no other process gets its ID.
    pub(super) fn leader_has_exited(&self) -> Result<bool, Errno> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
        Ok(retry_interrupted(|| waitid(Id::Pid(self.leader), flags))? != WaitStatus::StillAlive)
    }

    pub(super) fn kill(&self) {
        match killpg(self.leader, Signal::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(errno) => tracing::warn!("can't kill process group {}: {errno}", self.leader),
        }
    }

    /// Leaves the rest of the group running: the child has exited and is reaped.
    pub(super) fn leave_running(&mut self) {
        self.exited = true;
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if !self.exited {
            self.kill();
        }
        let _ = RUNNING.compare_exchange(self.leader.as_raw(), 0, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// The terminating signals that users and runtimes send, blocked and read from a descriptor. Dropping it unblocks
/// them.
pub(super) struct Signals {
    fd: SignalFd,
    previous_mask: SigSet,
}

impl Signals {
    /// Catches signals to this thread, or to the process if this is its only thread.
    pub(super) fn catch() -> Result<Self, Errno> {
        let caught = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT]);
        let fd = SignalFd::with_flags(&caught, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let previous_mask = caught.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        Ok(Self { fd, previous_mask })
    }

    /// Returns the next signal that was received.
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
        let _ = self.previous_mask.thread_set_mask();
    }
}
