//! Becomes a user, sends one token and prints the answer.

use crate::endpoint::{Endpoint, Protocol};
use crate::user::User;
use anyhow::bail;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::process::ExitCode;
use std::time::Duration;

#[derive(clap::Args)]
pub(crate) struct Send {
    #[command(flatten)]
    user: User,
    /// How long to wait for the answer
    #[arg(long, default_value_t = 20_000)]
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
            Protocol::Tcp => over_tcp(self.to.address, timeout),
            Protocol::Udp => over_udp(self.to.address, timeout),
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
}

fn over_tcp(to: SocketAddr, timeout: Duration) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(TOKEN)?;
    // The server closes the connection when this side stops sending.
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn over_udp(to: SocketAddr, timeout: Duration) -> std::io::Result<String> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(timeout))?;
    socket.send(TOKEN)?;
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
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
