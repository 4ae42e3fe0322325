//! The pod's network namespace, and the proxy in it.

use crate::support::new_netns::{in_netns, netns_with_users};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{Uid, setfsuid};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

/// A namespace that is mounted at a path.
pub(crate) struct Netns {
    path: PathBuf,
    /// Whom the node knows as the pod's root.
    root: u32,
}

/// Sockets that wait; the proxy, as far as rules see it.
#[derive(Default)]
pub(crate) struct Proxy {
    _tcp: Vec<TcpListener>,
    _udp: Option<UdpSocket>,
}

impl Netns {
    /// A new one with an interface, an address and a default route: for IPv4, and for IPv6 where `dual`. Its
    /// users are the node's from `root` on, as `hostUsers: false` makes it where that is not 0.
    pub(crate) fn new(path: &Path, dual: bool, root: u32) -> Self {
        std::fs::write(path, "").expect("written");
        thread::scope(|scope| {
            let make = || {
                match root {
                    0 => unshare(CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN"),
                    _ => setns(netns_with_users(root, 65536), CloneFlags::CLONE_NEWNET).expect("entered"),
                }
                let off = if dual { "0" } else { "1" };
                std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", off).expect("written");
                std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", off).expect("written");
                let v6 = ["addr add fd88::2/64 dev eth0 nodad", "route add default via fd88::1 dev eth0"];
                for arguments in [
                    "link set lo up",
                    "link add eth0 type veth peer name far",
                    "addr add 10.88.0.2/24 dev eth0",
                    "link set eth0 up",
                    "link set far up",
                    "route add default via 10.88.0.1",
                ]
                .iter()
                .chain(v6.iter().filter(|_| dual))
                {
                    let status = Command::new("ip").args(arguments.split(' ')).status().expect("ip starts");
                    assert!(status.success(), "ip {arguments}");
                }
                mount(Some("/proc/thread-self/ns/net"), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                    .expect("mounted");
            };
            scope.spawn(make).join().expect("made");
        });
        Self { path: path.to_owned(), root }
    }

    /// Does `work` in it.
    pub(crate) fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        in_netns(&self.path, work)
    }

    /// Runs a command in it that must succeed.
    pub(crate) fn run(&self, command: &str) {
        let words: Vec<&str> = command.split(' ').collect();
        let status = self.within(|| Command::new(words[0]).args(&words[1..]).status().expect("it starts"));
        assert!(status.success(), "{command}");
    }

    /// Starts a TCP connection as a user; its outcome does not matter.
    pub(crate) fn connect(&self, uid: u32, to: &str) {
        self.within(|| {
            setfsuid(Uid::from_raw(self.root + uid));
            let _ = TcpStream::connect_timeout(&to.parse().expect("an address"), Duration::from_millis(5));
        });
    }

    /// Sends a datagram as a user.
    pub(crate) fn send(&self, uid: u32, to: &str) {
        self.within(|| {
            setfsuid(Uid::from_raw(self.root + uid));
            let own = if to.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
            UdpSocket::bind(own).expect("free").send_to(b"x", to).expect("sent");
        });
    }

    /// A proxy that runs as `uid` and listens on these ports of TCP, and on 15053 of UDP.
    pub(crate) fn proxy(&self, uid: u32, ports: &[u16]) -> Proxy {
        self.within(|| {
            // Whose a socket is, is decided when it is opened, by the thread.
            setfsuid(Uid::from_raw(self.root + uid));
            // For both families, where there are both.
            let listen =
                |port: &u16| TcpListener::bind(("::", *port)).or_else(|_| TcpListener::bind(("0.0.0.0", *port)));
            let udp = || UdpSocket::bind("[::]:15053").or_else(|_| UdpSocket::bind("0.0.0.0:15053"));
            Proxy {
                _tcp: ports.iter().map(|port| listen(port).expect("free")).collect(),
                _udp: ports.contains(&15053).then(|| udp().expect("free")),
            }
        })
    }
}
