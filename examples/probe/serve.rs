//! Listens and answers with its label, the local and the remote address and, for TCP, the original destination before
//! NAT.

use crate::endpoint::{Endpoint, Protocol};
use crate::user::User;
use anyhow::Context;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, getsockopt, listen, setsockopt, socket, sockopt,
};
use serde::Serialize;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::thread;

#[derive(clap::Args)]
pub(crate) struct Serve {
    /// The label in the answers
    #[arg(long)]
    label: String,
    #[command(flatten)]
    user: User,
    /// Where to listen: tcp:ADDR:PORT or udp:ADDR:PORT
    #[arg(required = true)]
    endpoints: Vec<Endpoint>,
}

#[derive(Serialize)]
struct Answer<'a> {
    label: &'a str,
    protocol: Protocol,
    /// The port of the listener. With TPROXY, `local` has another port.
    listener: u16,
    local: SocketAddr,
    peer: SocketAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_destination: Option<SocketAddr>,
}

impl Serve {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let (tcp, udp): (Vec<_>, Vec<_>) = self.endpoints.iter().partition(|e| e.protocol == Protocol::Tcp);
        // A transparent listener needs a capability, so open it before the change of user. The owner of a datagram is
        // the user that opened the socket (xt_owner), so open that one afterwards.
        for Endpoint { address, .. } in tcp {
            let listener = listen_tcp(address, &self.user).with_context(|| format!("listen on tcp:{address}"))?;
            let label = self.label.clone();
            thread::spawn(move || serve_tcp(&label, address.port(), &listener));
        }
        self.user.become_it()?;
        for Endpoint { address, .. } in udp {
            let socket = UdpSocket::bind(address).with_context(|| format!("listen on udp:{address}"))?;
            self.user.mark(&socket)?;
            let label = self.label.clone();
            thread::spawn(move || serve_udp(&label, &socket));
        }
        println!("ready");
        crate::wait_for_end_of_stdin()
    }
}

/// Opens a listener for one address family, transparent as TPROXY requires.
fn listen_tcp(address: SocketAddr, user: &User) -> anyhow::Result<TcpListener> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    setsockopt(&fd, sockopt::IpTransparent, &true)?;
    user.mark(&fd)?;
    if address.is_ipv6() {
        setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
    listen(&fd, Backlog::MAXCONN)?;
    Ok(TcpListener::from(fd))
}

fn serve_tcp(label: &str, port: u16, listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        let label = label.to_owned();
        thread::spawn(move || {
            if let Err(error) = answer_tcp(&label, port, &stream) {
                eprintln!("probe: {label}: {error:#}");
            }
        });
    }
}

/// Answers each line until the connection ends.
fn answer_tcp(label: &str, port: u16, mut stream: &TcpStream) -> anyhow::Result<()> {
    let local = stream.local_addr()?;
    let answer = Answer {
        label,
        protocol: Protocol::Tcp,
        listener: port,
        local,
        peer: stream.peer_addr()?,
        original_destination: original_destination(stream)?.or((local.port() != port).then_some(local)),
    };
    let answer = line(&answer)?;
    for token in BufReader::new(stream).lines() {
        token?;
        stream.write_all(answer.as_bytes())?;
    }
    Ok(())
}

fn serve_udp(label: &str, socket: &UdpSocket) {
    let mut token = [0; 64];
    loop {
        let answered = socket.recv_from(&mut token).map_err(anyhow::Error::from).and_then(|(_, peer)| {
            let local = socket.local_addr()?;
            let listener = local.port();
            let answer = Answer { label, protocol: Protocol::Udp, listener, local, peer, original_destination: None };
            Ok(socket.send_to(line(&answer)?.as_bytes(), peer)?)
        });
        if let Err(error) = answered {
            eprintln!("probe: {label}: {error:#}");
        }
    }
}

fn line(answer: &Answer<'_>) -> anyhow::Result<String> {
    Ok(serde_json::to_string(answer)? + "\n")
}

/// Returns the destination before NAT; `None` if the connection is not tracked.
fn original_destination(stream: &TcpStream) -> anyhow::Result<Option<SocketAddr>> {
    let found = if stream.local_addr()?.is_ipv4() {
        getsockopt(stream, sockopt::OriginalDst).map(|raw| {
            let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
            SocketAddr::from((ip, u16::from_be(raw.sin_port)))
        })
    } else {
        getsockopt(stream, sockopt::Ip6tOriginalDst).map(|raw| {
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            SocketAddr::from((ip, u16::from_be(raw.sin6_port)))
        })
    };
    match found {
        Ok(address) => Ok(Some(address)),
        // ENOENT: no entry. ENOPROTOOPT: connection tracking is not in use in this netns.
        Err(nix::Error::ENOENT | nix::Error::ENOPROTOOPT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
