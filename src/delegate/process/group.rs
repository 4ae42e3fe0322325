//! A child and what it starts: its process group.

use crate::netlink::again;
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
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
