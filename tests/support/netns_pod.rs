//! A pod with an unnamed network namespace without processes, which is removed when its file is closed.

use super::called::start;
use super::new_netns::{in_netns, netns_with_users};
use nix::sched::{CloneFlags, unshare};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

const LO: &str = "link set lo up
";
const LINKS: &str = "link add eth0 type veth peer name peer0
link set eth0 up
link set peer0 up
addr add 10.88.0.2/24 dev eth0
addr add fd88::2/64 dev eth0 nodad
";

pub(crate) struct Pod {
    /// Unique on this machine.
    pub(crate) container_id: String,
    netns: File,
    /// A path of the network namespace with a name like those of containerd.
    link: Option<PathBuf>,
}

/// The outcome of a tool.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) success: bool,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Pod {
    /// Creates a pod with an IPv4 and an IPv6 address.
    pub(crate) fn new() -> Self {
        let pod = Self { container_id: next_container_id(), netns: new_netns(), link: None };
        pod.tool("ip", &["-batch", "-"], &[LO, LINKS].concat());
        pod
    }

    /// Creates a pod of containerd whose lo the loopback plugin has not set up yet.
    pub(crate) fn with_lo_down() -> Self {
        let mut pod = Self { container_id: next_container_id(), netns: new_netns(), link: None };
        pod.tool("ip", &["-batch", "-"], LINKS);
        let link = std::env::temp_dir().join(format!("cni-{}", pod.container_id));
        std::os::unix::fs::symlink(pod.netns(), &link).expect("writable");
        pod.link = Some(link);
        pod
    }

    /// Creates a pod whose network namespace belongs to another user namespace, as with `hostUsers: false`.
    pub(crate) fn of_another_user() -> Self {
        let pod = Self { container_id: next_container_id(), netns: netns_with_users(0, 1), link: None };
        pod.tool("ip", &["-batch", "-"], &[LO, LINKS].concat());
        pod
    }

    /// Returns the same container with a new network namespace.
    pub(crate) fn replaced(&self) -> Self {
        let pod = Self { container_id: self.container_id.clone(), netns: new_netns(), link: None };
        pod.tool("ip", &["-batch", "-"], &[LO, LINKS].concat());
        pod
    }

    /// Returns the path of the network namespace.
    pub(crate) fn netns(&self) -> PathBuf {
        let of_file = || format!("/proc/{}/fd/{}", std::process::id(), self.netns.as_raw_fd()).into();
        self.link.clone().unwrap_or_else(of_file)
    }

    /// Runs a tool in the network namespace, which must succeed, and returns its stdout.
    #[track_caller]
    pub(crate) fn tool(&self, program: &str, arguments: &[&str], stdin: &str) -> String {
        let ended = self.try_tool(program, arguments, stdin);
        assert!(ended.success, "{program} {arguments:?}: {}", ended.stderr);
        ended.stdout
    }

    /// Runs a tool in the network namespace.
    pub(crate) fn try_tool(&self, program: &str, arguments: &[&str], stdin: &str) -> Ended {
        let mut command = Command::new(program);
        let child = in_netns(&self.netns(), || start(command.args(arguments), stdin));
        let output = child.wait_with_output().expect("it ends");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        Ended { success: output.status.success(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if let Some(link) = self.link.take() {
            std::fs::remove_file(link).expect("it was made");
        }
    }
}

fn next_container_id() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("convergence-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

fn new_netns() -> File {
    let make = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
        File::open("/proc/thread-self/ns/net").expect("the namespace of this thread")
    };
    std::thread::spawn(make).join().expect("a namespace")
}
