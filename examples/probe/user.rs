//! The user that sends packets.

use anyhow::Context;
use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};

#[derive(clap::Args)]
pub(crate) struct User {
    /// The UID of the sender
    #[arg(long)]
    uid: u32,
    /// The GID of the sender
    #[arg(long)]
    gid: u32,
}

impl User {
    /// Drops all other identities permanently.
    pub(crate) fn become_it(&self) -> anyhow::Result<()> {
        setgroups(&[]).context("drop groups")?;
        setgid(Gid::from_raw(self.gid)).with_context(|| format!("become gid {}", self.gid))?;
        setuid(Uid::from_raw(self.uid)).with_context(|| format!("become uid {}", self.uid))
    }
}
