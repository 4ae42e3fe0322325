//! Becomes a user, sends one token and prints the answer.

use crate::endpoint::{Endpoint, Protocol};
use crate::user::User;
use anyhow::bail;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, setsockopt, socket, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::time::Duration;

#[derive(clap::Args)]
pub(crate) struct Send {
    #[command(flatten)]
    user: User,
    /// How long to wait for the answer
    #[arg(long, default_value_t = 60_000)]
    timeout_ms: u64,
    /// Where to: tcp:ADDR:PORT or udp:ADDR:PORT
    to: Endpoint,
}

pub(crate) const TOKEN: &[u8] = b"detour?\n";

impl Send {
    /// Sends the token. Prints the answer, or prints `{"error": …}` and fails.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        self.user.become_it()?;
        let timeout = Duration::from_millis(self.timeout_ms);
        let answer = match self.to.protocol {
            Protocol::Tcp => self.over_tcp(timeout),
            Protocol::Udp => self.over_udp(timeout),
        };
        match answer {
            Ok(answer) => {
                print!("{answer}");
                Ok(ExitCode::SUCCESS)
            }
            Err(error) => {
                println!("{}", serde_json::json!({ "error": reason(&error)? }));
                Ok(ExitCode::FAILURE)
            }
        }
    }

    fn over_tcp(&self, timeout: Duration) -> std::io::Result<String> {
        let mut stream = self.connected(timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.write_all(TOKEN)?;
        // The server closes the connection when this side stops sending.
        stream.shutdown(Shutdown::Write)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// Opens a connection. Its first packet has the mark, too.
    fn connected(&self, timeout: Duration) -> std::io::Result<TcpStream> {
        let to = self.to.address;
        let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        self.user.mark(&fd)?;
        let limit = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
        setsockopt(&fd, sockopt::SendTimeout, &TimeVal::milliseconds(limit))?;
        match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
            // A connect that times out is EINPROGRESS (socket(7), SO_SNDTIMEO).
            Err(nix::Error::EINPROGRESS) => Err(ErrorKind::TimedOut.into()),
            connected => Ok(connected.map(|()| TcpStream::from(fd))?),
        }
    }

    fn over_udp(&self, timeout: Duration) -> std::io::Result<String> {
        let to = self.to.address;
        let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        self.user.mark(&socket)?;
        socket.connect(to)?;
        socket.set_read_timeout(Some(timeout))?;
        socket.send(TOKEN)?;
        let mut answer = [0; 512];
        let length = socket.recv(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
    }
}

fn reason(error: &std::io::Error) -> anyhow::Result<&'static str> {
    Ok(match error.kind() {
        // A read that times out is EAGAIN (socket(7), SO_RCVTIMEO).
        ErrorKind::TimedOut | ErrorKind::WouldBlock => "timeout",
        ErrorKind::ConnectionRefused => "refused",
        ErrorKind::ConnectionReset => "reset",
        ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable => "unreachable",
        ErrorKind::PermissionDenied => "denied",
        _ => bail!("send: {error}"),
    })
}
