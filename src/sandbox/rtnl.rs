//! Talking to the kernel's routing side (rtnetlink) from the thread that is in the namespace.

use crate::cni::{Code, Error};
use nix::errno::Errno;
use rtnetlink::Handle;

/// The kernel gives lo this index in every namespace (net/core/dev.c: it is made first).
pub(super) const LO: u32 = 1;

/// Runs `work` with a socket of the calling thread's namespace.
pub(super) fn run<T>(work: impl AsyncFnOnce(Handle) -> Result<T, rtnetlink::Error>) -> Result<T, rtnetlink::Error> {
    let failed = |e: std::io::Error| rtnetlink::Error::NamespaceError(e.to_string());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().map_err(failed)?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(failed)?;
        tokio::spawn(connection);
        work(handle).await
    })
}

/// That something is there already is as good as having added it.
pub(super) fn unless_there(result: Result<(), rtnetlink::Error>) -> Result<(), rtnetlink::Error> {
    unless(result, &[Errno::EEXIST])
}

/// That something has gone already is as good as having removed it.
pub(super) fn unless_gone(result: Result<(), rtnetlink::Error>) -> Result<(), rtnetlink::Error> {
    unless(result, &[Errno::ENOENT, Errno::ESRCH])
}

fn unless(result: Result<(), rtnetlink::Error>, fine: &[Errno]) -> Result<(), rtnetlink::Error> {
    match result {
        Err(rtnetlink::Error::NetlinkError(e)) if fine.iter().any(|errno| e.raw_code() == -(*errno as i32)) => Ok(()),
        other => other,
    }
}

pub(super) fn failed(what: &str, why: &dyn std::fmt::Display) -> Error {
    Error::new(Code::KernelRefused, format!("{what}: {why}"))
}
