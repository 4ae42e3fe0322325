//! The pod's network namespace, and the proxy in it.

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{Uid, setfsuid};
use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// A namespace that is mounted at a path.
pub(crate) struct Netns {
    path: PathBuf,
}

/// Sockets that wait; the proxy, as far as rules see it.
#[derive(Default)]
pub(crate) struct Proxy {
    _tcp: Vec<TcpListener>,
    _udp: Option<UdpSocket>,
}

impl Netns {
    /// A new one with an interface, an address and a default route, for IPv4 alone.
    pub(crate) fn new(path: &Path) -> Self {
        std::fs::write(path, "").expect("written");
        thread::scope(|scope| {
            let make = || {
                unshare(CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
                std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").expect("written");
                std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").expect("written");
                for arguments in [
                    "link set lo up",
                    "link add eth0 type veth peer name far",
                    "addr add 10.88.0.2/24 dev eth0",
                    "link set eth0 up",
                    "link set far up",
                    "route add default via 10.88.0.1",
                ] {
                    let status = Command::new("ip").args(arguments.split(' ')).status().expect("ip starts");
                    assert!(status.success(), "ip {arguments}");
                }
                mount(Some("/proc/thread-self/ns/net"), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                    .expect("mounted");
            };
            scope.spawn(make).join().expect("made");
        });
        Self { path: path.to_owned() }
    }

    /// Does `work` in it.
    pub(crate) fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let inside = || {
                setns(File::open(&self.path).expect("there"), CloneFlags::CLONE_NEWNET).expect("entered");
                work()
            };
            scope.spawn(inside).join().expect("done")
        })
    }

    /// Runs a command in it that must succeed.
    pub(crate) fn run(&self, command: &str) {
        let words: Vec<&str> = command.split(' ').collect();
        let status = self.within(|| Command::new(words[0]).args(&words[1..]).status().expect("it starts"));
        assert!(status.success(), "{command}");
    }

    /// A proxy that runs as `uid` and listens on these ports of TCP, and on 15053 of UDP.
    pub(crate) fn proxy(&self, uid: u32, ports: &[u16]) -> Proxy {
        self.within(|| {
            // Whose a socket is, is decided when it is opened, by the thread.
            setfsuid(Uid::from_raw(uid));
            let listen = |port: &u16| TcpListener::bind(("0.0.0.0", *port)).expect("free");
            Proxy {
                _tcp: ports.iter().map(listen).collect(),
                _udp: ports.contains(&15053).then(|| UdpSocket::bind("127.0.0.1:15053").expect("free")),
            }
        })
    }
}
