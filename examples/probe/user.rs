//! The user that sends packets.

use anyhow::Context;
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
use std::os::fd::AsFd;

#[derive(clap::Args)]
pub(crate) struct User {
    /// The UID of the sender
    #[arg(long)]
    uid: u32,
    /// The GID of the sender
    #[arg(long)]
    gid: u32,
    /// The mark of the sender's packets (SO_MARK); only root may set one
    #[arg(long)]
    mark: Option<u32>,
}

impl User {
    /// Sets the mark of a socket's packets.
    pub(crate) fn mark(&self, socket: &impl AsFd) -> nix::Result<()> {
        self.mark.map_or(Ok(()), |mark| setsockopt(socket, sockopt::Mark, &mark))
    }

    /// Drops all other identities permanently.
    pub(crate) fn become_it(&self) -> anyhow::Result<()> {
        setgroups(&[]).context("drop groups")?;
        setgid(Gid::from_raw(self.gid)).with_context(|| format!("become gid {}", self.gid))?;
        setuid(Uid::from_raw(self.uid)).with_context(|| format!("become uid {}", self.uid))
    }
}
