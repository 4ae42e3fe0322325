//! Becomes a user and keeps one connection. Sends a token over it for each line of stdin and prints the answer.

use crate::endpoint::{Endpoint, Protocol};
use crate::send::TOKEN;
use crate::user::User;
use anyhow::{Context, ensure};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

/// How long to wait for the connection, and for each answer.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub(crate) struct Hold {
    #[command(flatten)]
    user: User,
    /// Where to: tcp:ADDR:PORT
    to: Endpoint,
}

impl Hold {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        ensure!(self.to.protocol == Protocol::Tcp, "expected tcp:ADDR:PORT, got udp");
        self.user.become_it()?;
        let stream = TcpStream::connect_timeout(&self.to.address, PATIENCE).context("connect")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut answers = BufReader::new(&stream);
        for line in std::io::stdin().lines() {
            line?;
            (&stream).write_all(TOKEN).context("send over the connection")?;
            let mut answer = String::new();
            answers.read_line(&mut answer).context("read from the connection")?;
            ensure!(!answer.is_empty(), "the connection was closed");
            print!("{answer}");
        }
        Ok(())
    }
}
