//! A pod with an unnamed network namespace without processes, which is removed when its file is closed.

use super::new_netns::{new_netns, path_of, tool_in};
use std::fs::File;
use std::path::PathBuf;
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

    /// Returns the same container with a new network namespace.
    pub(crate) fn replaced(&self) -> Self {
        let pod = Self { container_id: self.container_id.clone(), netns: new_netns(), link: None };
        pod.tool("ip", &["-batch", "-"], &[LO, LINKS].concat());
        pod
    }

    /// Returns the path of the network namespace.
    pub(crate) fn netns(&self) -> PathBuf {
        self.link.clone().unwrap_or_else(|| path_of(&self.netns))
    }

    /// Runs a tool in the network namespace, which must succeed, and returns its stdout.
    #[track_caller]
    pub(crate) fn tool(&self, program: &str, arguments: &[&str], stdin: &str) -> String {
        tool_in(&self.netns(), program, arguments, stdin)
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
