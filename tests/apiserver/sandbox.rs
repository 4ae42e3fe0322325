//! A pod's network namespace, without a name: it goes with its file.

use nix::sched::{CloneFlags, setns, unshare};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) struct Sandbox {
    pub(crate) container_id: String,
    netns: File,
}

impl Sandbox {
    /// With an address on eth0.
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
            File::open("/proc/thread-self/ns/net").expect("the namespace of this thread")
        };
        let netns = std::thread::spawn(make).join().expect("a namespace");
        let sandbox = Self { container_id: format!("apiserver-{}-{number}", std::process::id()), netns };
        sandbox.tool("ip", &["link", "set", "lo", "up"]);
        sandbox.tool("ip", &["link", "add", "eth0", "type", "veth", "peer", "name", "peer0"]);
        sandbox.tool("ip", &["addr", "add", "10.88.0.2/24", "dev", "eth0"]);
        sandbox
    }

    /// Where the namespace is found.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.netns.as_raw_fd()).into()
    }

    /// Whether the plugin's redirection is in it.
    pub(crate) fn redirects(&self) -> bool {
        self.tool("iptables-save", &["-t", "nat"]).contains("-A ISTIO_REDIRECT ")
    }

    fn tool(&self, program: &str, arguments: &[&str]) -> String {
        let run = || {
            setns(&self.netns, CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
            Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"))
        };
        let output = std::thread::scope(|scope| scope.spawn(run).join()).expect("it is started");
        assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }
}
